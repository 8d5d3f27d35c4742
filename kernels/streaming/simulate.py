"""One forward in the long run, simulated: a computing and a copying engine, and a ring of buffers."""

from __future__ import annotations

from collections.abc import Sequence

FORWARDS, SETTLED = 12, 3


def simulate_forward(
    streamed: Sequence[bool], compute: float, copy: float, slots: int = 2
) -> float:
    """Seconds of one forward after the first few.

    Args:
        streamed: which blocks are copied. compute, copy: seconds of one block. slots: buffers.
    """
    order = [block for block, is_streamed in enumerate(streamed) if is_streamed]
    pending = [(forward, block) for forward in range(FORWARDS) for block in order]
    copied: dict[tuple[int, int], float] = {}
    freed: list[float] = []
    ends: list[float] = []
    copier = clock = 0.0

    def issue() -> None:
        """Queue copies as far as buffers are free, each after the block before it in its buffer."""
        nonlocal copier
        while len(copied) < min(len(freed) + slots, len(pending)):
            index = len(copied)
            free = freed[index - slots] if index >= slots else 0.0
            copier = max(copier, free) + copy
            copied[pending[index]] = copier

    for forward in range(FORWARDS):
        for block, is_streamed in enumerate(streamed):
            if is_streamed:
                issue()
                clock = max(clock, copied[forward, block])
            clock += compute
            if is_streamed:
                freed.append(clock)
        ends.append(clock)
    return (ends[-1] - ends[SETTLED]) / (FORWARDS - 1 - SETTLED)
