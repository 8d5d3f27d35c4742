"""Measuring candidates and remembering them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from leandit.kernels.tuner import NOISE, Tuner


class Clock:
    """Takes the time that the work returns, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def milliseconds(self, work: Callable[[], object]) -> float:
        self.calls += 1
        return float(str(work()))


def times(*values: float | Exception) -> Callable[[int], Callable[[], object]]:
    def run(index: int) -> Callable[[], object]:
        def work() -> object:
            value = values[index]
            if isinstance(value, Exception):
                raise value
            return value

        return work

    return run


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((3.0, 2.0, 1.0), 2),
        ((1.0, 2.0, 3.0), 0),
        ((1.0, 1.0 - NOISE / 2, 3.0), 0),
        ((RuntimeError("x"), 2.0, 1.9), 2),
    ],
    ids=["the fastest", "the default", "no better than noise", "the default fails"],
)
def test_the_winner(values, expected: int) -> None:
    best = Tuner(Clock(), "card", None).best("shape", ["a", "b", "c"], times(*values))
    assert best is not None and best.index == expected


def test_nothing_that_can_be_measured_is_no_winner() -> None:
    assert Tuner(Clock(), "card", None).best("s", ["a"], times(RuntimeError("x"))) is None


def test_a_candidate_for_which_memory_runs_out_loses_and_is_not_failed() -> None:
    best = Tuner(Clock(), "card", None).best(
        "s", ["a", "b"], times(2.0, torch.OutOfMemoryError("x"))
    )
    assert best is not None and (best.index, best.failed) == (0, {})


def test_two_settings_keep_each_others_timings(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    one, other = Tuner(Clock(), "card", path), Tuner(Clock(), "card", path)
    one.best("k1", ["a"], times(1.0))
    other.best("k2", ["a"], times(2.0))
    other.best("k1", ["b"], times(3.0))
    assert json.loads(path.read_text())["timings"] == {
        "k1": {"a": 1.0, "b": 3.0},
        "k2": {"a": 2.0},
    }


def test_running_out_of_memory_is_not_swallowed_for_the_default() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        Tuner(Clock(), "card", None).best("s", ["a"], times(torch.OutOfMemoryError("x")))


def test_the_next_session_need_not_measure(tmp_path: Path) -> None:
    path = tmp_path / "deep/er/tuning.json"
    Tuner(Clock(), "card", path).best("shape", ["a", "b"], times(2.0, 1.0))
    clock = Clock()
    best = Tuner(clock, "card", path).best("shape", ["a", "b"], times(9.0, 9.0))
    assert best is not None and (best.index, clock.calls) == (1, 0)
    assert best.reason == "measured before: a 2.000 ms, b 1.000 ms"
    assert not list(tmp_path.rglob("*.part"))


def test_another_candidate_is_measured_with_the_others(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    Tuner(Clock(), "card", path).best("shape", ["a"], times(2.0))
    clock = Clock()
    best = Tuner(clock, "card", path).best("shape", ["a", "b"], times(2.0, 1.0))
    assert best is not None and (best.index, clock.calls) == (1, 2)


STALE = {
    "of another card": {"version": 1, "machine": "other", "timings": {"shape": {"a": 1.0}}},
    "of another version": {"version": 0, "machine": "card", "timings": {"shape": {"a": 1.0}}},
    "without timings": {"version": 1, "machine": "card", "timings": 3},
    "with nonsense for times": {
        "version": 1,
        "machine": "card",
        "timings": {"shape": {"a": "fast"}, "b": 4},
    },
    "with a negative time": {"version": 1, "machine": "card", "timings": {"shape": {"a": -1}}},
    "with a number beyond all measure": {
        "version": 1,
        "machine": "card",
        "timings": {"shape": {"a": 10**400}},
    },
    "a list": [1, 2],
}


@pytest.mark.parametrize("content", STALE.values(), ids=STALE.keys())
def test_a_file_that_does_not_fit_is_ignored_and_replaced(content, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps(content))
    clock = Clock()
    Tuner(clock, "card", path).best("shape", ["a"], times(5.0))
    assert clock.calls == 1
    written = json.loads(path.read_text())
    assert written == {"version": 1, "machine": "card", "timings": {"shape": {"a": 5.0}}}


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000], ids=repr)
def test_a_damaged_file_is_ignored(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_bytes(content[:200_000])
    assert Tuner(Clock(), "card", path).best("shape", ["a"], times(5.0)) is not None


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    tuner = Tuner(Clock(), "card", blocked / "tuning.json")
    best = tuner.best("shape", ["a", "b"], times(2.0, 1.0))
    assert best is not None and best.index == 1
