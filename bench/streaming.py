"""Streaming measured: a row of linears, some of which are copied to the card in every forward."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.streaming.cuda_device import CudaStreamingDevice
from ..kernels.streaming.flat_block import FlatBlock
from ..kernels.streaming.ring import BlockRing
from ..kernels.streaming.traced import StepTrace, TimedDevice, TracedDevice
from ..quant.offload_plan import RING, spread
from .timing import best_milliseconds

BLOCKS, LAYERS, WIDTH = 24, 4, 4096
TOKENS = (1024, 4096, 16_384)
WARM_UP, ROUNDS = 2, 5

MakeDevice = Callable[[torch.device, Sequence[FlatBlock]], TimedDevice[Any, Any, Any]]


@dataclass(frozen=True)
class StreamingRow:
    """seconds: of one forward, measured; plan_seconds: max(compute, copy) of the same figures;
    unplanned_seconds: each layer copied when it is needed, the plain way."""

    tokens: int
    blocks: int
    resident: int
    streamed_bytes: int
    seconds: float
    compute_seconds: float
    plan_seconds: float
    unplanned_seconds: float
    overlap: float
    gb_per_s: float
    source: str = "measured"


def bench_streaming(
    device: torch.device,
    make_device: MakeDevice = CudaStreamingDevice,
    blocks: int = BLOCKS,
    width: int = WIDTH,
    tokens: Iterable[int] = TOKENS,
    dtype: torch.dtype = torch.bfloat16,
) -> list[StreamingRow]:
    """None, half and most of the blocks resident, for every length."""
    masters = [
        [_pinned(torch.randn(width, width).to(dtype) * width**-0.5, device) for _ in range(LAYERS)]
        for _ in range(blocks)
    ]
    rows = []
    for count in tokens:
        x = torch.randn(count, width, device=device).to(dtype)
        compute = _compute_seconds(masters, x)
        for resident in (0, blocks // 2, blocks - blocks // 4):
            rows.append(_row(masters, x, resident, compute, make_device))
    return rows


def _row(
    masters: list[list[torch.Tensor]],
    x: torch.Tensor,
    resident: int,
    compute: float,
    make_device: MakeDevice,
) -> StreamingRow:
    streamed = spread(len(masters), len(masters) - resident)
    kept = [
        None if is_streamed else [weight.to(x.device) for weight in block]
        for block, is_streamed in zip(masters, streamed, strict=True)
    ]
    traces = _traces(masters, kept, x, make_device)
    trace = statistics.median_low([t.seconds for t in traces])
    chosen = next(t for t in traces if t.seconds == trace)
    nbytes = sum(w.nbytes for b, s in zip(masters, streamed, strict=True) if s for w in b)
    speed = chosen.bytes_per_second
    return StreamingRow(
        tokens=x.shape[0],
        blocks=len(masters),
        resident=resident,
        streamed_bytes=nbytes,
        seconds=chosen.seconds,
        compute_seconds=compute,
        plan_seconds=max(compute, nbytes / speed) if speed else compute,
        unplanned_seconds=best_milliseconds(lambda: _plain(masters, kept, x), x.device, ROUNDS)
        / 1e3,
        overlap=chosen.overlap,
        gb_per_s=speed / 1e9,
    )


def _traces(
    masters: list[list[torch.Tensor]],
    kept: list[list[torch.Tensor] | None],
    x: torch.Tensor,
    make_device: MakeDevice,
) -> list[StepTrace]:
    flat = [FlatBlock(b if k is None else []) for b, k in zip(masters, kept, strict=True)]
    sizes = [block.nbytes for block in flat]
    device = TracedDevice(make_device(x.device, flat), sizes)
    traces = []
    with BlockRing(device, sizes, [size > 0 for size in sizes], RING) as ring:
        for _ in range(WARM_UP + ROUNDS):
            ring.begin_forward()
            device.begin_trace()
            h = x
            for index, weights in enumerate(kept):
                buffer = ring.enter(index)
                if buffer is not None:
                    weights = flat[index].tensors_in(buffer)
                h = _block(h, weights or [])
                ring.leave(index)
            traces.append(device.end_trace())
    return traces[WARM_UP:]


def _block(h: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for weight in weights:
        h = torch.nn.functional.linear(h, weight)
    return h


def _plain(
    masters: list[list[torch.Tensor]], kept: list[list[torch.Tensor] | None], x: torch.Tensor
) -> torch.Tensor:
    h = x
    for block, weights in zip(masters, kept, strict=True):
        for index, weight in enumerate(block):
            here = weights[index] if weights else weight.to(x.device, non_blocking=True)
            h = torch.nn.functional.linear(h, here)
    return h


def _compute_seconds(masters: list[list[torch.Tensor]], x: torch.Tensor) -> float:
    weights = [weight.to(x.device) for weight in masters[0]]

    def forward() -> None:
        h = x
        for _ in masters:
            h = _block(h, weights)

    return best_milliseconds(forward, x.device, WARM_UP + ROUNDS) / 1e3


def _pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor
