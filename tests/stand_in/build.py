"""Compiles device.cpp; once for each text of it and each torch. Imports no torch."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
FLAGS = ["-std=c++20", "-O1", "-shared", "-fPIC", "-w"]


def why_not() -> str | None:
    """Why the stand-in cannot be had here; None if it can."""
    if shutil.which("g++") is None:
        return "the CUDA stand-in needs g++, which is not on PATH"
    if not (_torch() / "lib" / "libtorch_cpu.so").exists():
        return "the CUDA stand-in needs torch's shared libraries"
    if (_torch() / "lib" / "libtorch_cuda.so").exists():
        return "the CUDA stand-in needs the CPU build of torch"
    return None


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def libraries() -> list[Path]:
    """What the compiled library needs in the process before it, in this order."""
    lib = _torch() / "lib"
    return [*sorted(lib.glob("libgomp*")), lib / "libc10.so", lib / "libtorch_cpu.so"]


def compiled() -> Path:
    """The compiled library; made if it is not there yet.

    Raises:
        RuntimeError: if the compiler refuses the source.
    """
    torch = _torch()
    facts = [SOURCE.read_bytes(), " ".join(FLAGS).encode(), os.fspath(torch).encode()]
    facts.append(importlib.metadata.version("torch").encode())
    name = hashlib.sha256(b"\0".join(facts)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"hotrec-stand-in-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"device-{name}.so"
    with (folder / f"device-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several ranks, and several test runs, start at once
        if not library.exists():
            partial = library.with_suffix(".partial")
            include = torch / "include"
            command = [
                "g++", *FLAGS, f"-I{include}", f"-I{include}/torch/csrc/api/include",
                os.fspath(SOURCE), "-o", os.fspath(partial), f"-L{torch}/lib", "-lc10",
                "-ltorch_cpu",
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(
                    f"{SOURCE.name}: expected g++ to compile it, got exit code {done.returncode}.\n"
                    f"{done.stderr[-4000:]}"
                )
            partial.rename(library)
    return library
