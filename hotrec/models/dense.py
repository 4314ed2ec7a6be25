"""Precision and compilation of the dense layers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import torch

from hotrec.models.zoo import ClickModel
from hotrec.types import Precision


def use_precision(precision: Precision, device: torch.device) -> None:
    """Set the precision of this process's float32 matrix products.

    Only the dense layers multiply matrices: lookups, pooling and updates have their own kernels.

    Raises:
        ValueError: if the device does not support the precision.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if precision is not Precision.fp32 and major < 8:
            raise ValueError(
                f"trainer.precision: expected fp32 on a GPU of compute capability {major}.{minor}, "
                f"got {precision.name}, which needs 8.0. Set trainer.precision=fp32, or compute on "
                "a newer GPU."
            )
    elif precision is Precision.tf32:
        raise ValueError(
            f"trainer.precision: expected fp32 or bf16 on {device.type}, got tf32, which only GPUs "
            "support. Set trainer.precision=fp32, or compute on a GPU."
        )
    # The only setting that works without warnings from torch 2.11 to 2.14.
    torch.set_float32_matmul_precision("high" if precision is Precision.tf32 else "highest")


def check_compiler(device: torch.device) -> None:
    """Check that torch.compile finds a compiler.

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
    model: ClickModel, device: torch.device, precision: Precision, *, is_compiled: bool
) -> None:
    """Set the precision of a model's dense layers, and compile them, forward and backward.

    Weights, rows and their gradients stay float32. Lookups are not compiled, since they communicate
    with other ranks.

    Args:
        model: The model from ``build_architecture``.
        device: The device of the layers; "meta" to plan only.
        precision: The precision; tf32 also needs ``use_precision``.
        is_compiled: Whether to compile the layers at their first call, without hooks and with a
            dynamic batch size, since last batches, evaluations and micro-batches differ in size.
    """
    if device.type == "meta" or not (is_compiled or precision is Precision.bf16):
        return
    for part in model.dense_parts:
        forward: Callable[..., torch.Tensor] = part.forward
        if is_compiled:
            # Raise for graph breaks instead of running slowly.
            forward = torch.compile(forward, dynamic=True, fullgraph=True)
        if precision is Precision.bf16:
            forward = torch.autocast(device.type, torch.bfloat16)(forward)
        part.forward = forward
