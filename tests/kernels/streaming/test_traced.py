"""Measuring a forward, with a device whose clocks are set by hand."""

from __future__ import annotations

import pytest
from leandit.kernels.streaming.ring import BlockRing
from leandit.kernels.streaming.timeline import timeline
from leandit.kernels.streaming.traced import StepTrace, TracedDevice


class Clockwork:
    """Copies take 3 s, blocks 2 s; times follow the waits as on a card."""

    def __init__(self) -> None:
        self.copier = self.clock = 0.0

    def allocate(self, nbytes: int) -> str:
        return "buffer"

    def free(self, buffer: str) -> None:
        pass

    def copy(self, block: int, buffer: str) -> float:
        self.copier += 3
        return self.copier

    def copy_waits(self, event: float) -> None:
        self.copier = max(self.copier, event)

    def compute_waits(self, event: float) -> None:
        self.clock = max(self.clock, event)

    def computed(self) -> float:
        return self.clock

    def drain(self) -> None:
        pass

    def mark_copy(self) -> float:
        return self.copier

    def mark_compute(self) -> float:
        return self.clock

    def seconds_between(self, first: float, second: float) -> float:
        return second - first


def traced_forward() -> StepTrace:
    device = Clockwork()
    traced = TracedDevice(device, [10, 20, 30, 40])
    with BlockRing(traced, [10, 20, 30, 40], [True] * 4, 2) as ring:
        for _ in range(2):
            ring.begin_forward()
            traced.begin_trace()
            for block in range(4):
                ring.enter(block)
                device.clock += 2
                ring.leave(block)
            trace = traced.end_trace()
    return trace


def test_a_forward_bound_by_copies_shows_the_waiting() -> None:
    trace = traced_forward()
    assert trace.seconds == 12  # four copies of 3 s: the copying engine is the limit
    assert trace.compute_seconds == 8
    assert trace.stall_seconds == 4
    assert trace.copy_seconds == 12
    assert trace.copied_bytes == 100
    assert trace.bytes_per_second == pytest.approx(100 / 12)
    assert trace.overlap == pytest.approx(1 - 4 / 12)


def test_a_trace_that_never_began_is_refused() -> None:
    traced = TracedDevice(Clockwork(), [])
    with pytest.raises(RuntimeError, match="no trace has begun"):
        traced.end_trace()


def test_a_forward_without_copies_overlaps_fully() -> None:
    trace = StepTrace(2.0, (), (), 0)
    assert (trace.overlap, trace.bytes_per_second, trace.compute_seconds) == (1.0, 0.0, 2.0)


def test_clocks_that_disagree_a_little_give_no_negative_times() -> None:
    trace = StepTrace(1.0, ((0.0, 0.5),), ((0.0, 1.1),), 1)
    assert (trace.compute_seconds, trace.overlap) == (0.0, 0.0)


def test_the_picture_shows_when_each_engine_works() -> None:
    trace = StepTrace(1.0, ((0.0, 0.5),), ((0.4, 0.5), (0.9, 1.0)), 1)
    assert timeline(trace, 10) == ("copying   █████·····\ncomputing ████·████·  1000 ms")


def test_half_a_cell_is_half_dark() -> None:
    trace = StepTrace(1.0, ((0.0, 0.55),), (), 1)
    assert timeline(trace, 10).splitlines()[0] == "copying   █████▒····"


def test_nothing_measured_draws_nothing() -> None:
    assert timeline(StepTrace(0.0, (), (), 0)) == ""
