"""Blocks that stream: their weights rebound to buffers on the card, within each block's forward only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher

from ..kernels.streaming.flat_block import FlatBlock
from ..kernels.streaming.ring import BlockRing
from ..kernels.streaming.traced import TimedDevice, TracedDevice
from .block_weights import HeldModule, offloaded_modules

MakeDevice = Callable[[torch.device, Sequence[FlatBlock]], TimedDevice[Any, Any, Any]]


class BlockStream:
    """Streams the weights that ComfyUI left in main memory, from when it is entered to its end.

    In a block's forward its modules hold parameters over a buffer on the card; after it, however it
    ends, the same Parameter objects as before. ComfyUI's cast then finds the weight on the card,
    copies nothing, and applies LoRAs as ever.
    """

    def __init__(
        self, patcher: ModelPatcher, blocks: Sequence[str], slots: int, make_device: MakeDevice
    ) -> None:
        """
        Args:
            patcher: loaded. blocks: names in the order of their usual use. slots: buffers.
        """
        self._model = patcher.model.diffusion_model
        self._device = patcher.load_device
        self._make_device = make_device
        self._blocks = tuple(blocks)
        self._held = [offloaded_modules(patcher, block, self._device) for block in blocks]
        self._flat = [FlatBlock([t for held in ms for t in held.tensors]) for ms in self._held]
        self.sizes = [flat.nbytes for flat in self._flat]
        self._slots = min(slots, sum(size > 0 for size in self.sizes))
        self._views: dict[tuple[int, int], list[Any]] = {}
        self._open: tuple[int, list[HeldModule]] | None = None
        self._stack = ExitStack()
        self._ring: BlockRing[Any, Any] | None = None
        self.pinned_bytes = 0

    @property
    def ring_bytes(self) -> int:
        """Bytes of the buffers."""
        return self._slots * max(self.sizes, default=0)

    def __enter__(self) -> BlockStream:
        try:
            self._pin()
            device = self._make_device(self._device, self._flat)
            self.traced: TracedDevice[Any, Any, Any] = TracedDevice(device, self.sizes)
            streamed = [size > 0 for size in self.sizes]
            ring = BlockRing(self.traced, self.sizes, streamed, self._slots)
            self._ring = self._stack.enter_context(ring)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self._close()
        self._ring = None
        self._views.clear()
        self._stack.close()

    def _pin(self) -> None:
        """Pin large masters that ComfyUI has not (it leaves GGUF's out), within its own limit."""
        for flat in self._flat:
            for piece in flat.pieces():
                if not piece.packed and comfy.model_management.pin_memory(piece.source):
                    self._stack.callback(comfy.model_management.unpin_memory, piece.source)
        # The small ones travel in packed copies, which the device pins.
        self.pinned_bytes = sum(
            piece.nbytes
            for flat in self._flat
            for piece in flat.pieces()
            if piece.source.is_pinned() or (piece.packed and self._device.type == "cuda")
        )

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around one forward of the model: its blocks stream."""
        handles: list[Any] = []
        try:
            if self._ring is not None:
                self._ring.begin_forward()
            for index, name in enumerate(self._blocks):
                if self.sizes[index]:
                    block = self._model.get_submodule(name)
                    handles.append(block.register_forward_pre_hook(self._entering(index)))
                    handles.append(block.register_forward_hook(self._leaving))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._close()

    def _entering(self, index: int) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._close()  # an exception that the model caught has left one open
            # None where streaming has ended in the middle of a forward.
            buffer = None if self._ring is None else self._ring.enter(index)
            if buffer is None:
                return
            key = (index, buffer.data_ptr())
            if key not in self._views:
                self._views[key] = self._flat[index].tensors_in(buffer)
            views = iter(self._views[key])
            bound: list[HeldModule] = []
            self._open = (index, bound)
            for held in self._held[index]:
                over = [next(views) for _ in held.tensors]
                # Another model may have made ComfyUI move or replace weights since the run began. A
                # module is bound as a whole: half of it would have ComfyUI read our buffer elsewhere.
                if held.is_in_place():
                    bound.append(held)
                    held.bind(over)

        return enter

    def _leaving(self, *_: Any) -> None:
        self._close()

    def _close(self) -> None:
        """Put the same Parameter objects back, and let the block's buffer be used again."""
        if self._open is None:
            return
        (index, bound), self._open = self._open, None
        for held in bound:
            held.bind(held.tensors)
        if self._ring is not None:
            self._ring.leave(index)
