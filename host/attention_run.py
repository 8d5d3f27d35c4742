"""The state of one sampling run for the attention override: step, layer, counts."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from ..kernels.attention.schedule import Moment, Schedule, step_of
from ..quant.attention_report import AttentionLog
from .conditioning_tokens import Ranges


@dataclass
class Place:
    """Where in a run one thread is; ComfyUI runs the parts of a batch in threads on several GPUs."""

    moment: Moment = field(default_factory=Moment)
    layers: int | None = None
    sinks: Ranges = ()
    layer: int = -1
    block: tuple[Any, Any] | None = None


@dataclass
class AttentionRun:
    """Fresh for every run, so that nothing persists after it, however it ends.

    active: whether a run is going on; outside of one the override keeps out.
    """

    active: bool = False
    log: AttentionLog = field(default_factory=AttentionLog)
    checked: set[tuple[str, str]] = field(default_factory=set)
    said: set[str] = field(default_factory=set)
    step: int = 0
    _places: dict[int, Place] = field(default_factory=dict)
    _sigmas: Any = None
    _levels: list[float] = field(default_factory=list)

    @property
    def place(self) -> Place:
        """This thread's."""
        return self._places.setdefault(threading.get_ident(), Place())

    def begin_model_call(
        self, transformer_options: dict[str, Any], sigma: Any, sampling: Any, schedule: Schedule
    ) -> None:
        """Note where the run is: once per model call, since reading a noise level waits for the GPU.

        Args:
            sampling: ComfyUI's model_sampling of the running model, as nodes have patched it.
        """
        level = float(sigma.max()) if hasattr(sigma, "max") else float(sigma)
        step = self._step(level, transformer_options.get("sample_sigmas"))
        window = None
        if sampling is not None and hasattr(sampling, "percent_to_sigma"):
            window = (
                float(sampling.percent_to_sigma(schedule.start_percent)),
                float(sampling.percent_to_sigma(schedule.end_percent)),
            )
        place = self.place
        place.moment = Moment(step, level, window)
        if place.layer >= 0:
            place.layers = place.layer + 1
        place.layer, place.block, place.sinks = -1, None, ()

    def _step(self, level: float, sigmas: Any) -> int | None:
        """The step, which never goes back: added noise would take it to the one before."""
        if sigmas is None:
            return None
        if sigmas is not self._sigmas:
            self._sigmas = sigmas
            self._levels = [
                float(s) for s in (sigmas.tolist() if hasattr(sigmas, "tolist") else sigmas)
            ]
        self.step = max(self.step, step_of(level, self._levels))
        return self.step

    def layer_of(self, transformer_options: dict[str, Any], counts: bool) -> int | None:
        """The running number of the layer that a call is in, from 0.

        Args:
            counts: whether this call is a layer's main attention, for models that name no blocks.
        """
        place = self.place
        index = transformer_options.get("block_index")
        if index is None:
            self.log.layers_named = False
            if not counts:
                return None
            place.layer += 1
            return place.layer
        block = (transformer_options.get("block_type"), index)
        if isinstance(transformer_options.get("block"), tuple):
            block = (transformer_options["block"], index)  # a UNet restarts its indices in each
        if block != place.block:
            place.block = block
            place.layer += 1
        return place.layer

    def first_time(self, text: str) -> bool:
        """Whether a line has not been said in this run."""
        if text in self.said:
            return False
        self.said.add(text)
        return True
