"""The CPU backend: torch's integer matmul in row blocks, everything around it done in cache.

oneDNN's int8 product runs twice as fast as its bf16 one on a processor with VNNI; rotating,
quantizing and scaling a whole matrix at a time would spend that gain on memory traffic. No copy of
the weights is made.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..backend import LinearRequest
from ..hadamard import regular_hadamard, rotate_in_steps
from ..int8 import SCALE_FLOOR
from ..integer_product import why_inexact_on_cpu

ROWS = 2048
"""Rows of one integer product: fewer unpack the weights too often (256 rows: a fifth slower)."""

PANEL = 2816
"""Most columns of one integer product, so that its int32 sums (22 MiB with all rows) stay in the
last level of the cache."""

CACHE_ELEMENTS = 1 << 19
"""Elements that rotating, quantizing and scaling work on at a time: 2 MiB of float32."""

BLAS_GROUP = 64
"""The part of a rotation of 256 that a matrix product does; steps of additions do the rest."""


class CpuBackend:
    """Runs the INT8 linear on the CPU's integer units."""

    name = "cpu"

    def refuses(self, request: LinearRequest) -> str | None:
        """Refuses other devices, and processors on which torch's integer product is inexact."""
        if request.device != "cpu":
            return f"runs on the CPU only, the tensors are on {request.device}"
        return why_inexact_on_cpu()

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        group_size: int | None,
    ) -> torch.Tensor:
        """`kernels.int8.int8_linear`, rounded to x's dtype only where numbers leave the rotation by
        BLAS and at the end; so its error is at most that of the reference."""
        flat = x.reshape(-1, x.shape[-1])
        m, n = flat.shape[0], weight.shape[0]
        out = torch.empty(m, n, dtype=x.dtype)
        columns = weight_scale.reshape(1, -1).float()
        shift = None if bias is None else bias.float()
        width = -(-n // -(-n // PANEL)) if n else 0
        # One buffer for all blocks: memory that is taken anew has to be cleared by the system first.
        buffer = torch.empty(min(m, ROWS) * width, dtype=torch.int32)
        for start in range(0, m, ROWS):
            rows = slice(start, min(start + ROWS, m))
            q, scale = _quantize(flat[rows], group_size)
            for first in range(0, n, max(width, 1)):
                panel = slice(first, min(first + width, n))
                shape = (rows.stop - start, panel.stop - first)
                sums = buffer[: shape[0] * shape[1]].view(shape)
                torch._int_mm(q, weight[panel].t(), out=sums)
                part = None if shift is None else shift[panel]
                _scale_into(out[rows, panel], sums, scale, columns[:, panel], part)
        return out.reshape(*x.shape[:-1], n)


def _quantize(x: torch.Tensor, group_size: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (M, K) int8 and scale (M, 1) float32 of the rotated rows."""
    m, k = x.shape
    codes = torch.empty(m, k, dtype=torch.int8)
    scale = torch.empty(m, 1)
    step = max(1, CACHE_ELEMENTS // max(k, 1))
    rotation = rotation_on_cpu(x, group_size, min(m, step))
    for start in range(0, m, step):
        rows = slice(start, min(start + step, m))
        block = rotation(x[rows])
        unit = torch.maximum(block.amax(-1, keepdim=True), -block.amin(-1, keepdim=True))
        unit.div_(127).clamp_(min=SCALE_FLOOR)
        scale[rows] = unit
        codes[rows] = block.div_(unit).round_()
    return codes, scale


def rotation_on_cpu(
    x: torch.Tensor, group_size: int | None, rows: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that gives `rotate(part, G).float()` in float32 for up to `rows` rows of x.

    Its result is overwritten by the next call. For bf16, groups of 64 go through one bf16 product;
    its result depends on no other row. The other dtypes are added up in steps, since BLAS rounds
    float32 products by the number of rows.
    """
    if group_size is None:
        return lambda part: part.to(torch.float32, copy=True)
    if x.dtype != torch.bfloat16 or group_size not in (BLAS_GROUP, 4 * BLAS_GROUP):
        return lambda part: rotate_in_steps(part.float(), group_size)
    k = x.shape[1]
    matrix = regular_hadamard(BLAS_GROUP, torch.bfloat16)
    product = torch.empty(rows * k // BLAS_GROUP, BLAS_GROUP, dtype=torch.bfloat16)
    inner = torch.empty(product.shape)
    if group_size == BLAS_GROUP:

        def rotate_64(part: torch.Tensor) -> torch.Tensor:
            count = part.numel() // BLAS_GROUP
            torch.mm(part.reshape(-1, BLAS_GROUP), matrix, out=product[:count])
            return inner[:count].copy_(product[:count]).view(part.shape)

        return rotate_64
    outer = torch.empty(inner.numel() // group_size, 4, BLAS_GROUP)

    def rotate_256(part: torch.Tensor) -> torch.Tensor:
        count = part.numel() // BLAS_GROUP
        torch.mm(part.reshape(-1, BLAS_GROUP), matrix, out=product[:count])
        parts = inner[:count].copy_(product[:count]).view(-1, 4, BLAS_GROUP)
        half_sum = parts.sum(1).mul_(0.5)
        out = outer[: parts.shape[0]]
        for index in range(4):
            torch.sub(half_sum, parts[:, 3 - index], out=out[:, index])
        return out.view(part.shape)

    return rotate_256


def _scale_into(
    out: torch.Tensor,
    sums: torch.Tensor,
    row_scale: torch.Tensor,
    column_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """out (M, N) = sums * row_scale * column_scale + bias, in float32 before the last rounding."""
    step = max(1, CACHE_ELEMENTS // max(sums.shape[1], 1))
    buffer = torch.empty(min(step, sums.shape[0]), sums.shape[1])
    for start in range(0, sums.shape[0], step):
        rows = slice(start, min(start + step, sums.shape[0]))
        block = torch.mul(sums[rows], row_scale[rows], out=buffer[: rows.stop - start])
        if bias is None:
            block.mul_(column_scale)
        else:
            torch.addcmul(bias, block, column_scale, out=block)
        out[rows] = block
