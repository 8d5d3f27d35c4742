"""The GEMM kernel's source, run on the CPU, against the reference bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_on_cpu import guarded, untouched
from leandit.kernels.nibbles import pack_nibbles

SMALL = {
    "OUTPUT": "Float32",
    "WEIGHT_BITS": 8,
    "TILE_M": 32,
    "TILE_N": 32,
    "DEPTH": 64,
    "WARPS_M": 1,
    "WARPS_N": 2,
    "STAGES": 3,
    "PANELS": 2,
}
DTYPES = {"Float32": torch.float32, "Float16": torch.float16, "BFloat16": torch.bfloat16}


def operands(m: int, n: int, k: int, bits: int = 8, bias: bool = True, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    low, high = (-8, 8) if bits == 4 else (-128, 128)
    q = torch.randint(-128, 128, (m, k), dtype=torch.int8, generator=generator)
    weight = torch.randint(low, high, (n, k), dtype=torch.int8, generator=generator)
    row = torch.rand(m, generator=generator) + 0.01
    column = torch.rand(n, generator=generator) + 0.01
    return q, weight, row, column, torch.randn(n, generator=generator) if bias else None


def reference(
    q: torch.Tensor, weight: torch.Tensor, row: Any, column: Any, bias: Any, dtype: torch.dtype
) -> torch.Tensor:
    out = (q.long() @ weight.long().T).to(torch.int32).float()
    out = out.mul_(row[:, None]).mul_(column[None])
    return (out if bias is None else out.add_(bias)).to(dtype)


def run_kernel(kernel: Callable[..., None], parts: Any, macros: Any, seed: int) -> torch.Tensor:
    q, weight, row, column, bias = parts
    stored = pack_nibbles(weight.view(torch.uint8) & 0xF) if macros["WEIGHT_BITS"] == 4 else weight
    out = guarded(torch.zeros(q.shape[0], weight.shape[0], dtype=DTYPES[macros["OUTPUT"]]))
    kernel(
        guarded(q),
        guarded(stored.view(torch.int8)),
        guarded(row),
        guarded(column),
        None if bias is None else guarded(bias),
        out,
        *q.shape[:1],
        *weight.shape,
        seed,
    )
    assert untouched(out)
    return out


@pytest.mark.parametrize("output", list(DTYPES))
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(32, 32, 64), (1, 1, 32), (33, 31, 96), (70, 45, 160), (5, 100, 32)],
    ids=lambda size: str(size),
)
def test_equals_the_reference_on_ragged_shapes(
    build: Any, m: int, n: int, k: int, bits: int, output: str
) -> None:
    macros = SMALL | {"WEIGHT_BITS": bits, "OUTPUT": output}
    parts = operands(m, n, k, bits, bias=output != "Float16")
    found = run_kernel(build("int8_gemm", macros), parts, macros, seed=m)
    assert torch.equal(found, reference(*parts, DTYPES[output]))


def test_k_may_end_within_a_chunk_pair(build: Any) -> None:
    parts = operands(9, 17, 16 * 5)
    found = run_kernel(build("int8_gemm", SMALL), parts, SMALL, seed=3)
    assert torch.equal(found, reference(*parts, torch.float32))


@pytest.mark.parametrize("seed", range(12))
def test_every_legal_order_of_threads_gives_the_same(build: Any, seed: int) -> None:
    parts = operands(40, 40, 256)
    found = run_kernel(build("int8_gemm", SMALL), parts, SMALL, seed)
    assert torch.equal(found, reference(*parts, torch.float32))


BUGS = {
    "no barrier before the next tile": (
        "int8_gemm.cu",
        "        synchronize_block();  // everybody's",
        "        // everybody's",
    ),
    "no wait for the copies": ("int8_gemm.cu", "copies_wait<STAGES - 2>();", ""),
    "one copy too few waited for": (
        "int8_gemm.cu",
        "copies_wait<STAGES - 2>();",
        "copies_wait<STAGES - 1>();",
    ),
    "wrong lane for a weight's chunk": (
        "weight_fragment.cuh",
        "depth / 16 + lane / 8 % 2",
        "depth / 16 + lane / 16",
    ),
    "wrong row of an input fragment": ("int8_gemm.cu", "i * 16 + lane % 16", "i * 16 + lane / 2"),
    "one row too many read": ("shared_tile.cuh", "first + row < rows", "first + row <= rows"),
    "one chunk too many read": ("shared_tile.cuh", "start < bytes_per_row", "true"),
    "one column too many written": (
        "int8_gemm.cu",
        "if (column + i >= columns) return;",
        "if (column + i > columns) return;",
    ),
    "one row too many written": ("int8_gemm.cu", "if (at >= m) continue;", "if (at > m) continue;"),
    "tiles of the second group of panels taken for the first's": (
        "tile_order.cuh",
        "first + static_cast<int>(inside % width)",
        "static_cast<int>(inside % width)",
    ),
}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS.keys())
def test_a_planted_bug_is_seen(build: Any, bug: Any) -> None:
    kernel = build("int8_gemm", SMALL, bug)
    seen = 0
    for seed in range(6):
        parts = operands(33, 95, 272, seed=seed)
        try:
            found = run_kernel(kernel, parts, SMALL, seed)
        except (AssertionError, RuntimeError):
            seen += 1
            continue
        seen += not torch.equal(found, reference(*parts, torch.float32))
    assert seen
