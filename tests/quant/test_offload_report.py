"""What the offload node says before and after a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from leandit.kernels.streaming.traced import StepTrace
from leandit.quant.offload_report import (
    CPU,
    DYNAMIC,
    ORDINARY,
    OffloadFacts,
    OffloadOutcome,
    offload_report,
    refusal,
)
from leandit.quant.offload_settings import OffloadSettings

FACTS = OffloadFacts(ORDINARY, "ModelPatcher", "cuda", False, 60, 28_800_000_000, 30_000_000_000)
TRACE = StepTrace(1.0, ((0.0, 0.5),), ((0.4, 0.5),), 14_000_000_000)
RAN = OffloadOutcome(
    resident_bytes=20_000_000_000,
    streamed_bytes=8_800_000_000,
    streamed_blocks=18,
    ring_bytes=960_000_000,
    pinned_bytes=8_800_000_000,
    peak_vram_bytes=22_000_000_000,
    forwards=20,
    streaming=True,
    gain=0.125,
    trace=TRACE,
)


def text(facts: OffloadFacts = FACTS, outcome: Any = RAN, **settings: Any) -> str:
    chosen = OffloadSettings(**settings)
    why_not = refusal(facts, chosen, facts.device == "cuda")
    return offload_report("Node", facts, chosen, why_not, outcome).text


def test_before_a_run_it_says_who_is_in_charge_and_what_will_happen() -> None:
    assert text(outcome=None).splitlines() == [
        "ComfyUI's ordinary patcher is in charge (ModelPatcher)",
        "model: 30.00 GB, 28.80 GB of them in 60 blocks",
        "on the card: ComfyUI chooses; the rest streams 1 block ahead, through 2 buffers; switched "
        "off again if it saves less than 2% of a step",
    ]
    assert "on the card: 42 blocks; the rest streams 3 blocks ahead, through 4 buffers" in text(
        outcome=None, mode="on", resident=42, prefetch=3
    )


def test_after_a_run_it_shows_what_was_measured() -> None:
    lines = text().splitlines()
    assert lines[2:8] == [
        "on the card 20.00 GB, in main memory 8.80 GB of 18 blocks, copied in every step",
        "streaming ahead saves 12.5% of a step",
        "buffers 960.0 MB; 8.80 GB of the weights in pinned memory",
        "most VRAM torch has used so far: 22.00 GB",
        "a step: computing 0.900 s, copying 0.500 s at 28.0 GB/s, 80% of it behind computing",
        "copying   " + "█" * 30 + "·" * 30,
    ]
    assert lines[8].startswith("computing " + "█" * 24 + "·" * 6 + "█" * 30)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gain": 0.004, "streaming": False}, "would save +0.4% of a step: switched off"),
        ({"remembered": True}, "saves 12.5% of a step, measured in an earlier run"),
        ({"gain": -0.1, "streaming": False}, "would save -10.0% of a step: switched off"),
        ({"gain": None}, "streaming ahead"),
        ({"gain": None, "undecided": True}, "still measuring when the run ended"),
        ({"out_of_memory": True, "streaming": False}, "the buffers did not fit on the card"),
        ({"forwards": 0}, "this model does not call ComfyUI's wrappers"),
        ({"streamed_bytes": 0, "ring_bytes": 0}, "everything stays on the card"),
        ({"pinned_bytes": 10}, "not pinned hold up the processor"),
        ({"trace": StepTrace(0.5, (), (), 0)}, "so it is copied once"),
        ({"trace": StepTrace(0.5, (), (), 0), "streaming": False}, "0.500 s, without this node's"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else ", ".join(value),
)
def test_every_outcome_has_its_words(changes: dict[str, Any], words: str) -> None:
    assert words in text(outcome=replace(RAN, **changes))


def test_a_model_compiled_as_one_graph_is_told_apart() -> None:
    outcome = replace(RAN, forwards=0)
    assert "torch.compile has the model as one graph" in text(
        replace(FACTS, compiled=True), outcome
    )


@pytest.mark.parametrize(
    ("facts", "overlap", "mode", "words"),
    [
        ({"manager": DYNAMIC}, True, "on", "layer by layer: this node stays out of its way"),
        ({"manager": DYNAMIC, "own_queue": True}, True, "on", "block by block ahead of use"),
        ({"manager": CPU, "device": "cpu"}, False, "on", "ComfyUI runs on the CPU"),
        ({"device": "mps"}, False, "on", "CUDA and ROCm cards only, this is mps"),
        ({"blocks": 0}, True, "on", "no repeated blocks"),
        ({"hooks": True}, True, "on", "LoRA hooks are on the model"),
        ({"gpu_only": True}, True, "on", "--gpu-only or --highvram"),
        ({}, True, "report", "mode report: nothing is changed"),
        ({"manager": CPU}, True, "on", None),
        ({}, True, "auto", None),
    ],
    ids=[
        "dynamic",
        "own queue",
        "cpu",
        "mps",
        "no blocks",
        "hooks",
        "gpu only",
        "report",
        "cpu that can",
        "ordinary",
    ],
)
def test_why_nothing_streams(
    facts: dict[str, Any], overlap: bool, mode: str, words: str | None
) -> None:
    why = refusal(replace(FACTS, **facts), OffloadSettings(mode), overlap)
    assert why == words if words is None else words in str(why)


def test_on_a_cpu_the_reason_comes_first_and_no_manager_is_named() -> None:
    lines = text(replace(FACTS, manager=CPU, device="cpu"), None).splitlines()
    assert lines[0].startswith("ComfyUI runs on the CPU")
    assert len(lines) == 2


def test_notes_on_loras() -> None:
    patched = replace(FACTS, patched=7, notes=("4 blocks were asked for",))
    report = offload_report("Node", patched, OffloadSettings(), None, None)
    assert report.notes[0] == "4 blocks were asked for"
    assert (
        "LoRAs on 7 weights: ComfyUI applies them to streamed weights in every step"
        in (report.notes[1])
    )
    assert all(f"note: {note}" in report.text for note in report.notes)
    baked = offload_report("Node", patched, OffloadSettings(bake=True), None, None, 5)
    assert "LoRAs are merged into 5 weights" in baked.notes[1]
    assert offload_report("Node", FACTS, OffloadSettings(), None, None).notes == ()


def test_the_summary_is_plain_data_with_every_figure() -> None:
    before = offload_report("Node", FACTS, OffloadSettings(), None, None).summary
    assert before == {
        "manager": "ordinary",
        "patcher": "ModelPatcher",
        "own_queue": False,
        "mode": "auto",
        "blocks": 60,
        "block_bytes": 28_800_000_000,
        "model_bytes": 30_000_000_000,
        "prefetch": 1,
        "why_not": None,
    }
    after = offload_report("Node", FACTS, OffloadSettings(), None, RAN).summary
    assert after.items() >= before.items()
    assert after["streamed_bytes_per_step"] == 8_800_000_000
    assert (after["step_seconds"], after["copy_seconds"]) == (1.0, 0.5)
    assert (after["compute_seconds"], after["overlap"]) == (pytest.approx(0.9), pytest.approx(0.8))
    assert after["peak_vram_bytes"] == 22_000_000_000
    no_trace = offload_report("Node", FACTS, OffloadSettings(), None, replace(RAN, trace=None))
    assert no_trace.summary["step_seconds"] is None
