"""A ring of buffers through which blocks that do not fit stream, ahead of their use.

Copies go one way, from masters on the host that nobody writes; so leaving a block costs nothing. The
order of use is learned from the forward before. A block that comes unexpectedly, because a cache has
skipped others or a model runs one twice, is copied when it is entered: slower, never wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Generic

from .device import Buffer, Event, StreamingDevice


@dataclass
class Slot(Generic[Buffer, Event]):
    """One buffer. block: whose bytes it holds or will hold; ready: the end of their copy; used: the
    end of the last computing on it; busy: whether its block is being computed."""

    buffer: Buffer
    block: int | None = None
    ready: Event | None = None
    used: Event | None = None
    busy: bool = False


class BlockRing(Generic[Buffer, Event]):
    """Use it as a context: buffers are allocated on entering it and freed on leaving, however that
    happens. Within it, `enter` a block before computing it and `leave` it after."""

    def __init__(
        self, device: StreamingDevice[Buffer, Event], sizes: Sequence[int], streamed: Sequence[bool],
        slots: int,
    ) -> None:  # fmt: skip
        """
        Args:
            sizes: bytes of every block, in the order of their usual use. streamed: which of them are
                not resident. slots: buffers, at least 1.

        Raises:
            ValueError: if the lengths differ or there is no slot.
        """
        if len(sizes) != len(streamed) or slots < 1:
            raise ValueError(f"{len(sizes)} sizes, {len(streamed)} plans, {slots} slots")
        self._device = device
        self._bytes = max((s for s, is_on in zip(sizes, streamed, strict=True) if is_on), default=0)
        self._streamed = list(streamed)
        self._order = [block for block, is_streamed in enumerate(streamed) if is_streamed]
        self._count = min(slots, len(self._order))
        self._slots: list[Slot[Buffer, Event]] = []
        self._seen: list[int] = []
        self._position = -1

    def __enter__(self) -> BlockRing[Buffer, Event]:
        try:
            for _ in range(self._count):
                self._slots.append(Slot(self._device.allocate(self._bytes)))
            self._prefetch()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release()

    def begin_forward(self) -> None:
        """Note that a forward begins: its order of use replaces what was expected."""
        if self._seen:
            rest = [block for block in self._order if block not in self._seen]
            self._order = list(dict.fromkeys([*self._seen, *rest]))
        self._seen = []

    def enter(self, block: int) -> Buffer | None:
        """The buffer that holds a block when computing queued after this runs; None for a resident.

        Copies of the blocks that are expected next are queued behind it.
        """
        if not self._streamed[block]:
            return None
        slot = self._slot_of(block)
        if slot is None:
            slot = self._load(block, self._victim(block, needed=True))
        slot.busy = True
        if slot.ready is not None:
            self._device.compute_waits(slot.ready)
        self._seen.append(block)
        self._position = self._order.index(block)
        self._prefetch()
        return slot.buffer

    def leave(self, block: int) -> None:
        """Note that all computing of a block has been queued: its buffer may be used again after."""
        if not self._streamed[block]:
            return
        slot = self._slot_of(block)
        if slot is None or not slot.busy:
            return
        slot.busy = False
        slot.used = self._device.computed()
        self._prefetch()

    def _prefetch(self) -> None:
        """Queue copies of the next blocks, as far as buffers allow without dropping nearer ones."""
        for distance in range(1, len(self._slots) + 1):
            block = self._order[(self._position + distance) % len(self._order)]
            if self._slot_of(block) is not None:
                continue
            victim = self._victim(block, needed=False)
            if victim is None:
                return
            self._load(block, victim)

    def _load(self, block: int, slot: Slot[Buffer, Event] | None) -> Slot[Buffer, Event]:
        if slot is None:
            raise RuntimeError(f"no buffer is free for block {block}: every one is being computed")
        if slot.used is not None:
            self._device.copy_waits(slot.used)
        if slot.ready is not None:
            # Copies run in order, so the one before into this buffer is over before this begins.
            slot.ready = None
        slot.block, slot.used = block, None
        slot.ready = self._device.copy(block, slot.buffer)
        return slot

    def _victim(self, block: int, needed: bool) -> Slot[Buffer, Event] | None:
        """An empty buffer, or that whose block is used last; never one that is being computed.

        For a prefetch, only if that block is used later than `block`.
        """
        free = [slot for slot in self._slots if not slot.busy]
        if not free:
            return None
        chosen = max(free, key=self._next_use)
        if needed or self._next_use(chosen) > self._distance(block):
            return chosen
        return None

    def _next_use(self, slot: Slot[Buffer, Event]) -> int:
        return len(self._order) + 1 if slot.block is None else self._distance(slot.block)

    def _distance(self, block: int) -> int:
        """How many streamed blocks on from the present one a block is expected, 1 to their number."""
        return (self._order.index(block) - self._position - 1) % len(self._order) + 1

    def _slot_of(self, block: int) -> Slot[Buffer, Event] | None:
        return next((slot for slot in self._slots if slot.block == block), None)

    def _release(self) -> None:
        try:
            self._device.drain()
        finally:
            while self._slots:
                self._device.free(self._slots.pop().buffer)
