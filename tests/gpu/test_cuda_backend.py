"""The CUDA kernels on a card, against the reference bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from leandit.kernels.backend import LinearRequest
from leandit.kernels.backends.cuda import CudaBackend
from leandit.kernels.cuda.launch import CudaKernels
from leandit.kernels.dispatch import LinearSettings
from leandit.kernels.hadamard import rotate_in_steps
from leandit.kernels.int8 import int8_linear, quantize_int8_rowwise
from leandit.kernels.linear_dispatch import dispatcher_for
from leandit.kernels.nibbles import pack_nibbles
from leandit.kernels.row_split import RowSplit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHAPES = [(1, 64, 256), (33, 100, 512), (300, 1000, 2688), (4096, 3072, 3072), (17, 5376, 21_504)]


@pytest.fixture(scope="module")
def kernels() -> Any:
    return CudaKernels(torch.device("cuda", 0), None)


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> Any:
    generator = torch.Generator("cuda").manual_seed(m)
    x = torch.randn(m, k, generator=generator, device="cuda").to(dtype)
    weight = torch.randn(n, k, generator=generator, device="cuda")
    q, scale = quantize_int8_rowwise(weight)
    return x, q, scale, torch.randn(n, generator=generator, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [None, 16, 64, 256])
@pytest.mark.parametrize("k", [256, 3072, 16_384, 32_768])
def test_rotate_quantize_equals_its_definition(
    kernels: Any, k: int, group: int | None, dtype: torch.dtype
) -> None:
    x = torch.randn(50, k, device="cuda").to(dtype)
    x[3] = 0
    q, scale = kernels.rotate_quantize(x, group)
    rotated = x.float() if group is None else rotate_in_steps(x.float(), group)
    exact_q, exact_scale = quantize_int8_rowwise(rotated)
    assert torch.equal(scale, exact_scale[:, 0])
    assert torch.equal(q, exact_q)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES, ids=lambda size: str(size))
def test_gemm_equals_its_definition(kernels: Any, m: int, n: int, k: int, bits: int) -> None:
    low, high = (-8, 8) if bits == 4 else (-128, 128)
    q = torch.randint(-128, 128, (m, k), dtype=torch.int8, device="cuda")
    weight = torch.randint(low, high, (n, k), dtype=torch.int8, device="cuda")
    row, column = torch.rand(m, device="cuda"), torch.rand(n, device="cuda")
    bias = torch.randn(n, device="cuda")
    stored = pack_nibbles(weight.view(torch.uint8) & 0xF) if bits == 4 else weight
    out = kernels.gemm(q, row, stored, column, bias, torch.bfloat16, bits)
    sums = (q.double() @ weight.double().T).float()
    expected = sums.mul_(row[:, None]).mul_(column[None]).add_(bias).bfloat16()
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("m", "n", "k"), SHAPES, ids=lambda size: str(size))
def test_the_backend_is_as_exact_as_the_reference(m: int, n: int, k: int) -> None:
    group = next(g for g in (256, 64, 16) if k % g == 0)
    x, q, scale, bias = operands(m, n, k, torch.bfloat16)
    backend = CudaBackend(None)
    request = LinearRequest("cuda", x.dtype, m, n, k, group)
    assert backend.refuses(request) is None
    found = backend.linear(x, q, scale, bias, group).double().cpu()
    host = [tensor.cpu() for tensor in (x, q, scale, bias)]
    exact = rotate_in_steps(host[0].float(), group).double() @ (host[1] * host[2]).double().T
    exact += host[3].double()
    reference = (int8_linear(*host, group).double() - exact).norm()
    assert (found - exact).norm() <= 1.05 * reference


@pytest.mark.parametrize("mode", ["auto", "fixed"])
def test_the_dispatcher_measures_and_splits_without_changing_a_bit_of_its_backend(mode) -> None:
    x, q, scale, bias = operands(5000, 9216, 3072, torch.bfloat16)
    settings = LinearSettings(RowSplit(mode, 1024, 1), backend="leandit-cuda")
    out = dispatcher_for(settings).linear(x, q, scale, bias, 256)
    whole = CudaBackend(None).linear(x, q, scale, bias, 256)
    (decision,) = dispatcher_for(settings).decisions.values()
    if decision.candidate.backend.name == "leandit-cuda":
        assert torch.equal(out, whole)
    else:
        assert (out.float() - whole.float()).norm() < 0.01 * whole.float().norm()
