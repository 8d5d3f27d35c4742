"""A device of real CPU tensors that copies as late as it may, and spoils buffers in the meantime."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

POISON = 0xFF
"""A byte that makes every float NaN and every int8 code -1."""


class LateDevice:
    """Copies are done when computing waits for them, and not before.

    Meanwhile the buffer holds poison; so does a freed one. A copy into a buffer whose computing has
    not been waited for is an error.
    """

    made: ClassVar[list[LateDevice]] = []

    def __init__(self, device: torch.device, blocks: Sequence[Any]) -> None:
        self.blocks = blocks
        self.alive: dict[int, torch.Tensor] = {}
        self.waiting: list[tuple[int, int, torch.Tensor]] = []
        self.events = 0
        self.copies: list[int] = []
        self.most_bytes = 0
        LateDevice.made.append(self)

    def allocate(self, nbytes: int) -> torch.Tensor:
        buffer = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self.alive[buffer.data_ptr()] = buffer
        self.most_bytes = max(self.most_bytes, sum(b.numel() for b in self.alive.values()))
        return buffer

    def free(self, buffer: torch.Tensor) -> None:
        del self.alive[buffer.data_ptr()]
        buffer.fill_(POISON)

    def copy(self, block: int, buffer: torch.Tensor) -> int:
        self.copies.append(block)
        buffer.fill_(POISON)
        self.events += 1
        self.waiting.append((self.events, block, buffer))
        return self.events

    def copy_waits(self, event: int) -> None:
        pass

    def compute_waits(self, event: int) -> None:
        while self.waiting and self.waiting[0][0] <= event:
            _, block, buffer = self.waiting.pop(0)
            for piece in self.blocks[block].pieces():
                buffer[piece.offset : piece.offset + piece.nbytes].copy_(piece.source)

    def computed(self) -> int:
        self.events += 1
        return self.events

    def drain(self) -> None:
        self.waiting.clear()

    def mark_copy(self) -> float:
        return time.perf_counter()

    def mark_compute(self) -> float:
        return time.perf_counter()

    def seconds_between(self, first: float, second: float) -> float:
        return second - first


class TimedDevice(LateDevice):
    """A device whose clock says that a forward takes 1 s, and `streaming` s with copies."""

    streaming: float = 1.0

    def mark_compute(self) -> Any:
        return ("compute", len(self.copies))

    def seconds_between(self, first: Any, second: Any) -> float:
        if not isinstance(first, tuple) or not isinstance(second, tuple):
            return 0.0
        return self.streaming if second[1] > first[1] else 1.0


def timed(seconds: float) -> type[TimedDevice]:
    """A device on which forwards that stream take so many seconds, and others 1."""
    return type("Timed", (TimedDevice,), {"streaming": seconds})


def streams() -> list[LateDevice]:
    """The devices that had blocks to copy; others only measure."""
    return [device for device in LateDevice.made if len(device.blocks)]
