"""One sampling run of a MODEL that may stream: when it begins to, whether it pays, and what it took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from comfy.model_patcher import ModelPatcher

from ..kernels.out_of_memory import is_out_of_memory
from ..kernels.streaming.traced import StepTrace, TracedDevice
from ..kernels.streaming.trial import Trial
from ..quant.offload_plan import GIB
from ..quant.offload_report import OffloadOutcome
from ..quant.offload_settings import OffloadSettings
from . import block_weights, residency
from .block_stream import BlockStream, MakeDevice

SETTLING = 2
"""Forwards before the one whose times are reported: the ring learns the order in the first."""


class OffloadRun:
    """Streams as the trial says. Nothing is taken off the card before it does; what was rearranged is
    put back at the end, however that comes."""

    def __init__(
        self, patcher: ModelPatcher, settings: OffloadSettings, trial: Trial | None,
        make_device: MakeDevice, for_one_step: int, compiled: bool,
    ) -> None:  # fmt: skip
        """
        Args:
            patcher: loaded. trial: None only measures, and changes nothing. for_one_step: see
                `residency.bytes_for_one_step`. compiled: whether torch.compile is on the model.
        """
        self._patcher = patcher
        self._settings = settings
        self._trial = trial
        self._make_device = make_device
        self._for_one_step = for_one_step
        self._compiled = compiled
        self._remembered = trial is not None and trial.decided and trial.gain is not None
        self._blocks = block_weights.block_names(patcher)
        self._stream: BlockStream | None = None
        self._rearranged = False
        self._loaded: set[int] = set()
        self._forwards = 0
        self._streamed_forwards = 0
        self._trace: StepTrace | None = None
        self._out_of_memory = False
        self._pinned_bytes = self._ring_bytes = 0
        self._sizes: list[int] = []
        self.held: int | None = None

    def __enter__(self) -> OffloadRun:
        self._clock = TracedDevice(self._make_device(self._patcher.load_device, []), [])
        if self._trial is not None and self._settings.keep_free_gb:
            residency.make_room(self._patcher, self._blocks, 0, self._spare())
        self._sizes = residency.offloaded_bytes(self._patcher, self._blocks)
        if self._settings.resident is None and not any(self._sizes):
            self._trial = None
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop()

    def owns(self, model: Any) -> bool:
        """Whether this run's model is the one that is called."""
        return model is self._patcher.model.diffusion_model

    @property
    def _wants_stream(self) -> bool:
        return self._trial is not None and self._trial.stream

    def between_steps(self) -> None:
        """Begin or end streaming where that is due.

        Called outside of ComfyUI's `apply_model`: inside of it torch.compile has other modules in the
        model's places, which ComfyUI's patcher would not know.
        """
        if not self._wants_stream:
            if self._stream is not None:
                self._stop()
                self._give_back()
        elif self._stream is None and (self._forwards or not self._compiled):
            # A model that is compiled as one graph never shows a forward, and nothing streams.
            self._start()

    @contextmanager
    def forward(self, kind: Any) -> Iterator[None]:
        """Around one forward of the model.

        Args:
            kind: what the forward's time depends on, such as the latent's shape.
        """
        stream = self._stream if self._wants_stream else None
        traced = self._clock if stream is None else stream.traced
        in_phase = self._trial is not None and (stream is not None) == self._trial.stream
        wanted = in_phase and self._trial is not None and self._trial.wants(kind)
        settled = self._forwards if stream is None else self._streamed_forwards
        # Timing makes the processor wait for the card, so it is done for a few forwards only.
        timed = wanted or (self._trace is None and settled >= SETTLING)
        if timed:
            traced.begin_trace()
        try:
            if stream is None:
                yield
            else:
                with stream.forward():
                    yield
        except BaseException:
            traced.drop_trace()
            raise
        self._forwards += 1
        self._streamed_forwards += stream is not None
        if timed:
            self._note(traced.end_trace(), stream is not None, wanted)

    def _note(self, trace: StepTrace, streamed: bool, wanted: bool) -> None:
        if streamed or self._trial is None or (self._trial.decided and not self._trial.stream):
            self._trace = trace
        if wanted and self._trial is not None:
            self._trial.note(trace.seconds)

    def _spare(self) -> int:
        kept_free = int(self._settings.keep_free_gb * GIB)
        return residency.spare_bytes(self._patcher, self._for_one_step) - kept_free

    def _start(self) -> None:
        """Arrange what stays on the card, and begin to stream the rest."""
        self._loaded = residency.loaded_modules(self._patcher)
        try:
            self._arrange()
            stream = BlockStream(
                self._patcher, self._blocks, self._settings.slots, self._make_device
            )
            self._sizes = stream.sizes
            if any(stream.sizes):
                self._stream = stream.__enter__()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._out_of_memory = True
        if self._stream is None:
            # ComfyUI streams the weights itself, with all the memory that it has without this node.
            self._trial = None
            self._stop()
            if self._out_of_memory:
                self._give_back()
            return
        self._pinned_bytes, self._ring_bytes = stream.pinned_bytes, stream.ring_bytes

    def _arrange(self) -> None:
        slots, wanted = self._settings.slots, self._settings.resident
        if wanted is None:
            residency.make_room(self._patcher, self._blocks, slots, self._spare())
            return
        self._rearranged = True
        # A load of this MODEL by others, in the middle of the run, has to find ComfyUI's own order.
        load = self._patcher.partially_load

        def partially_load(*args: Any, **kwargs: Any) -> Any:
            self._stop()
            return load(*args, **kwargs)

        self._patcher.__dict__["partially_load"] = partially_load
        self.held = residency.hold_blocks(self._patcher, self._blocks, wanted, slots, self._spare())

    def _stop(self) -> None:
        """Give the buffers back, and ComfyUI its own order."""
        stream, self._stream = self._stream, None
        rearranged, self._rearranged = self._rearranged, False
        try:
            if stream is not None:
                stream.__exit__(None, None, None)
        finally:
            if rearranged:
                del self._patcher.__dict__["partially_load"]
                residency.restore_order(self._patcher)

    def _give_back(self) -> None:
        """Load again what has left the card for the buffers, in the middle of a run."""
        residency.load_again(self._patcher, self._loaded)
        self._sizes = residency.offloaded_bytes(self._patcher, self._blocks)
        self._ring_bytes = self._pinned_bytes = 0

    def outcome(self, block_bytes: int, peak: int) -> OffloadOutcome:
        """What has happened.

        Args:
            block_bytes: of all blocks. peak: most bytes of the card in use.
        """
        trial = self._trial
        return OffloadOutcome(
            resident_bytes=max(block_bytes - sum(self._sizes), 0),
            streamed_bytes=sum(self._sizes),
            streamed_blocks=sum(size > 0 for size in self._sizes),
            ring_bytes=self._ring_bytes,
            pinned_bytes=self._pinned_bytes,
            peak_vram_bytes=peak,
            forwards=self._forwards,
            remembered=self._remembered,
            streaming=self._streamed_forwards > 0 and self._wants_stream,
            undecided=trial is not None and not trial.decided,
            out_of_memory=self._out_of_memory,
            gain=None if trial is None else trial.gain,
            trace=self._trace,
        )
