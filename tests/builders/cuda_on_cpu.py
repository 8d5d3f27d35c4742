"""The CUDA kernels, built for the CPU: the same sources, with other instructions under them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from leandit.kernels.cuda.source import FOLDER

HERE = Path(__file__).resolve().parent.parent / "kernels/cuda"
OPTIONS = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-ffp-contract=off"]
GUARD = 1024
"""Elements around every operand that no kernel may read or write."""

Run = Callable[..., None]
Change = tuple[str, str, str]
"""A planted bug: file, text, and what to put in its place."""


def compile_for_cpu(
    compiler: str, folder: Path, kernel: str, macros: Mapping[str, object], bug: Change | None
) -> ctypes.CDLL:
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    shutil.copy(HERE / "instructions.cuh", folder)
    shutil.copy(HERE / f"run_{kernel}.cpp", folder)
    if bug is not None:
        file, text, instead = bug
        source = (folder / file).read_text()
        assert text in source, f"{file} no longer has the line to break"
        (folder / file).write_text(source.replace(text, instead))
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    library = folder / "kernel.so"
    command = [compiler, *OPTIONS, *defines, str(folder / f"run_{kernel}.cpp"), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(library))


def caller(library: ctypes.CDLL) -> Run:
    library.run.restype = ctypes.c_char_p

    def call(*arguments: torch.Tensor | int | None) -> None:
        values = [
            ctypes.c_void_p(a.data_ptr())
            if isinstance(a, torch.Tensor)
            else ctypes.c_void_p(0)
            if a is None
            else ctypes.c_int(a)
            for a in arguments
        ]
        fault = library.run(*values)
        if fault is not None:
            raise RuntimeError(fault.decode())

    return call


def guarded(tensor: torch.Tensor, fill: float = 77) -> torch.Tensor:
    """The tensor in 16-byte aligned memory, between elements that are not its own."""
    flat = torch.full((tensor.numel() + 2 * GUARD + 16,), fill, dtype=tensor.dtype)
    start = GUARD + (-(flat.data_ptr() + GUARD * flat.element_size()) % 16) // flat.element_size()
    inner = flat[start : start + tensor.numel()].view(tensor.shape)
    return inner.copy_(tensor)


def untouched(tensor: torch.Tensor, fill: float = 77) -> bool:
    """Whether the elements around a guarded tensor are as they were."""
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    start = tensor.storage_offset()
    around = torch.cat([flat[:start], flat[start + tensor.numel() :]])
    return bool((around == torch.tensor(fill, dtype=tensor.dtype)).all())
