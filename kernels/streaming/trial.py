"""Whether streaming pays: a few forwards without it, a few with it, and then a decision."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

LEAST_GAIN = 0.02
WARM_UP, MEASURED = 1, 2
"""Forwards that are not counted, and that are, both without and with streaming."""


@dataclass
class Trial:
    """Counts forwards of one kind, the first it sees; others follow its present phase.

    stream: whether the next forward is to stream. decided: whether that is final.
    """

    stream: bool = False
    decided: bool = False
    _kind: Hashable = None
    _without: list[float] = field(default_factory=list)
    _with: list[float] = field(default_factory=list)

    @property
    def seconds_without(self) -> float | None:
        """The best forward without streaming, None before there was one that counts."""
        return _best(self._without)

    @property
    def seconds_with(self) -> float | None:
        """The best forward with streaming, None before there was one that counts."""
        return _best(self._with)

    @property
    def gain(self) -> float | None:
        """Share of a forward's time that streaming saves; None before the decision."""
        if self.seconds_without is None or self.seconds_with is None:
            return None
        return 1 - self.seconds_with / self.seconds_without

    def wants(self, kind: Hashable) -> bool:
        """Whether a forward of this kind has to be timed."""
        if self._kind is None:
            self._kind = kind
        return not self.decided and kind == self._kind

    def note(self, seconds: float) -> None:
        """The time of a forward that was wanted; moves on to the next phase when it is due."""
        times = self._with if self.stream else self._without
        times.append(seconds)
        if len(times) < WARM_UP + MEASURED:
            return
        if not self.stream:
            self.stream = True
        else:
            self.decided = True
            self.stream = self.gain is not None and self.gain >= LEAST_GAIN


def _best(times: list[float]) -> float | None:
    return min(times[WARM_UP:], default=None)
