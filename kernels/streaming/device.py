"""What streaming needs of a device: two queues of work, events between them, buffers."""

from __future__ import annotations

from typing import Protocol, TypeVar

Buffer = TypeVar("Buffer")
Event = TypeVar("Event")


class StreamingDevice(Protocol[Buffer, Event]):
    """A device that copies and computes at the same time.

    Work is queued and done later, in order within a queue; between the queues only waits order it.
    """

    def allocate(self, nbytes: int) -> Buffer:
        """A buffer on the device; may raise when memory runs out."""
        ...

    def free(self, buffer: Buffer) -> None:
        """Give a buffer back; nothing queued may use it any more."""
        ...

    def copy(self, block: int, buffer: Buffer) -> Event:
        """Queue the copy of a block's bytes from the host into a buffer; the event is its end."""
        ...

    def copy_waits(self, event: Event) -> None:
        """Later copies start after the event."""
        ...

    def compute_waits(self, event: Event) -> None:
        """Later computing starts after the event."""
        ...

    def computed(self) -> Event:
        """The end of all computing queued so far."""
        ...

    def drain(self) -> None:
        """Wait until both queues are empty."""
        ...
