"""One sampling run whose blocks stream: buffers before it, weights rebound within each block only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher

from ..kernels.out_of_memory import is_out_of_memory
from ..kernels.streaming.flat_block import FlatBlock, is_pinned, stored_bytes
from ..kernels.streaming.ring import BlockRing
from ..kernels.streaming.traced import StepTrace, TimedDevice, TracedDevice
from ..kernels.streaming.trial import Trial
from .block_weights import HeldWeight, offloaded_weights

MakeDevice = Callable[[torch.device, Sequence[FlatBlock]], TimedDevice[Any, Any, Any]]
SETTLING = 2
"""Forwards before the one whose times are reported: the ring learns the order in the first."""


class OffloadRun:
    """Streams the weights that ComfyUI left in main memory, from when it is entered to its end.

    In a block's forward its modules hold parameters over a buffer on the card; after it, however it
    ends, the same Parameter objects as before. ComfyUI's cast then finds the weight on the card,
    copies nothing, and applies LoRAs as ever.
    """

    def __init__(
        self, patcher: ModelPatcher, blocks: Sequence[str], slots: int, trial: Trial | None,
        make_device: MakeDevice,
    ) -> None:  # fmt: skip
        """
        Args:
            patcher: loaded. blocks: names in the order of their usual use. slots: buffers.
            trial: says of each forward whether it is to stream; None measures only.
        """
        self._model = patcher.model.diffusion_model
        self._device = patcher.load_device
        self._make_device = make_device
        self._blocks = tuple(blocks)
        self._weights = [offloaded_weights(patcher, b, self._device) for b in blocks]
        self._flat = [FlatBlock([held.tensor for held in ws]) for ws in self._weights]
        self._slots = slots
        self.trial = trial or Trial(decided=True)
        self._streams = trial is not None and any(self.sizes)
        self.forwards = 0
        self.out_of_memory = False
        self.trace: StepTrace | None = None
        self._ring: BlockRing[Any, Any] | None = None
        self._traced: TracedDevice[Any, Any, Any] | None = None
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._open: tuple[int, list[HeldWeight]] | None = None
        self._stack = ExitStack()

    @property
    def sizes(self) -> list[int]:
        """Bytes that each block streams in a forward."""
        return [flat.nbytes for flat in self._flat]

    @property
    def streamed(self) -> bool:
        """Whether this run has streamed, or is still finding out whether it pays."""
        undecided = not self.trial.decided
        return self._streams and not self.out_of_memory and (self.trial.stream or undecided)

    @property
    def ring_bytes(self) -> int:
        """Bytes of the buffers; 0 if none are wanted."""
        if not self.streamed:
            return 0
        sizes = [size for size in self.sizes if size]
        return min(self._slots, len(sizes)) * max(sizes, default=0)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the masters that the card reads without help of the processor."""
        held = [weight.tensor for weights in self._weights for weight in weights]
        return sum(stored_bytes(tensor) for tensor in held if is_pinned(tensor))

    @property
    def streaming(self) -> bool:
        """Whether the next forward streams."""
        return self._ring is not None and self.trial.stream

    def __enter__(self) -> OffloadRun:
        device = self._make_device(self._device, self._flat)
        self._traced = TracedDevice(device, self.sizes)
        if self.streamed:
            ring = BlockRing(self._traced, self.sizes, [s > 0 for s in self.sizes], self._slots)
            try:
                self._ring = self._stack.enter_context(ring)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self.out_of_memory = True  # ComfyUI streams the weights itself, as without us
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop()

    def owns(self, model: Any) -> bool:
        """Whether this run's model is the one that is called."""
        return model is self._model

    @contextmanager
    def forward(self, kind: Any) -> Iterator[None]:
        """Around one forward of the model.

        Args:
            kind: what the forward's time depends on, such as the latent's shape.
        """
        traced = self._traced
        if traced is None:
            self.forwards += 1
            yield
            return
        wanted = self._ring is not None and self.trial.wants(kind)
        streams = self.streaming
        # Timing makes the processor wait for the card, so it is done for a few forwards only.
        timed = wanted or (self.trace is None and self.forwards >= SETTLING)
        if timed:
            traced.begin_trace()
        handles: list[Any] = []
        try:
            if streams and self._ring is not None:
                self._ring.begin_forward()
                self._hook(handles)
            yield
        except BaseException:
            traced.drop_trace()
            raise
        finally:
            for handle in handles:
                handle.remove()
            self._close()
        self.forwards += 1
        if timed:
            self._note(traced.end_trace(), streams, wanted)

    def _note(self, trace: StepTrace, streamed: bool, wanted: bool) -> None:
        if streamed or self._ring is None:
            self.trace = trace
        if wanted:
            self.trial.note(trace.seconds)
            if self.trial.decided and not self.trial.stream:
                self._stop()

    def _hook(self, handles: list[Any]) -> None:
        for index, name in enumerate(self._blocks):
            if self._flat[index].nbytes:
                block = self._model.get_submodule(name)
                handles.append(block.register_forward_pre_hook(self._entering(index)))
                handles.append(block.register_forward_hook(self._leaving))

    def _entering(self, index: int) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._close()  # an exception that the model caught has left one open
            ring = self._ring
            buffer = None if ring is None else ring.enter(index)
            if buffer is None:
                return
            key = (index, buffer.data_ptr())
            if key not in self._views:
                self._views[key] = self._flat[index].tensors_in(buffer)
            bound: list[HeldWeight] = []
            self._open = (index, bound)
            for held, view in zip(self._weights[index], self._views[key], strict=True):
                # Another model may have made ComfyUI move or replace a weight since the run began.
                if held.is_in_place():
                    bound.append(held)
                    held.owner._parameters[held.name] = view  # type: ignore[assignment]

        return enter

    def _leaving(self, *_: Any) -> None:
        self._close()

    def _close(self) -> None:
        """Put the same Parameter objects back, and let the block's buffer be used again."""
        if self._open is None:
            return
        (index, bound), self._open = self._open, None
        for held in bound:
            held.owner._parameters[held.name] = held.tensor
        if self._ring is not None:
            self._ring.leave(index)

    def _stop(self) -> None:
        """Give the buffers back."""
        self._close()
        self._ring = self._traced = None
        self._views.clear()
        self._stack.close()
        self._stack = ExitStack()
