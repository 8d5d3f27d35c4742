"""Deciding whether streaming pays."""

from __future__ import annotations

import pytest
from leandit.kernels.streaming.trial import Trial


def run(times: list[float]) -> Trial:
    trial = Trial()
    for seconds in times:
        if trial.wants("shape"):
            trial.note(seconds)
    return trial


@pytest.mark.parametrize(
    ("streamed", "stays"), [(0.5, True), (0.97, True), (0.981, False), (1.2, False)]
)
def test_it_stays_on_from_a_gain_of_two_percent(streamed: float, stays: bool) -> None:
    trial = run([9.0, 1.0, 1.1, 9.0, streamed, streamed + 0.3])
    assert trial.decided
    assert trial.stream is stays
    assert trial.gain == pytest.approx(1 - streamed)


def test_the_first_forward_of_each_phase_does_not_count() -> None:
    assert run([0.1, 1.0, 1.0, 0.1, 1.0, 1.0]).gain == 0


def test_phases_follow_each_other() -> None:
    trial = Trial()
    seen = []
    for _ in range(8):
        seen.append(trial.stream)
        if trial.wants("shape"):
            trial.note(1.0 if not trial.stream else 0.5)
    assert seen == [False] * 3 + [True] * 5


def test_other_shapes_are_not_timed() -> None:
    trial = Trial()
    assert trial.wants((1, 2))
    assert not trial.wants((3, 4))


def test_a_short_run_leaves_it_undecided() -> None:
    trial = run([1.0, 1.0, 1.0, 0.5])
    assert (trial.decided, trial.gain, trial.stream) == (False, None, True)
