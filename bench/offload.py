"""Streaming a model of 30 billion weights: what the plan says, and what a simulation of it takes.

On an NVIDIA card the speed of copying from pinned memory is measured and put in place of the assumed
one. The rest of these rows is simulated; `streaming.py` measures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..kernels.streaming.simulate import simulate_forward
from ..quant.offload_plan import CARDS, GIB, Card, Work, plan_offload, spread
from .timing import best_milliseconds

BLOCKS, PARAMETERS, OUTSIDE, WIDTH = 60, 480_000_000, 1_200_000_000, 6144
FORMATS = {"bf16": (2.0, False), "int8": (1.0, True), "int4": (4.25 / 8, True)}
TOKENS = {
    "512 x 512": (1536, 0.6),
    "1024 x 1024": (4608, 1.8),
    "480p, 81 frames": (32_760, 6.5),
}
"""Tokens of one step, and GiB of activations at its peak."""

COPY_BYTES = 1 << 28


@dataclass(frozen=True)
class OffloadRow:
    """seconds: of one step by the plan; simulated: evenly spaced blocks and two buffers; contiguous:
    the same blocks in a row; source: "simulated", since no step is run."""

    card: str
    format: str
    work: str
    resident: int
    blocks: int
    streamed_gb: float
    compute_seconds: float
    seconds: float
    simulated: float
    contiguous: float
    hidden: bool
    fits: bool
    bandwidth_gb_per_s: float
    source: str = "simulated"


def bench_offload(
    cards: Iterable[str], progress: Callable[[str], None] = lambda name: None
) -> list[OffloadRow]:
    """Every card, format and length."""
    measured = _measured_bandwidth()
    rows = []
    for name in cards:
        progress(name)
        card = CARDS[name]
        if measured is not None:
            card = dataclasses.replace(card, bandwidth=measured)
        for format in FORMATS:
            rows += [_row(card, format, work) for work in TOKENS]
    return rows


def _row(card: Card, format: str, work: str) -> OffloadRow:
    per_weight, int8 = FORMATS[format]
    tokens, activations = TOKENS[work]
    size = int(PARAMETERS * per_weight)
    plan = plan_offload(
        Work(
            blocks=(size,) * BLOCKS,
            outside=int(OUTSIDE * per_weight),
            multiplications=BLOCKS * PARAMETERS * tokens,
            attention_operations=4 * tokens**2 * WIDTH * BLOCKS,
            int8=int8,
            activations=int(activations * GIB),
        ),
        card,
    )
    compute, copy = plan.compute_seconds / BLOCKS, size / card.bandwidth
    streamed = BLOCKS - plan.resident if plan.streamed_bytes else 0
    return OffloadRow(
        card=card.name,
        format=format,
        work=work,
        resident=plan.resident,
        blocks=BLOCKS,
        streamed_gb=plan.streamed_bytes / 1e9,
        compute_seconds=plan.compute_seconds,
        seconds=plan.seconds,
        simulated=simulate_forward(spread(BLOCKS, streamed), compute, copy),
        contiguous=simulate_forward(
            [block >= BLOCKS - streamed for block in range(BLOCKS)], compute, copy
        ),
        hidden=plan.hidden,
        fits=plan.fits,
        bandwidth_gb_per_s=card.bandwidth / 1e9,
    )


def _measured_bandwidth() -> float | None:
    """Bytes a second from pinned memory to the card; None without one."""
    if not torch.cuda.is_available():
        return None
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    milliseconds = best_milliseconds(
        lambda: target.copy_(source, non_blocking=True), target.device, 4
    )
    return COPY_BYTES / milliseconds * 1e3
