"""Streaming on a CUDA (or ROCm) card: a stream of its own for copies, events between it and computing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .flat_block import FlatBlock, Piece


class CudaStreamingDevice:
    """Copies blocks on a second stream; computing is whatever runs on the current stream.

    Masters that are pinned are read where they lie. Small tensors are packed into pinned memory of
    its own. Masters that are not pinned can be copied too, but hold up the processor meanwhile.
    """

    def __init__(self, device: torch.device, blocks: Sequence[FlatBlock]) -> None:
        """
        Args:
            device: the card. blocks: on the host; they must not change while this is in use.
        """
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pieces = [[_pinned(piece) for piece in block.pieces()] for block in blocks]

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Bytes on the card, from torch's allocator."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # The memory may still be in use by computing that was queued before it was given back.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return buffer

    def free(self, buffer: torch.Tensor) -> None:
        """Nothing to do: the ring has drained both queues, and drops the tensor."""

    def copy(self, block: int, buffer: torch.Tensor) -> torch.cuda.Event:
        """Queue the copies of a block's pieces; the event is the end of the last."""
        with torch.cuda.stream(self._stream):
            for piece in self._pieces[block]:
                target = buffer[piece.offset : piece.offset + piece.nbytes]
                target.copy_(piece.source, non_blocking=True)
        return _end_of(self._stream)

    def copy_waits(self, event: torch.cuda.Event) -> None:
        """Later copies start after the event."""
        self._stream.wait_event(event)

    def compute_waits(self, event: torch.cuda.Event) -> None:
        """What is queued on the current stream from now on starts after the event."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def computed(self) -> torch.cuda.Event:
        """The end of what has been queued on the current stream."""
        return _end_of(torch.cuda.current_stream(self._device))

    def drain(self) -> None:
        """Wait for both streams."""
        self._stream.synchronize()
        torch.cuda.current_stream(self._device).synchronize()

    def mark_copy(self) -> torch.cuda.Event:
        """An event with a time on the copying stream."""
        return _mark(self._stream)

    def mark_compute(self) -> torch.cuda.Event:
        """An event with a time on the current stream."""
        return _mark(torch.cuda.current_stream(self._device))

    def seconds_between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """Waits for both."""
        first.synchronize()
        second.synchronize()
        return first.elapsed_time(second) / 1e3


def _end_of(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _pinned(piece: Piece) -> Piece:
    """The piece that a block has packed, in pinned memory where that can be had; others as they are."""
    if not piece.packed:
        return piece
    try:
        return Piece(piece.offset, piece.source.pin_memory(), True)
    except RuntimeError:  # the system's limit for pinned memory
        return piece
