"""Measuring candidates once and remembering the fastest, on disk, per machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from .out_of_memory import is_out_of_memory
from .whole_file import keep_whole

NOISE = 0.03
"""A candidate must beat the first one, which is the library's own default, by this fraction."""

LONGEST_MS = 1e7
FORMAT_VERSION = 1
MAX_FILE_BYTES = 4_000_000

Run = Callable[[int], Callable[[], object]]


class Clock(Protocol):
    """Measures how long work takes on a device."""

    def milliseconds(self, work: Callable[[], object]) -> float:
        """Time of one call of `work`, after a warm-up."""
        ...


@dataclass(frozen=True)
class Best:
    """index: the winner among the candidates; reason: for the log and the report; failed: why
    candidates could not be measured, by index."""

    index: int
    reason: str
    failed: Mapping[int, Exception] = field(default_factory=dict)


class Tuner:
    """Picks the fastest of several ways to do the same.

    machine identifies what the timings are true for: GPU, driver, versions. A file of another
    machine, a damaged one or one that cannot be written only means measuring again.
    """

    def __init__(self, clock: Clock, machine: str, path: Path | None) -> None:
        self._clock = clock
        self._machine = machine
        self._path = path
        self._known = _read(path, machine)

    def best(self, key: str, names: Sequence[str], run: Run) -> Best | None:
        """The fastest candidate, measured now or before; None if none could be measured.

        Args:
            key: what is computed. names: of the candidates, the default first.
            run: gives for an index what to measure. A candidate that raises is passed over; one for
                which memory runs out, without being remembered.

        Raises:
            Exception: the default's, if memory ran out for it.
        """
        known = self._known.get(key, {})
        timings = {name: known[name] for name in names if name in known}
        when, failed = "measured before", {}
        if len(timings) < len(names):
            when = "measured"
            timings, failed = self._measure(names, run)
            if not timings:
                return None
            self._known = _read(self._path, self._machine) | self._known
            self._known[key] = self._known.get(key, {}) | timings
            _write(self._path, self._machine, self._known)
        winner, default = min(timings, key=timings.__getitem__), names[0]
        if default in timings and timings[winner] > (1 - NOISE) * timings[default]:
            winner = default
        texts = ", ".join(f"{name} {ms:.3f} ms" for name, ms in timings.items())
        return Best(list(names).index(winner), f"{when}: {texts}", failed)

    def _measure(
        self, names: Sequence[str], run: Run
    ) -> tuple[dict[str, float], dict[int, Exception]]:
        timings, failed = {}, {}
        for index, name in enumerate(names):
            try:
                timings[name] = self._clock.milliseconds(run(index))
            except Exception as error:
                if index == 0 and is_out_of_memory(error):
                    raise
                if not is_out_of_memory(error):
                    failed[index] = error
        return timings, failed


def _read(path: Path | None, machine: str) -> dict[str, dict[str, float]]:
    if path is None:
        return {}
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return {}
        content: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict) or content.get("version") != FORMAT_VERSION:
        return {}
    if content.get("machine") != machine or not isinstance(content.get("timings"), dict):
        return {}
    return {
        key: {name: float(ms) for name, ms in timings.items()}
        for key, timings in content["timings"].items()
        if isinstance(timings, dict) and all(_is_time(ms) for ms in timings.values())
    }


def _is_time(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 < value < LONGEST_MS


def _write(path: Path | None, machine: str, known: dict[str, dict[str, float]]) -> None:
    """Whole or not at all; without it the next session measures again."""
    if path is None:
        return
    content = {"version": FORMAT_VERSION, "machine": machine, "timings": known}
    keep_whole(path, json.dumps(content, indent=1).encode())
