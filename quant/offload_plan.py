"""How many blocks of a model stay on the card, and what streaming the others costs: plain arithmetic.

With N equal blocks, S of them streamed and evenly spaced, c seconds of computing and m seconds of
copying a block, and a ring of two or more buffers, one forward takes T = max(N * c, S * m): whichever
of the two engines has more to do. It is hidden where S * m <= N * c. `kernels.streaming.simulate` checks
that, and SGLang's published measurements fit the formula for contiguous blocks (R * c + S * max(c, m))
to 0.2 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import SettingsError

GIB = 1 << 30
CONTEXT_BYTES = int(1.25 * GIB)
"""What CUDA's context, the system's desktop and fragmentation take of a card."""

RING = 2
"""Buffers for streamed blocks; a third helps only where the host cannot run ahead."""


@dataclass(frozen=True)
class Card:
    """A card's memory in bytes and its achieved, not its advertised, rates: operations per second of
    linears in 16 and 8 bit and of attention, and bytes per second from pinned memory."""

    name: str
    vram: int
    bf16: float
    int8: float
    attention: float
    bandwidth: float


CARDS: dict[str, Card] = {
    "4090": Card("RTX 4090", 24 * GIB, 140e12, 380e12, 120e12, 27e9),
    "3090": Card("RTX 3090", 24 * GIB, 60e12, 150e12, 55e12, 27e9),
    "4080": Card("RTX 4080", 16 * GIB, 85e12, 230e12, 73e12, 27e9),
    "4060ti": Card("RTX 4060 Ti, 8 lanes", 16 * GIB, 38e12, 100e12, 33e12, 13e9),
    "4060": Card("RTX 4060, 8 lanes", 8 * GIB, 27e12, 70e12, 22e12, 13e9),
}
"""Assumed rates: round numbers below what the cards' users report. No card has been measured here."""


@dataclass(frozen=True)
class Work:
    """One forward: block sizes and what lies outside of them in bytes, multiplications of the linears
    (parameters times tokens), operations of attention, whether linears run in 8 bit, and the bytes of
    activations at the peak."""

    blocks: tuple[int, ...]
    outside: int
    multiplications: float
    attention_operations: float
    int8: bool
    activations: int


@dataclass(frozen=True)
class Offload:
    """The plan. resident: blocks that stay; streamed_bytes: copied in each forward; seconds: of one
    forward; compute_seconds: of one without copies; residents_to_hide: how many would have to stay
    for copying to cost nothing; fits: whether it can run at all; why: in words."""

    resident: int
    streamed_bytes: int
    seconds: float
    compute_seconds: float
    residents_to_hide: int
    ram_bytes: int
    fits: bool
    why: str

    @property
    def hidden(self) -> bool:
        """Whether copying costs no time."""
        return self.fits and self.seconds <= self.compute_seconds * 1.000001


def plan_offload(work: Work, card: Card, ram: int | None = None) -> Offload:
    """How a model runs on a card.

    Args:
        ram: bytes of main memory for the weights, None if it does not matter.

    Raises:
        SettingsError: for a card without memory or rates, or a model without blocks.
    """
    if card.vram <= 0 or min(card.bf16, card.int8, card.attention, card.bandwidth) <= 0:
        raise SettingsError(f"{card.name}: memory and rates must be above 0")
    if not work.blocks or min(work.blocks) <= 0:
        raise SettingsError("the model has no repeated blocks, so there is nothing to stream")
    rate = card.int8 if work.int8 else card.bf16
    compute = 2 * work.multiplications / rate + work.attention_operations / card.attention
    room = card.vram - CONTEXT_BYTES - work.activations - work.outside
    total = sum(work.blocks)
    count = len(work.blocks)
    needed_ram = total + work.outside
    if room >= total:
        resident, streamed = count, 0
    else:
        resident = _residents(work.blocks, room - RING * max(work.blocks))
        streamed = total - sum(sorted(work.blocks, reverse=True)[:resident]) if resident >= 0 else 0
    copy = total / count / card.bandwidth
    to_hide = max(0, math.ceil(count * (1 - compute / count / copy) - 1e-9))
    fits, why = _verdict(room, resident, streamed, needed_ram, ram, work)
    seconds = max(compute, streamed / card.bandwidth)
    return Offload(
        max(resident, 0), streamed, seconds, compute, min(to_hide, count), needed_ram, fits, why
    )


def spread(count: int, streamed: int) -> list[bool]:
    """Which of `count` blocks are streamed, evenly spaced.

    Contiguous residents would leave the copy engine idle while they run.
    """
    return [(i + 1) * streamed // count > i * streamed // count for i in range(count)]


def _residents(blocks: Sequence[int], room: int) -> int:
    """The most blocks that fit, -1 if not even the ring does. The largest go first: they cost most."""
    if room < 0:
        return -1
    used, resident = 0, 0
    for size in sorted(blocks, reverse=True):
        if used + size > room:
            break
        used, resident = used + size, resident + 1
    return resident


def _verdict(
    room: int, resident: int, streamed: int, needed_ram: int, ram: int | None, work: Work
) -> tuple[bool, str]:
    if room < 0:
        return False, (
            f"activations ({work.activations / GIB:.1f} GiB) and the parts outside of the blocks "
            f"({work.outside / GIB:.1f} GiB) alone do not fit"
        )
    if resident < 0:
        largest = max(work.blocks) / GIB
        return False, f"not even two buffers of the largest block ({largest:.2f} GiB) fit"
    if ram is not None and streamed and needed_ram > ram:
        return False, (
            f"streaming needs {needed_ram / GIB:.1f} GiB of main memory for the weights, there are "
            f"{ram / GIB:.1f}"
        )
    if not streamed:
        return True, "everything stays on the card"
    return True, f"{len(work.blocks) - resident} of {len(work.blocks)} blocks are streamed"
