"""How the dense layers compute: in which type, and whether they are compiled."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import torch
from torchrec.models.dlrm import DLRM

from hotrec.types import Precision


def use_precision(precision: Precision, device: torch.device) -> None:
    """Set how this process multiplies float32 matrices, and check that the device can do it.

    Only the dense layers multiply matrices: lookups, pooling and updates have kernels of their own.

    Raises:
        ValueError: if the device cannot.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if precision is not Precision.fp32 and major < 8:
            raise ValueError(
                f"trainer.precision: expected fp32 on a GPU of compute capability "
                f"{major}.{minor}, got {precision.name}, which takes 8.0. Set "
                "trainer.precision=fp32, or compute on a newer GPU."
            )
    elif precision is Precision.tf32:
        raise ValueError(
            f"trainer.precision: expected fp32 or bf16 on {device.type}, got tf32, which only GPUs "
            "have. Set trainer.precision=fp32, or compute on a GPU."
        )
    # Of the ways to say it the one that no version from 2.11 to 2.14 warns of or mixes up.
    torch.set_float32_matmul_precision("high" if precision is Precision.tf32 else "highest")


def check_compiler(device: torch.device) -> None:
    """Check that there is what torch.compile calls.

    Raises:
        RuntimeError: if there is no compiler.
    """
    wanted = [os.environ.get("CXX", "g++")] if device.type == "cpu" else ["gcc", "clang"]
    if device.type != "cpu" and "CC" in os.environ:
        wanted = [os.environ["CC"]]
    if not any(shutil.which(name) for name in wanted):
        raise RuntimeError(
            f"trainer.compile: expected a compiler, {' or '.join(wanted)}, for {device.type}, got "
            "none on PATH. Install one, or set trainer.compile=false."
        )


def set_up_dense_layers(
    model: DLRM, device: torch.device, precision: Precision, *, is_compiled: bool
) -> None:
    """Say how the dense layers of a model compute, forward and backward.

    Weights and their gradients stay float32, and so do the rows and theirs. The lookups between
    the layers are not compiled: they talk to other ranks.

    Args:
        model: of ``build_model``.
        device: of the layers; "meta" to plan only.
        precision: tf32 also takes ``use_precision``.
        is_compiled: compile them at their first call; hooks stay outside. The number of samples is
            a variable of what is compiled: the last batch, an evaluation's and the parts of one
            are of other sizes.
    """
    if device.type == "meta" or not (is_compiled or precision is Precision.bf16):
        return  # on meta it is planned, and computes nothing
    for part in (model.dense_arch, model.inter_arch, model.over_arch):
        forward: Callable[..., torch.Tensor] = part.forward
        if is_compiled:
            # A part that cannot be compiled whole raises, rather than run slowly.
            forward = torch.compile(forward, dynamic=True, fullgraph=True)
        if precision is Precision.bf16:
            forward = torch.autocast(device.type, torch.bfloat16)(forward)
        part.forward = forward
