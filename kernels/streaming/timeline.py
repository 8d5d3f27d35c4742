"""A picture of one forward in two lines of text: when it copied, and when it computed."""

from __future__ import annotations

from collections.abc import Sequence

from .traced import Span, StepTrace

WIDTH = 60
EMPTY, PART, FULL = "·", "▒", "█"


def timeline(trace: StepTrace, width: int = WIDTH) -> str:
    """Two rows over the same time: a full cell is busy, a dotted one is not.

    Args:
        trace: of a forward. width: cells.
    """
    if trace.seconds <= 0:
        return ""
    copying = _shares(trace.copies, trace.seconds, width)
    computing = [1 - share for share in _shares(trace.stalls, trace.seconds, width)]
    return f"copying   {_row(copying)}\ncomputing {_row(computing)}  {trace.seconds * 1e3:.0f} ms"


def _shares(spans: Sequence[Span], seconds: float, width: int) -> list[float]:
    """For each cell, the share of its time that the spans cover."""
    cell = seconds / width
    shares = []
    for index in range(width):
        left, right = index * cell, (index + 1) * cell
        covered = sum(max(min(end, right) - max(start, left), 0.0) for start, end in spans)
        shares.append(min(covered / cell, 1.0))
    return shares


def _row(shares: Sequence[float]) -> str:
    return "".join(FULL if s >= 2 / 3 else PART if s >= 1 / 3 else EMPTY for s in shares)
