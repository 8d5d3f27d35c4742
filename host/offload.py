"""Layerwise offload: streaming what ComfyUI leaves in main memory, a block ahead of its use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ..kernels.streaming.cuda_device import CudaStreamingDevice
from ..kernels.streaming.trial import Trial
from ..quant.offload_plan import GIB
from ..quant.offload_report import (
    DYNAMIC,
    OffloadFacts,
    OffloadOutcome,
    offload_report,
    refusal,
)
from ..quant.offload_settings import OffloadSettings
from ..quant.report import Report, plain_report
from . import block_weights, managers, residency
from .bake import bake_loras
from .block_stream import MakeDevice
from .offload_run import OffloadRun
from .twin_patcher import TORCH_COMPILE_KEY

logger = logging.getLogger(__name__)

KEY = "leandit.layerwise_offload"
NODE = "LeanDiTLayerwiseOffload"
USUAL_SHAPE = (1, 16, 128, 128)
"""Of a latent, where a sampler does not show its own: a 1024 x 1024 image."""

WRAPPERS = (
    WrappersMP.PREPARE_SAMPLING,
    WrappersMP.SAMPLER_SAMPLE,
    WrappersMP.PREDICT_NOISE,
    WrappersMP.DIFFUSION_MODEL,
)

RESIDENCY_STEP = GIB
"""A decision holds for runs with about as much of the model in main memory."""

Show = Callable[[str], None]
DeviceFor = Callable[[torch.device], MakeDevice | None]


def streaming_device(device: torch.device) -> MakeDevice | None:
    """What streams on a device; None where copying and computing cannot be done at once."""
    return CudaStreamingDevice if device.type == "cuda" else None


def layerwise_offload(
    model: ModelPatcher,
    settings: OffloadSettings,
    show: Show | None = None,
    device_for: DeviceFor = streaming_device,
) -> tuple[ModelPatcher, Report]:
    """A clone of `model` whose offloaded blocks stream ahead of their use, and the report.

    Args:
        show: is given the report's text after each run. device_for: see `streaming_device`.

    Raises:
        HostError: if LoRAs are to be merged and nodes before this one hold on to the modules.
    """
    if settings.mode == "off":
        return without_offload(model), plain_report(NODE, "mode off: the model is unchanged")
    facts = facts_of(model)
    why_not = refusal(facts, settings, device_for(model.load_device) is not None)
    clone, baked = model, 0
    if settings.bake and why_not is None:
        clone, baked = bake_loras(model)
        facts = facts_of(clone)
    clone = without_offload(clone)
    offload = LayerwiseOffload(settings, show, device_for)
    for kind, wrapper in zip(WRAPPERS, offload.wrappers, strict=True):
        clone.add_wrapper_with_key(kind, KEY, wrapper)
    return clone, offload_report(NODE, facts, settings, why_not, None, baked)


def without_offload(model: ModelPatcher) -> ModelPatcher:
    """A clone without the wrappers of a node before."""
    clone = model.clone()
    for kind in WRAPPERS:
        clone.remove_wrappers_with_key(kind, KEY)
    return clone


def facts_of(patcher: ModelPatcher) -> OffloadFacts:
    """What is known of a model before it runs."""
    blocks = block_weights.block_names(patcher)
    modules = [m for block in blocks for m in block_weights.modules_of(patcher, block)]
    compiled = patcher.wrappers.get(WrappersMP.APPLY_MODEL, {}).get(TORCH_COMPILE_KEY)
    patches = patcher.object_patches.values()
    return OffloadFacts(
        manager=managers.manager_of(patcher),
        patcher=type(patcher).__name__,
        device=patcher.load_device.type,
        own_queue=managers.has_own_queue(patcher.model.diffusion_model),
        blocks=len(blocks),
        block_bytes=sum(map(block_weights.module_bytes, modules)),
        model_bytes=comfy.model_management.module_size(patcher.model),
        patched=len(patcher.patches),
        compiled=bool(compiled) or any(type(p).__name__ == "OptimizedModule" for p in patches),
        hooks=bool(patcher.hook_patches or patcher.forced_hooks),
        gpu_only=patcher.load_device.type != "cpu"
        and patcher.offload_device == patcher.load_device,
    )


class LayerwiseOffload:
    """The wrappers that a MODEL carries.

    Modules are looked up anew in every run, so the same wrappers serve all clones and twins.
    """

    def __init__(self, settings: OffloadSettings, show: Show | None, device_for: DeviceFor) -> None:
        self.settings = settings
        self.last_report: Report | None = None
        self._show = show
        self._device_for = device_for
        self._run: OffloadRun | None = None
        self._for_one_step: int | None = None
        self._trials: dict[Hashable, Trial] = {}

    @property
    def wrappers(self) -> tuple[Callable[..., Any], ...]:
        """In the order of WRAPPERS."""
        return self.prepare, self.sample, self.step, self.forward

    def prepare(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps ComfyUI's loading of the model: notes what it keeps free of weights for a step."""
        self._for_one_step = None
        result = executor(*args, **kwargs)
        given = dict(zip(("model", "noise_shape", "conds"), args, strict=False)) | kwargs
        known = isinstance(given.get("model"), ModelPatcher) and "noise_shape" in given
        if known and not given.get("force_offload"):
            self._for_one_step = residency.bytes_for_one_step(
                given["model"], given["noise_shape"], given.get("conds")
            )
        return result

    def sample(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps the sampler: the model is loaded by now, and the first step has not begun."""
        patcher = getattr(args[0] if args else None, "model_patcher", None)
        if not isinstance(patcher, ModelPatcher):
            logger.info("layerwise offload: a sampler of its own kind, which shows no model")
            return executor(*args, **kwargs)
        noise = kwargs.get("noise", args[4] if len(args) > 4 else None)
        with self._streaming(patcher, tuple(getattr(noise, "shape", USUAL_SHAPE))):
            return executor(*args, **kwargs)

    def step(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps one step of the sampler: between two of them streaming may begin or end."""
        if self._run is not None:
            self._run.between_steps()
        return executor(*args, **kwargs)

    def forward(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps one call of the diffusion model."""
        run = self._run
        if torch.compiler.is_compiling() or run is None or not run.owns(executor.class_obj):
            return executor(*args, **kwargs)
        kind = tuple(tuple(a.shape) for a in args if isinstance(a, torch.Tensor))
        with run.forward(kind):
            return executor(*args, **kwargs)

    @contextmanager
    def _streaming(self, patcher: ModelPatcher, shape: tuple[int, ...]) -> Iterator[None]:
        before = self._run
        facts = facts_of(patcher)
        make = self._device_for(patcher.load_device)
        why_not = refusal(facts, self.settings, make is not None)
        for_one_step = self._for_one_step or residency.bytes_for_one_step(patcher, shape, None)
        run: OffloadRun | None = None
        try:
            if facts.manager == DYNAMIC:
                facts = self._cap_dynamic(patcher, facts, for_one_step)
            if make is None or facts.manager == DYNAMIC or not facts.blocks:
                yield
                return
            trial = self._trial(patcher, shape, facts.compiled) if why_not is None else None
            run = OffloadRun(patcher, self.settings, trial, make, for_one_step, facts.compiled)
            with run:
                self._run = run
                yield
        finally:
            self._run = before
            self._report(patcher, facts, why_not, run)

    def _trial(self, patcher: ModelPatcher, shape: tuple[int, ...], compiled: bool) -> Trial:
        """A new one, or the one that has decided for such a run before."""
        if self.settings.mode == "on":
            return Trial(stream=True, decided=True)
        offloaded = patcher.model_size() - patcher.loaded_size()
        key = (
            *(type(patcher.model).__name__, shape, patcher.load_device, compiled),
            *(patcher.patches_uuid, offloaded // RESIDENCY_STEP),
        )
        known = self._trials.get(key)
        if known is None or not known.decided:
            known = self._trials[key] = Trial()
        return known

    def _cap_dynamic(
        self, patcher: ModelPatcher, facts: OffloadFacts, for_one_step: int
    ) -> OffloadFacts:
        """Set what dynamic VRAM exposes: a limit to what stays on the card."""
        caps = []
        if self.settings.mode != "report" and self.settings.keep_free_gb:
            spare = residency.spare_bytes(patcher, for_one_step) + int(patcher.loaded_size())
            caps.append(max(0, spare - int(self.settings.keep_free_gb * GIB)))
        if self.settings.mode != "report" and self.settings.resident is not None and facts.blocks:
            share = min(self.settings.resident / facts.blocks, 1.0)
            outside = facts.model_bytes - facts.block_bytes
            caps.append(outside + int(share * facts.block_bytes))
        if not caps:
            return facts
        done = managers.cap_dynamic(patcher, min(caps))
        note = (
            f"dynamic VRAM was told to keep at most {min(caps) / 1e9:.2f} GB on the card"
            if done
            else "this ComfyUI does not let a node limit what dynamic VRAM keeps on the card"
        )
        return replace(facts, notes=(*facts.notes, note))

    def _report(
        self,
        patcher: ModelPatcher,
        facts: OffloadFacts,
        why_not: str | None,
        run: OffloadRun | None,
    ) -> None:
        outcome = _outcome(patcher, facts, run)
        wanted = min(self.settings.resident or 0, facts.blocks)
        if run is not None and run.held is not None and run.held < wanted:
            note = f"{wanted} blocks were to stay on the card, {run.held} fit beside the buffers"
            facts = replace(facts, notes=(*facts.notes, note))
        self.last_report = offload_report(NODE, facts, self.settings, why_not, outcome)
        logger.info("layerwise offload: %s", self.last_report.text)
        if self._show is not None:
            self._show(self.last_report.text)


def _outcome(
    patcher: ModelPatcher, facts: OffloadFacts, run: OffloadRun | None
) -> OffloadOutcome | None:
    peak = torch.cuda.max_memory_allocated(patcher.load_device) if facts.device == "cuda" else 0
    if run is not None:
        return run.outcome(facts.block_bytes, peak)
    resident = managers.dynamic_bytes(patcher) if facts.manager == DYNAMIC else None
    if resident is None:
        return None
    streamed = max(facts.model_bytes - resident, 0)
    return OffloadOutcome(resident, streamed, facts.blocks, peak_vram_bytes=peak)
