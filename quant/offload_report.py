"""What layerwise offload found and measured, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..kernels.streaming.timeline import timeline
from ..kernels.streaming.traced import StepTrace
from ..kernels.streaming.trial import LEAST_GAIN
from .offload_settings import OffloadSettings
from .report import Report, size_text

CPU, DYNAMIC, ORDINARY = "cpu", "dynamic", "ordinary"
"""Who manages a model's memory: nobody on a CPU, ComfyUI's dynamic VRAM, its ordinary patcher."""


@dataclass(frozen=True)
class OffloadFacts:
    """What is known before a run. manager: CPU, DYNAMIC or ORDINARY; patcher: its class; device: type
    of the device; own_queue: whether the model's code queues blocks ahead under dynamic VRAM; blocks:
    their number; block_bytes, model_bytes: sizes; patched: weights with LoRAs waiting; compiled:
    whether torch.compile is on the model; hooks: whether LoRA hooks change weights in the middle of a
    run; gpu_only: whether ComfyUI leaves nothing in main memory (--gpu-only, --highvram)."""

    manager: str
    patcher: str
    device: str
    own_queue: bool
    blocks: int
    block_bytes: int
    model_bytes: int
    patched: int = 0
    compiled: bool = False
    hooks: bool = False
    gpu_only: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class OffloadOutcome:
    """What a run did. Bytes are of the blocks: resident ones, copied in one forward, in buffers, and of
    the masters that are pinned. streaming: at the end of the run; undecided: whether it was still being
    measured then; out_of_memory: whether the buffers did not fit; gain: what was measured; remembered: whether in
    an earlier run."""

    resident_bytes: int = 0
    streamed_bytes: int = 0
    streamed_blocks: int = 0
    ring_bytes: int = 0
    pinned_bytes: int = 0
    peak_vram_bytes: int = 0
    forwards: int = 0
    streaming: bool = False
    undecided: bool = False
    out_of_memory: bool = False
    remembered: bool = False
    gain: float | None = None
    trace: StepTrace | None = None


def refusal(facts: OffloadFacts, settings: OffloadSettings, can_overlap: bool) -> str | None:
    """Why nothing is streamed, in words; None where blocks can be.

    Args:
        can_overlap: whether this package can copy and compute at once on the device.
    """
    if facts.manager == DYNAMIC:
        return _why_not_dynamic(facts)
    if not can_overlap and facts.manager == CPU:
        return (
            "ComfyUI runs on the CPU: weights are where they are computed, so there is nothing to "
            "stream and the model is unchanged"
        )
    if not can_overlap:
        return f"copying while computing works on CUDA and ROCm cards only, this is {facts.device}"
    if facts.gpu_only:
        return "ComfyUI keeps everything on the card (--gpu-only or --highvram): nothing is to be streamed"
    if facts.hooks:
        return (
            "LoRA hooks are on the model: ComfyUI changes weights in the middle of a run, which copies "
            "made ahead would miss, so nothing is streamed ahead"
        )
    if not facts.blocks:
        return "the model has no repeated blocks, so there is nothing to stream"
    return "mode report: nothing is changed" if settings.mode == "report" else None


def _why_not_dynamic(facts: OffloadFacts) -> str:
    start = "ComfyUI's dynamic VRAM manages this model and streams it by itself"
    if facts.own_queue:
        return f"{start}, block by block ahead of use: this node stays out of its way"
    return (
        f"{start}, layer by layer: this node stays out of its way. Starting ComfyUI with "
        "--async-offload 4 lets it copy further ahead"
    )


def offload_report(
    node: str,
    facts: OffloadFacts,
    settings: OffloadSettings,
    why_not: str | None,
    outcome: OffloadOutcome | None,
    baked: int = 0,
) -> Report:
    """The report before a run (outcome None), or after it.

    Args:
        why_not: see `refusal`. baked: weights into which LoRAs were merged.
    """
    lines = [why_not] if why_not else []
    if facts.manager != CPU:
        lines.append(_manager_line(facts))
    lines.append(_size_line(facts))
    if outcome is None and not why_not:
        lines.append(_intention(settings))
    if outcome is not None:
        lines += _outcome_lines(facts, settings, outcome, why_not)
    notes = [*facts.notes]
    if baked:
        notes.append(
            f"LoRAs are merged into {baked} weights, held in main memory beside the originals"
        )
    elif settings.bake and why_not:
        notes.append("LoRAs are not merged, since nothing is streamed")
    elif facts.patched and facts.manager == ORDINARY:
        notes.append(
            f"LoRAs on {facts.patched} weights: ComfyUI applies them to streamed weights in every "
            "step; lora bake merges them once"
        )
    lines += [f"note: {note}" for note in notes]
    return Report(
        node, _summary(facts, settings, why_not, outcome), (), tuple(notes), "\n".join(lines)
    )


def _manager_line(facts: OffloadFacts) -> str:
    who = {
        DYNAMIC: "ComfyUI's dynamic VRAM is in charge",
        ORDINARY: "ComfyUI's ordinary patcher is in charge",
    }[facts.manager]
    return f"{who} ({facts.patcher})"


def _size_line(facts: OffloadFacts) -> str:
    inside = f", {size_text(facts.block_bytes)} of them in {facts.blocks} blocks"
    return f"model: {size_text(facts.model_bytes)}" + (inside if facts.blocks else "")


def _intention(settings: OffloadSettings) -> str:
    kept = "ComfyUI chooses" if settings.resident is None else f"{settings.resident} blocks"
    text = (
        f"on the card: {kept}; the rest streams {settings.prefetch} block"
        f"{'s' if settings.prefetch > 1 else ''} ahead, through {settings.slots} buffers"
    )
    if settings.mode == "auto":
        text += f"; switched off again if it saves less than {LEAST_GAIN:.0%} of a step"
    return text


def _outcome_lines(
    facts: OffloadFacts, settings: OffloadSettings, outcome: OffloadOutcome, why_not: str | None
) -> list[str]:
    lines = [
        f"on the card {size_text(outcome.resident_bytes)}, in main memory "
        f"{size_text(outcome.streamed_bytes)} of {outcome.streamed_blocks} blocks, copied in every step"
    ]
    if not outcome.forwards and why_not is None:
        lines.append(_why_never_called(facts))
    elif not outcome.streamed_bytes and why_not is None:
        lines.append("everything stays on the card: nothing is streamed")
    elif why_not is None:
        lines.append(_verdict(outcome))
    if outcome.ring_bytes:
        lines.append(
            f"buffers {size_text(outcome.ring_bytes)}; {size_text(outcome.pinned_bytes)} of the "
            "weights in pinned memory"
        )
        if outcome.pinned_bytes < 0.9 * outcome.streamed_bytes:
            lines.append("weights that are not pinned hold up the processor while they are copied")
    if outcome.peak_vram_bytes:
        lines.append(f"most VRAM torch has used so far: {size_text(outcome.peak_vram_bytes)}")
    trace = outcome.trace
    if trace is not None and trace.copied_bytes:
        lines.append(
            f"a step: computing {trace.compute_seconds:.3f} s, copying {trace.copy_seconds:.3f} s at "
            f"{trace.bytes_per_second / 1e9:.1f} GB/s, {trace.overlap:.0%} of it behind computing"
        )
        lines.append(timeline(trace))
    elif trace is not None and outcome.streaming:
        lines.append(
            f"a step: {trace.seconds:.3f} s; the buffers hold all that streams, so it is copied once"
        )
    elif trace is not None:
        lines.append(f"a step: {trace.seconds:.3f} s, without this node's streaming")
    return lines


def _why_never_called(facts: OffloadFacts) -> str:
    if facts.compiled:
        return (
            "nothing was streamed: torch.compile has the model as one graph, which copies cannot get "
            "into. Compile its blocks one by one instead"
        )
    return "nothing was streamed: this model does not call ComfyUI's wrappers"


def _verdict(outcome: OffloadOutcome) -> str:
    if outcome.out_of_memory:
        return (
            "the buffers did not fit on the card, so ComfyUI has streamed the weights itself; try fewer "
            "resident blocks, a prefetch of 1 or more keep_free_gb"
        )
    if outcome.undecided:
        return "still measuring when the run ended: six steps are needed, the next run starts anew"
    if outcome.gain is None:
        return "streaming ahead"
    percent = f"{outcome.gain:+.1%}"
    when = ", measured in an earlier run" if outcome.remembered else ""
    if outcome.streaming:
        return f"streaming ahead saves {percent.lstrip('+')} of a step{when}"
    return f"streaming ahead would save {percent} of a step{when}: switched off"


def _summary(
    facts: OffloadFacts,
    settings: OffloadSettings,
    why_not: str | None,
    outcome: OffloadOutcome | None,
) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "manager": facts.manager,
        "patcher": facts.patcher,
        "own_queue": facts.own_queue,
        "mode": settings.mode,
        "blocks": facts.blocks,
        "block_bytes": facts.block_bytes,
        "model_bytes": facts.model_bytes,
        "prefetch": settings.prefetch,
        "why_not": why_not,
    }
    if outcome is None:
        return summary
    trace = outcome.trace
    return summary | {
        "streaming": outcome.streaming,
        "resident_bytes": outcome.resident_bytes,
        "streamed_bytes_per_step": outcome.streamed_bytes,
        "streamed_blocks": outcome.streamed_blocks,
        "ring_bytes": outcome.ring_bytes,
        "pinned_bytes": outcome.pinned_bytes,
        "peak_vram_bytes": outcome.peak_vram_bytes,
        "forwards": outcome.forwards,
        "gain": outcome.gain,
        "step_seconds": trace.seconds if trace else None,
        "compute_seconds": trace.compute_seconds if trace else None,
        "copy_seconds": trace.copy_seconds if trace else None,
        "overlap": trace.overlap if trace else None,
    }
