"""Compiling the kernels at run time with NVRTC, through NVIDIA's cuda-core package.

No compiler, no CUDA toolkit and no GPU are needed for it; the result is machine code of one
architecture. Source: cuda-core's documentation of `Program`.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..whole_file import keep_whole
from .source import FOLDER, build_key, source_of

INSTALL_LINE = 'pip install "cuda-core[cu13]" (or [cu12], as your torch is)'
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""Architectures every kernel is compiled for in the tests: Turing to Blackwell."""

OLDEST = (7, 5)
ELF = b"\x7fELF"
"""What machine code begins with; a file that does not is damaged."""


class CompileError(RuntimeError):
    """NVRTC refused a kernel, or cuda-core cannot be used; says for which and why."""


@dataclass(frozen=True)
class Compiled:
    """Machine code (a cubin), and the compiler's report; "" if it came from the cache."""

    code: bytes
    log: str


def cuda_core_missing() -> str | None:
    """Why kernels cannot be compiled here, or None."""
    for module in ("cuda.core", "cuda.bindings"):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"{module} is not installed: {INSTALL_LINE}"
    return None


def compile_kernel(
    kernel: str,
    macros: Mapping[str, object],
    arch: str,
    cache: Path | None = None,
    anew: bool = False,
) -> Compiled:
    """A kernel for one architecture, from the cache folder where it is there.

    Args:
        kernel: name of a .cu file. macros: see that file. arch: "sm_89" and the like.
        cache: where machine code is kept between sessions; None keeps none. anew: compile even if
            it is there.

    Raises:
        CompileError: with the compiler's message.
    """
    missing = cuda_core_missing()
    if missing is not None:
        raise CompileError(missing)
    core = importlib.import_module("cuda.core")
    version = importlib.import_module("cuda.bindings").__version__
    key = build_key(kernel, macros, arch, version)
    kept = None if cache is None else cache / f"{kernel}-{arch}-{key}.cubin"
    if kept is not None and not anew and kept.is_file():
        code = kept.read_bytes()
        if code.startswith(ELF):
            return Compiled(code, "")
    options = core.ProgramOptions(
        arch=arch,
        std="c++17",
        include_path=str(FOLDER),
        define_macro=[(name, str(value)) for name, value in macros.items()],
        ptxas_options=["-v"],
    )
    log = io.StringIO()
    try:
        code = core.Program(source_of(kernel), "c++", options).compile("cubin", logs=log).code
    except Exception as error:  # cuda-core raises types of its own for each library it calls
        raise CompileError(f"{kernel} for {arch}: {error}") from error
    if kept is not None:
        keep_whole(kept, bytes(code))
    return Compiled(bytes(code), log.getvalue())
