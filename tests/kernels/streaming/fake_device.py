"""A device that runs its queues in random legal orders and notices every use of wrong bytes."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any


@dataclass
class FakeBuffer:
    """content: the block whose bytes it holds, None while a copy runs; readers: computing on it."""

    nbytes: int
    content: int | None = None
    readers: int = 0
    alive: bool = True


class Wrong(AssertionError):
    """Something that would corrupt a picture, or leak."""


class FakeDevice:
    """At every call some queued work is done, in any order the waits allow."""

    def __init__(self, seed: int, fail_allocation: int | None = None) -> None:
        self.random = random.Random(seed)
        self.queues: dict[str, deque[tuple[str, Any]]] = {"copy": deque(), "compute": deque()}
        self.done: set[int] = set()
        self.events = 0
        self.buffers: list[FakeBuffer] = []
        self.copies = 0
        self.fail_allocation = fail_allocation

    # what streaming uses

    def allocate(self, nbytes: int) -> FakeBuffer:
        if self.fail_allocation == len(self.buffers):
            raise MemoryError
        buffer = FakeBuffer(nbytes)
        self.buffers.append(buffer)
        return buffer

    def free(self, buffer: FakeBuffer) -> None:
        if any(self.queues.values()) or not buffer.alive:
            raise Wrong("freed while work is queued, or twice")
        buffer.alive = False

    def copy(self, block: int, buffer: FakeBuffer) -> int:
        self.copies += 1
        self.queues["copy"] += [("begin copy", (block, buffer)), ("end copy", (block, buffer))]
        return self._event("copy")

    def copy_waits(self, event: int) -> None:
        self.queues["copy"].append(("wait", event))
        self._progress()

    def compute_waits(self, event: int) -> None:
        self.queues["compute"].append(("wait", event))
        self._progress()

    def computed(self) -> int:
        return self._event("compute")

    def drain(self) -> None:
        while any(self.queues.values()):
            if not self._step():
                raise Wrong("deadlock")

    # what the test uses

    def compute(self, block: int, buffer: FakeBuffer) -> None:
        self.queues["compute"] += [("begin", (block, buffer)), ("end", (block, buffer))]
        self._progress()

    @property
    def held(self) -> int:
        return sum(buffer.alive for buffer in self.buffers)

    # how it works

    def _event(self, queue: str) -> int:
        self.events += 1
        self.queues[queue].append(("event", self.events))
        self._progress()
        return self.events

    def _progress(self) -> None:
        for _ in range(self.random.choice((0, 0, 1, 3, 8))):
            self._step()

    def _step(self) -> bool:
        ready = [
            queue
            for queue in self.queues.values()
            if queue and (queue[0][0] != "wait" or queue[0][1] in self.done)
        ]
        if not ready:
            return False
        kind, what = self.random.choice(ready).popleft()
        if kind == "event":
            self.done.add(what)
        elif kind != "wait":
            self._touch(kind, *what)
        return True

    def _touch(self, kind: str, block: int, buffer: FakeBuffer) -> None:
        if not buffer.alive:
            raise Wrong(f"{kind} of block {block} on a freed buffer")
        if kind == "begin copy":
            if buffer.readers:
                raise Wrong(f"block {block} overwrites what is being computed")
            buffer.content = None
        elif kind == "end copy":
            buffer.content = block
        else:
            if buffer.content != block:
                raise Wrong(f"computing block {block} sees the bytes of {buffer.content}")
            buffer.readers += 1 if kind == "begin" else -1
