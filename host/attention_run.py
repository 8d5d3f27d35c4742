"""The state of one sampling run for the attention override: step, layer, counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..kernels.attention.schedule import Moment, Schedule, step_of
from ..quant.attention_report import AttentionLog


@dataclass
class AttentionRun:
    """Fresh for every run, so that nothing persists after it, however it ends."""

    log: AttentionLog = field(default_factory=AttentionLog)
    moment: Moment = field(default_factory=Moment)
    checked: set[tuple[str, str]] = field(default_factory=set)
    said: set[str] = field(default_factory=set)
    layers: int | None = None
    _layer: int = -1
    _block: tuple[Any, Any] | None = None

    def begin_model_call(
        self, transformer_options: dict[str, Any], sigma: Any, sampling: Any, schedule: Schedule
    ) -> None:
        """Note where the run is: once per model call, since reading a noise level waits for the GPU.

        Args:
            sampling: ComfyUI's model_sampling of the running model, as nodes have patched it.
        """
        level = float(sigma.max()) if hasattr(sigma, "max") else float(sigma)
        sigmas = transformer_options.get("sample_sigmas")
        step = None if sigmas is None else step_of(level, [float(s) for s in sigmas])
        window = None
        if sampling is not None and hasattr(sampling, "percent_to_sigma"):
            window = (
                float(sampling.percent_to_sigma(schedule.start_percent)),
                float(sampling.percent_to_sigma(schedule.end_percent)),
            )
        self.moment = Moment(step, level, window)
        if self._layer >= 0:
            self.layers = self._layer + 1
        self._layer, self._block = -1, None

    def layer_of(self, transformer_options: dict[str, Any], counts: bool) -> int | None:
        """The running number of the layer that a call is in, from 0.

        Args:
            counts: whether this call is a layer's main attention, for models that name no blocks.
        """
        index = transformer_options.get("block_index")
        if index is None:
            self.log.layers_named = False
            if not counts:
                return None
            self._layer += 1
            return self._layer
        block = (transformer_options.get("block_type"), index)
        if isinstance(transformer_options.get("block"), tuple):
            block = (transformer_options["block"], index)  # a UNet restarts its indices in each
        if block != self._block:
            self._block = block
            self._layer += 1
        return self._layer

    def first_time(self, text: str) -> bool:
        """Whether a line has not been said in this run."""
        if text in self.said:
            return False
        self.said.add(text)
        return True
