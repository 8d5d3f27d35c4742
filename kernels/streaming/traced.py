"""Measuring one forward: when blocks were copied, and when computing had to wait for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from .device import Buffer, Event, StreamingDevice

Mark = TypeVar("Mark")
Span = tuple[float, float]


class TimedDevice(StreamingDevice[Buffer, Event], Protocol[Buffer, Event, Mark]):
    """A streaming device with a clock on each of its queues."""

    def mark_copy(self) -> Mark:
        """The time at which the copying queue gets here."""
        ...

    def mark_compute(self) -> Mark:
        """The time at which the computing queue gets here."""
        ...

    def seconds_between(self, first: Mark, second: Mark) -> float:
        """Seconds from one mark to another; waits until both have been reached."""
        ...


@dataclass(frozen=True)
class StepTrace:
    """One forward in seconds from its start. copies, stalls: spans of copying, and of computing that
    waited for a copy; copied_bytes: of the copies."""

    seconds: float
    copies: tuple[Span, ...]
    stalls: tuple[Span, ...]
    copied_bytes: int

    @property
    def copy_seconds(self) -> float:
        """Time the copying engine was busy for the forward."""
        return sum(end - start for start, end in self.copies)

    @property
    def stall_seconds(self) -> float:
        """Time computing waited for copies."""
        return sum(end - start for start, end in self.stalls)

    @property
    def compute_seconds(self) -> float:
        """Time without the waiting."""
        return max(self.seconds - self.stall_seconds, 0.0)

    @property
    def overlap(self) -> float:
        """Share of the copying behind computing, 0 to 1."""
        if not self.copy_seconds:
            return 1.0
        return min(max(1 - self.stall_seconds / self.copy_seconds, 0.0), 1.0)

    @property
    def bytes_per_second(self) -> float:
        """Speed of the copies; 0 if there were none."""
        return self.copied_bytes / self.copy_seconds if self.copy_seconds else 0.0


class TracedDevice(Generic[Buffer, Event, Mark]):
    """Passes everything on to a device, and notes times between `begin_trace` and `end_trace`."""

    def __init__(self, device: TimedDevice[Buffer, Event, Mark], sizes: list[int]) -> None:
        """
        Args:
            sizes: bytes of each block.
        """
        self._device = device
        self._sizes = sizes
        self._origin: Mark | None = None
        self._copies: list[tuple[int, Mark, Mark]] = []
        self._stalls: list[tuple[Mark, Mark]] = []

    def begin_trace(self) -> None:
        """Start noting: a forward begins."""
        self._copies, self._stalls = [], []
        self._origin = self._device.mark_compute()

    def drop_trace(self) -> None:
        """Stop noting, and forget what was noted."""
        self._origin = None

    def end_trace(self) -> StepTrace:
        """Stop noting and wait for the forward to be done.

        Raises:
            RuntimeError: if no trace has begun.
        """
        origin, self._origin = self._origin, None
        if origin is None:
            raise RuntimeError("no trace has begun")
        end = self._device.mark_compute()
        since = self._device.seconds_between
        return StepTrace(
            since(origin, end),
            tuple((since(origin, a), since(origin, b)) for _, a, b in self._copies),
            tuple((since(origin, a), since(origin, b)) for a, b in self._stalls),
            sum(self._sizes[block] for block, _, _ in self._copies),
        )

    def allocate(self, nbytes: int) -> Buffer:
        return self._device.allocate(nbytes)

    def free(self, buffer: Buffer) -> None:
        self._device.free(buffer)

    def copy(self, block: int, buffer: Buffer) -> Event:
        if self._origin is None:
            return self._device.copy(block, buffer)
        start = self._device.mark_copy()
        event = self._device.copy(block, buffer)
        self._copies.append((block, start, self._device.mark_copy()))
        return event

    def copy_waits(self, event: Event) -> None:
        self._device.copy_waits(event)

    def compute_waits(self, event: Event) -> None:
        if self._origin is None:
            self._device.compute_waits(event)
            return
        start = self._device.mark_compute()
        self._device.compute_waits(event)
        self._stalls.append((start, self._device.mark_compute()))

    def computed(self) -> Event:
        return self._device.computed()

    def drain(self) -> None:
        self._device.drain()
