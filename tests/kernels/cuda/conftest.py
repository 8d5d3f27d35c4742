"""The fixture that builds CUDA kernels for the CPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping

import pytest
from cuda_on_cpu import Change, Run, caller, compile_for_cpu


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """`build(kernel, macros, bug)` compiles a kernel and gives the function that runs it."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: the CUDA kernels cannot be run on the CPU")
    folder = tmp_path_factory.mktemp("cuda_on_cpu")
    built: dict[str, ctypes.CDLL] = {}

    def make(kernel: str, macros: Mapping[str, object], bug: Change | None = None) -> Run:
        key = hashlib.sha256(repr((kernel, sorted(macros.items()), bug)).encode()).hexdigest()[:16]
        if key not in built:
            built[key] = compile_for_cpu(compiler, folder / key, kernel, macros, bug)
        return caller(built[key])

    return make
