"""The ring under random legal orders of a device, random plans, skips, repeats and interrupts."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from leandit.kernels.streaming.ring import BlockRing

SPEC = importlib.util.spec_from_file_location(
    "streaming_fake_device", Path(__file__).with_name("fake_device.py")
)
assert SPEC is not None and SPEC.loader is not None
fake = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = fake
SPEC.loader.exec_module(fake)

SEEDS = 20_000


class Interrupt(BaseException):
    """Like ComfyUI's, which is no Exception."""


def forward(rng: random.Random, count: int) -> list[int]:
    """The blocks of one forward: mostly all in order; some skipped, some twice, some exchanged."""
    blocks = list(range(count))
    kind = rng.randrange(5)
    if kind == 1:
        blocks = [block for block in blocks if rng.random() > 0.3]
    elif kind == 2:
        blocks = [block for block in blocks for _ in range(1 + (rng.random() < 0.2))]
    elif kind == 3:
        rng.shuffle(blocks)
    return blocks


def run(seed: int, ring: type = BlockRing, device: type | None = None) -> Any:
    """A few forwards; in some runs something interrupts them. Returns the device."""
    rng = random.Random(seed)
    count = rng.randint(1, 9)
    streamed = [rng.random() < 0.6 for _ in range(count)]
    slots = rng.randint(1, 4)
    stop = rng.randint(0, 25) if rng.random() < 0.3 else None
    made = (device or fake.FakeDevice)(seed)
    sizes = [rng.randint(1, 100) for _ in range(count)]
    steps = 0
    try:
        with ring(made, sizes, streamed, slots) as held:
            if made.held > min(slots, sum(streamed)):
                raise fake.Wrong("more buffers than planned")
            for _ in range(rng.randint(1, 3)):
                held.begin_forward()
                for block in forward(rng, count):
                    buffer = held.enter(block)
                    if (buffer is None) != (not streamed[block]):
                        raise fake.Wrong("a resident has a buffer, or a streamed block none")
                    if buffer is not None and buffer.nbytes < sizes[block]:
                        raise fake.Wrong("the buffer is too small")
                    steps += 1
                    if steps == stop:
                        raise Interrupt
                    if buffer is not None:
                        made.compute(block, buffer)
                    held.leave(block)
    except Interrupt:
        pass
    if made.held or any(made.queues.values()):
        raise fake.Wrong("buffers or work are left after the end")
    return made


def test_no_order_of_the_device_corrupts_or_leaks() -> None:
    for seed in range(SEEDS):
        run(seed)


class NoReadyWait(fake.FakeDevice):
    def compute_waits(self, event: int) -> None:
        self._progress()


class NoFreeWait(fake.FakeDevice):
    def copy_waits(self, event: int) -> None:
        self._progress()


class EarlyEvent(fake.FakeDevice):
    def computed(self) -> int:
        self.events += 1
        self.done.add(self.events)
        return self.events


class TakesBusy(BlockRing):
    def _victim(self, block: int, needed: bool) -> Any:
        return max(self._slots, key=self._next_use)


class NeverFrees(BlockRing):
    def _release(self) -> None:
        self._device.drain()


class FreesWithoutWaiting(BlockRing):
    def _release(self) -> None:
        while self._slots:
            self._device.free(self._slots.pop().buffer)


class OneTooMany(BlockRing):
    def __enter__(self) -> Any:
        self._count += 1
        return super().__enter__()


class SmallBuffers(BlockRing):
    def __init__(self, device: Any, sizes: Any, streamed: Any, slots: int) -> None:
        super().__init__(device, sizes, streamed, slots)
        self._bytes = min(sizes)


BUGS = {
    "computing does not wait for the copy": (BlockRing, NoReadyWait, "sees the bytes of"),
    "a copy does not wait for the computing before": (BlockRing, NoFreeWait, "overwrites|sees"),
    "the end of computing is taken too early": (BlockRing, EarlyEvent, "overwrites|sees"),
    "a buffer in use is overwritten": (TakesBusy, None, "overwrites|sees|too small"),
    "buffers are never freed": (NeverFrees, None, "left after the end"),
    "buffers are freed while work is queued": (
        FreesWithoutWaiting,
        None,
        "freed while work|freed buf",
    ),
    "one buffer more than planned": (OneTooMany, None, "more buffers than planned"),
    "buffers of the smallest block": (SmallBuffers, None, "the buffer is too small"),
}


@pytest.mark.parametrize(("ring", "device", "words"), BUGS.values(), ids=BUGS.keys())
def test_a_planted_bug_is_seen(ring: type, device: type | None, words: str) -> None:
    seen = []
    for seed in range(400):
        try:
            run(seed, ring, device)
        except fake.Wrong as error:
            seen.append(str(error))
        except ZeroDivisionError:  # a ring of more slots than blocks divides by their number
            continue
    assert len([text for text in seen if re.search(words, text)]) > 20


@pytest.mark.parametrize("failing", [1, 2])
def test_an_interrupt_in_the_first_copies_leaves_nothing(failing: int) -> None:
    class Interrupted(fake.FakeDevice):
        def copy(self, block: int, buffer: Any) -> int:
            event = super().copy(block, buffer)
            if self.copies == failing:
                raise Interrupt
            return event

    device = Interrupted(0)
    with pytest.raises(Interrupt), BlockRing(device, [10] * 8, [True] * 8, 3):
        pass
    assert device.held == 0
    assert not any(device.queues.values())


def test_in_order_every_block_is_copied_once_a_forward_and_ahead_of_its_use() -> None:
    device = fake.FakeDevice(0)
    with BlockRing(device, [10] * 8, [True] * 8, 3) as ring:
        assert device.copies == 3  # before anything has been asked for
        for _ in range(4):
            ring.begin_forward()
            for block in range(8):
                buffer = ring.enter(block)
                device.compute(block, buffer)
                ring.leave(block)
    assert device.copies <= 4 * 8 + 3


def test_another_order_is_learned_from_the_forward_before() -> None:
    device = fake.FakeDevice(0)
    order = [5, 2, 7, 0, 6, 1, 4, 3]
    counts = []
    with BlockRing(device, [10] * 8, [True] * 8, 3) as ring:
        for _ in range(5):
            ring.begin_forward()
            before = device.copies
            for block in order:
                buffer = ring.enter(block)
                device.compute(block, buffer)
                ring.leave(block)
            counts.append(device.copies - before)
    assert counts[0] > 8 and counts[-1] == 8


def test_residents_need_no_buffer_and_no_copy() -> None:
    device = fake.FakeDevice(0)
    with BlockRing(device, [10] * 4, [False] * 4, 2) as ring:
        ring.begin_forward()
        assert [ring.enter(block) for block in range(4)] == [None] * 4
    assert (device.copies, device.buffers) == (0, [])


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_memory_that_runs_out_while_allocating_leaves_nothing(failing: int) -> None:
    device = fake.FakeDevice(0, fail_allocation=failing)
    with pytest.raises(MemoryError), BlockRing(device, [10] * 8, [True] * 8, 3):
        pass
    assert device.held == 0


def test_plans_that_do_not_fit_each_other_are_refused() -> None:
    for sizes, streamed, slots in (([1], [True, True], 2), ([1], [True], 0)):
        with pytest.raises(ValueError, match="slots"):
            BlockRing(fake.FakeDevice(0), sizes, streamed, slots)
