"""Every kernel compiles for every architecture without spills and with the tensor cores' instruction."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from leandit.kernels.cuda import compiler
from leandit.kernels.cuda.compiler import ARCHITECTURES, CompileError, compile_kernel
from leandit.kernels.cuda.tile import MAX_K, TILES, quantize_macros

SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
GEMMS = {
    f"{tile.m}x{tile.n}, {bits} bit": tile.macros(bits, "BFloat16")
    for tile in TILES
    for bits in (8, 4)
}
EVERY_TILE = ("sm_89",)
"""Where all tiles are compiled; on the others the one with the most registers."""

QUANTIZERS = {
    f"K={k}, G={group}": quantize_macros(k, "BFloat16", group, "Identity")
    for k, group in ((MAX_K, 64),)
}

pytestmark = pytest.mark.skipif(
    compiler.cuda_core_missing() is not None, reason=str(compiler.cuda_core_missing())
)


def disassembler() -> str | None:
    """nvdisasm, from its own package, from triton's, or from a CUDA toolkit."""
    for package, inside in (
        ("nvidia.cu13", "bin/nvdisasm"),
        ("triton", "backends/nvidia/bin/nvdisasm"),
    ):
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in found.submodule_search_locations or () if found else ():
            if (Path(folder) / inside).is_file():
                return str(Path(folder) / inside)
    return shutil.which("nvdisasm")


def machine_code(code: bytes, folder: Path) -> str:
    tool = disassembler()
    if tool is None:
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    path = folder / "kernel.cubin"
    path.write_bytes(code)
    return subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout


def spilled(log: str) -> int:
    ((stores, loads),) = SPILLS.findall(log)
    return int(stores) + int(loads)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_gemm_multiplies_on_the_tensor_cores_without_spills(
    arch: str, tmp_path: Path
) -> None:
    for name, macros in GEMMS.items():
        if arch not in EVERY_TILE and not name.startswith("128x128"):
            continue
        made = compile_kernel("int8_gemm", macros, arch)
        assert spilled(made.log) == 0, name
        assert "IMMA" in machine_code(made.code, tmp_path), name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_quantizer_keeps_its_row_in_registers(arch: str, tmp_path: Path) -> None:
    for name, macros in QUANTIZERS.items():
        made = compile_kernel("rotate_quantize", macros, arch)
        assert spilled(made.log) == 0, name
        text = machine_code(made.code, tmp_path)
        reads = len(re.findall(r"\bLDG\.E\.128", text))
        assert reads == 2 * int(str(macros["PASSES"])), name  # 16 values of 2 bytes a pass
        assert not re.findall(r"\b(LDL|STL)\b", text), name


def test_a_kernel_with_too_few_registers_is_seen_to_spill() -> None:
    macros = quantize_macros(MAX_K, "BFloat16", 256, "Identity") | {"PASSES": 16}
    assert spilled(compile_kernel("rotate_quantize", macros, "sm_80").log) > 0


def test_an_error_names_the_kernel_and_the_compilers_words() -> None:
    with pytest.raises(CompileError, match=r"(?s)rotate_quantize for sm_80: .*no rotation of this"):
        compile_kernel("rotate_quantize", quantize_macros(256, "Float32", 8, "Identity"), "sm_80")


def test_machine_code_is_kept_by_source_options_and_architecture(tmp_path: Path) -> None:
    macros = quantize_macros(1024, "Float32", 16, "Silu")
    first = compile_kernel("rotate_quantize", macros, "sm_89", tmp_path)
    assert first.log
    again = compile_kernel("rotate_quantize", macros, "sm_89", tmp_path)
    assert again.code == first.code and again.log == ""
    compile_kernel("rotate_quantize", macros, "sm_90", tmp_path)
    compile_kernel("rotate_quantize", macros | {"GROUP": 64}, "sm_89", tmp_path)
    assert len(list(tmp_path.glob("*.cubin"))) == 3
    assert not list(tmp_path.glob("*.part"))
    for kept in tmp_path.glob("*.cubin"):
        kept.write_bytes(b"")
    assert compile_kernel("rotate_quantize", macros, "sm_89", tmp_path).code == first.code
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert compile_kernel("rotate_quantize", macros, "sm_89", blocked).code == first.code
