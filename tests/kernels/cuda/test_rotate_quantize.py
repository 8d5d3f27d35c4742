"""The fused rotation and quantization, run on the CPU from its CUDA source."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_on_cpu import guarded, untouched
from leandit.kernels.hadamard import rotate_in_steps
from leandit.kernels.int8 import quantize_int8_rowwise

DTYPES = {"Float32": torch.float32, "Float16": torch.float16, "BFloat16": torch.bfloat16}
ACTIVATIONS = {
    "Identity": lambda x: x,
    "Silu": torch.nn.functional.silu,
    "GeluTanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def macros(group: int, threads: int = 64, passes: int = 1, dtype: str = "BFloat16") -> Any:
    return {
        "INPUT": dtype,
        "GROUP": group,
        "THREADS": threads,
        "PASSES": passes,
        "ACTIVATION": "Identity",
    }


def run_kernel(kernel: Any, x: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    q = guarded(torch.zeros(x.shape, dtype=torch.int8))
    scale = guarded(torch.zeros(x.shape[0]))
    kernel(guarded(x), q, scale, *x.shape, seed)
    assert untouched(q) and untouched(scale)
    return q, scale


def expected(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    rotated = rotate_in_steps(x.float(), group) if group else x.float()
    q, scale = quantize_int8_rowwise(rotated)
    return q, scale[:, 0]


SHAPES = {
    "one warp": (256, 32, 1),
    "ragged": (768, 64, 1),
    "four passes, ragged": (1792, 32, 4),
}
GROUPS = (0, 16, 64, 256)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference_bit_for_bit(build: Any, shape: str, group: int) -> None:
    k, threads, passes = SHAPES[shape]
    dtype = list(DTYPES)[(list(SHAPES).index(shape) + GROUPS.index(group)) % len(DTYPES)]
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(k)).to(DTYPES[dtype])
    x[1] = 0
    x[2, 5] = 300
    kernel = build("rotate_quantize", macros(group, threads, passes, dtype))
    q, scale = run_kernel(kernel, x)
    exact_q, exact_scale = expected(x, group)
    assert torch.equal(scale, exact_scale)
    assert torch.equal(q, exact_q)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_a_row_that_is_not_finite_spoils_itself_only(build: Any, bad: float) -> None:
    x = torch.randn(3, 512)
    x[1, 100] = bad
    q, scale = run_kernel(build("rotate_quantize", macros(64, dtype="Float32")), x)
    clean_q, clean_scale = expected(x[::2], 64)
    assert torch.equal(q[::2], clean_q) and torch.equal(scale[::2], clean_scale)
    assert not scale[1].isfinite()
    assert (q[1].float() * scale[1]).isnan().all()


@pytest.mark.parametrize("activation", ["Silu", "GeluTanh"])
def test_an_activation_on_the_way_in(build: Any, activation: str) -> None:
    x = 3 * torch.randn(4, 512, generator=torch.Generator().manual_seed(0))
    kernel = build("rotate_quantize", macros(256, dtype="Float32") | {"ACTIVATION": activation})
    q, scale = run_kernel(kernel, x)
    exact_q, exact_scale = expected(ACTIVATIONS[activation](x), 256)
    assert torch.allclose(scale, exact_scale, rtol=1e-5)
    assert (q - exact_q).abs().max() <= 1 and (q != exact_q).float().mean() < 0.01


BUGS = {
    "no barrier before the maximum is read": (
        "rotate_quantize.cu",
        "    synchronize_block();\n",
        "",
    ),
    "a lane too far": (
        "hadamard.cuh",
        "shuffle_xor(value, 3 * step)",
        "shuffle_xor(value, 2 * step)",
    ),
    "the reversal forgotten": (
        "hadamard.cuh",
        "float first = sum - 2.0f * d",
        "float first = sum - 2.0f * a",
    ),
    "the end of the row missed": ("rotate_quantize.cu", "if (column >= k) continue;", ""),
    "rounded down": ("rotate_quantize.cu", "round_to_even(divide", "static_cast<int>(divide"),
}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS.keys())
def test_a_planted_bug_is_seen(build: Any, bug: Any) -> None:
    kernel = build("rotate_quantize", macros(256, threads=128), bug)
    seen = 0
    for seed in range(6):
        x = torch.randn(3, 1792, generator=torch.Generator().manual_seed(seed)).bfloat16()
        try:
            q, scale = run_kernel(kernel, x, seed)
        except (AssertionError, RuntimeError):
            seen += 1
            continue
        exact_q, exact_scale = expected(x, 256)
        seen += not (torch.equal(q, exact_q) and torch.equal(scale, exact_scale))
    assert seen
