"""The INT8 linear on this machine: every way to run it, beside 16 bit and the bare product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.backend import LinearRequest
from ..kernels.dispatch import Dispatcher, LinearSettings, run_in_chunks
from ..kernels.int8 import dequantize_int8
from ..kernels.linear_dispatch import dispatcher_for
from ..kernels.row_split import RowSplit
from .shapes import LinearShape
from .timing import timed

ROUNDS = 5
ERROR_ROWS, ERROR_COLUMNS = 64, 1024
GROUP = 256
BF16, BARE_INT8 = "torch bf16", "torch int8 product alone"
"""Contenders that compute something else: what is to be beaten, and what is the ceiling."""


@dataclass(frozen=True)
class LinearRow:
    """One measurement: ms per call, tera-operations per second, and the error against float64, None
    where the row computes something else."""

    m: int
    n: int
    k: int
    backend: str
    rows_per_call: int
    ms: float
    tops: float
    rel_error: float | None


Work = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Contender:
    """Something to measure. exact says whether its result is the linear."""

    name: str
    rows: int
    work: Work
    exact: bool = True


def bench_linear(
    shapes: Iterable[LinearShape],
    device: str,
    progress: Callable[[LinearShape], None] = lambda shape: None,
) -> list[LinearRow]:
    """Measure every shape; the contenders take turns, and the best of five rounds counts."""
    rows = []
    with torch.inference_mode():
        for shape in shapes:
            progress(shape)
            rows += _bench_shape(shape, torch.device(device))
    return rows


def _bench_shape(shape: LinearShape, device: torch.device) -> list[LinearRow]:
    m, n, k = shape.m, shape.n, shape.k
    generator = torch.Generator(device).manual_seed(0)
    group = next((g for g in (GROUP, 64, 16) if k % g == 0), None)
    x = torch.randn(m, k, generator=generator, device=device).bfloat16()
    codes = torch.randint(-127, 128, (n, k), generator=generator, device=device, dtype=torch.int8)
    scale = torch.rand(n, 1, generator=generator, device=device) * 1e-3 + 1e-4
    bias = torch.randn(n, generator=generator, device=device).bfloat16()
    dense = dequantize_int8(codes, scale, group, torch.bfloat16)
    some = x[:, :k].to(torch.int8)
    contenders = [Contender(BF16, m, lambda: torch.nn.functional.linear(x, dense, bias), False)]
    if device.type == "cpu" or (m > 16 and not k % 8 and not n % 8):
        contenders.append(Contender(BARE_INT8, m, lambda: torch._int_mm(some, codes.t()), False))
    arguments = (x, codes, scale, bias, group)
    contenders += _candidates(LinearRequest(device.type, x.dtype, m, n, k, group), arguments)
    exact = _exact(*arguments)
    times = _take_turns(contenders, device)
    return [
        LinearRow(
            m=m,
            n=n,
            k=k,
            backend=contender.name,
            rows_per_call=contender.rows,
            ms=times[index],
            tops=2 * m * n * k / times[index] / 1e9,
            rel_error=_error(contender.work(), exact) if contender.exact else None,
        )
        for index, contender in enumerate(contenders)
    ]


def _candidates(request: LinearRequest, arguments: tuple[Any, ...]) -> list[Contender]:
    """What the dispatcher would try, its fixed row split and the library's own default included."""
    found: dict[str, Contender] = {}
    for mode in ("off", "auto", "fixed"):
        dispatcher: Dispatcher = dispatcher_for(LinearSettings(RowSplit(mode)))
        for candidate in dispatcher.candidates(request)[0]:
            rows = min(candidate.rows, request.m)

            def work(candidate: Any = candidate) -> torch.Tensor:
                return run_in_chunks(candidate, *arguments)

            name = candidate.backend.name
            found.setdefault(f"{name} {rows}", Contender(name, rows, work))
    return list(found.values())


def _take_turns(contenders: Sequence[Contender], device: torch.device) -> list[float]:
    """The best time of each in milliseconds; in turns, so that a slow moment hits them alike."""
    best = [float("inf")] * len(contenders)
    for round_number in range(ROUNDS + 1):
        for index, contender in enumerate(contenders):
            _, milliseconds = timed(contender.work, device)
            if round_number:
                best[index] = min(best[index], milliseconds)
    return best


def _exact(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    group: int | None,
) -> torch.Tensor:
    """A corner of the result in float64."""
    part, column = codes[:ERROR_COLUMNS], scale[:ERROR_COLUMNS]
    weight = dequantize_int8(part, column, group).double()
    return x[:ERROR_ROWS].double() @ weight.T + bias[:ERROR_COLUMNS].double()


def _error(out: torch.Tensor, exact: torch.Tensor) -> float:
    corner = out[:ERROR_ROWS, :ERROR_COLUMNS].double()
    return ((corner - exact).norm() / exact.norm()).item()
