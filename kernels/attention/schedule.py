"""When attention is dense and when sparse: by step, part of the noise, layer and length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

SAME_SIGMA = 1e-4
"""Relative distance below which two noise levels count as one."""


@dataclass(frozen=True)
class Layers:
    """Layer indices as the user wrote them: single ones, ranges, and negatives from the end."""

    text: str = ""
    ranges: tuple[tuple[int, int], ...] = ()

    def contains(self, layer: int, total: int | None) -> bool:
        """Whether a layer is meant; negatives are, once the number of layers is known."""
        for first, last in self.ranges:
            if total is None and (first < 0 or last < 0):
                continue
            low, high = (_from_start(edge, total) for edge in (first, last))
            if low <= layer <= high:
                return True
        return False


def parse_layers(text: str) -> Layers:
    """`0,1,-1` or `0-3, 20, -2--1`: indices and ranges, separated by commas.

    Raises:
        ValueError: naming the part that is neither.
    """
    ranges = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        found = re.fullmatch(r"(-?\d{1,4})(?:\s*-\s*(-?\d{1,4}))?", part)
        if found is None:
            raise ValueError(
                f"{part!r} is no layer; write indices and ranges such as 0,1,-1 or 0-3,-2--1"
            )
        first = int(found.group(1))
        last = first if found.group(2) is None else int(found.group(2))
        if (first < 0) == (last < 0) and last < first:
            raise ValueError(f"{part!r} ends before it begins")
        ranges.append((first, last))
    return Layers(text, tuple(ranges))


@dataclass(frozen=True)
class TauProfile:
    """tau by layer: a base, and other values for some layers."""

    base: float = 1.3
    special: tuple[tuple[Layers, float], ...] = ()

    def of(self, layer: int | None, total: int | None) -> float:
        """tau of a layer; the last special value that fits counts."""
        if layer is None:
            return self.base
        fitting = [tau for layers, tau in self.special if layers.contains(layer, total)]
        return fitting[-1] if fitting else self.base


def parse_tau_profile(base: float, text: str) -> TauProfile:
    """`39-42=0.9; -1=0.5`: layers and their tau, separated by semicolons or lines.

    Raises:
        ValueError: naming the part that is neither.
    """
    special = []
    for part in filter(None, (piece.strip() for piece in re.split(r"[;\n]", text))):
        layers, equals, value = part.partition("=")
        try:
            tau = float(value)
        except ValueError:
            tau = float("nan")
        if not equals or tau != tau:
            raise ValueError(f"{part!r} is no tau; write layers=tau such as 39-42=0.9")
        special.append((parse_layers(layers), tau))
    return TauProfile(base, tuple(special))


@dataclass(frozen=True)
class Schedule:
    """Dense first, then sparse.

    start_percent, end_percent: part of the sampling in which attention may be sparse, by noise, 0
    to 1; dense_steps: first steps of a run that are dense, -1 for none; dense_layers; min_tokens:
    shorter attention is dense.
    """

    start_percent: float = 0.2
    end_percent: float = 1.0
    dense_steps: int = -1
    dense_layers: Layers = field(default_factory=Layers)
    min_tokens: int = 12_288

    def __post_init__(self) -> None:
        if not 0 <= self.start_percent <= self.end_percent <= 1:
            raise ValueError(
                f"start_percent {self.start_percent} and end_percent {self.end_percent} must rise "
                "from 0 to 1"
            )


@dataclass(frozen=True)
class Moment:
    """Where in a run a model call is. step: from 0, None if unknown; sigma: its noise level, None
    if unknown; window: noise levels at start_percent and end_percent."""

    step: int | None = None
    sigma: float | None = None
    window: tuple[float, float] | None = None


def step_of(sigma: float, sample_sigmas: Sequence[float]) -> int:
    """The step whose noise level is nearest to `sigma`, the earlier of two.

    Samplers also evaluate at levels that are not in the list: above it, where they add noise first,
    and between two. The list may fall, or rise as in unsampling.
    """
    levels = list(sample_sigmas[:-1]) or list(sample_sigmas)
    return min(range(len(levels)), key=lambda step: (abs(levels[step] - sigma), step))


def why_dense(
    schedule: Schedule, moment: Moment, layer: int | None, layers: int | None, tokens: int
) -> str | None:
    """Why attention is dense here, in words, or None where it may be sparse."""
    if moment.step is not None and moment.step < schedule.dense_steps:
        return f"first {schedule.dense_steps} steps"
    if moment.sigma is not None and moment.window is not None:
        start, end = moment.window
        if moment.sigma > start * (1 + SAME_SIGMA):
            return f"before {schedule.start_percent:.0%}"
        if moment.sigma < end * (1 - SAME_SIGMA):
            return f"after {schedule.end_percent:.0%}"
    if layer is not None and schedule.dense_layers.contains(layer, layers):
        return f"layers {schedule.dense_layers.text}"
    if tokens < schedule.min_tokens:
        return f"fewer than {schedule.min_tokens} tokens"
    return None


def _from_start(edge: int, total: int | None) -> int:
    return edge + total if edge < 0 and total is not None else edge
