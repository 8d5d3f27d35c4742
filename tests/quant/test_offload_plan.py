"""The offload planner: published figures, a simulation of the two engines, and refusals."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from leandit.kernels.streaming.simulate import simulate_forward
from leandit.quant.errors import SettingsError
from leandit.quant.offload_plan import CARDS, GIB, Card, Work, plan_offload, spread

BLOCKS, PARAMETERS, OUTSIDE, WIDTH = 60, 0.48e9, 1.2e9, 6144
TOKENS = {"512": 1536, "1024": 4608, "480p": 32_760, "720p": 75_600}
ACTIVATIONS = {"512": 0.6, "1024": 1.8, "480p": 6.5, "720p": 13.5}
BYTES = {"bf16": 2.0, "int8": 1.0, "int4": 4.25 / 8}


def work(format: str, size: str) -> Work:
    """A model of 30 billion weights, as in the table this is checked against."""
    tokens = TOKENS[size]
    return Work(
        blocks=(int(PARAMETERS * BYTES[format]),) * BLOCKS,
        outside=int(OUTSIDE * BYTES[format]),
        multiplications=BLOCKS * PARAMETERS * tokens,
        attention_operations=4 * tokens**2 * WIDTH * BLOCKS,
        int8=format != "bf16",
        activations=int(ACTIVATIONS[size] * GIB),
    )


@pytest.mark.parametrize(
    ("card", "format", "size", "resident", "streamed_gb", "seconds", "hidden", "to_hide"),
    [
        ("4090", "bf16", "512", 20, 38.4, 1.42, False, 42),
        ("4090", "bf16", "1024", 18, 40.3, 2.16, True, 0),
        ("4090", "bf16", "480p", 13, 45.1, 27.3, True, 0),
        ("4090", "int8", "512", 45, 7.2, 0.27, False, 46),
        ("4090", "int8", "1024", 42, 8.6, 0.96, True, 7),
        ("4090", "int8", "480p", 31, 13.9, 18.7, True, 0),
        ("4090", "int8", "720p", 16, 21.1, 82.7, True, 0),
        ("4090", "int4", "480p", 60, 0.0, 18.7, True, 0),
        ("3090", "int8", "1024", 42, 8.6, 2.34, True, 0),
        ("4080", "int8", "512", 27, 15.8, 0.59, False, None),
        ("4080", "int8", "1024", 24, 17.3, 1.57, True, None),
        ("4060ti", "int8", "512", 27, 15.8, 1.22, False, None),
        ("4060ti", "int8", "1024", 24, 17.3, 3.58, True, None),
        ("4060", "int8", "1024", 6, 25.9, 5.1, True, None),
    ],
)
def test_the_table_of_a_30b_model(
    card, format, size, resident, streamed_gb, seconds, hidden, to_hide
) -> None:
    plan = plan_offload(work(format, size), CARDS[card])
    assert plan.fits
    assert plan.resident == resident
    assert plan.streamed_bytes / 1e9 == pytest.approx(streamed_gb, rel=0.01)
    assert plan.seconds == pytest.approx(seconds, rel=0.05)
    assert plan.hidden == hidden
    if to_hide is not None:
        assert plan.residents_to_hide == to_hide


def test_eight_gigabytes_do_not_hold_a_videos_activations() -> None:
    plan = plan_offload(work("int8", "480p"), CARDS["4060"])
    assert not plan.fits and "do not fit" in plan.why


@pytest.mark.parametrize("seed", range(8))
def test_the_formula_holds_in_a_simulation_of_both_engines(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        count, compute, copy = rng.randint(8, 80), rng.uniform(0.2, 3), rng.uniform(0.2, 3)
        streamed = rng.randint(1, count)
        expected = max(count * compute, streamed * copy)
        found = simulate_forward(spread(count, streamed), compute, copy, 3)
        assert expected * 0.999 <= found <= expected * 1.03


def test_contiguous_residents_are_slower_than_evenly_spaced_ones() -> None:
    count, streamed = 60, 30
    even = simulate_forward(spread(count, streamed), 1.0, 1.8, 2)
    contiguous = simulate_forward([i >= count - streamed for i in range(count)], 1.0, 1.8, 2)
    assert contiguous > 1.2 * even


@pytest.mark.parametrize("streamed", [0, 1, 7, 59, 60])
def test_streamed_blocks_are_evenly_spaced(streamed: int) -> None:
    chosen = [i for i, is_streamed in enumerate(spread(60, streamed)) if is_streamed]
    assert len(chosen) == streamed
    gaps = {b - a for a, b in itertools.pairwise(chosen)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_unequal_blocks_keep_the_largest() -> None:
    sizes = (1 * GIB, 3 * GIB, 2 * GIB, 1 * GIB)
    card = Card("a card", 12 * GIB, 1e12, 1e12, 1e12, 1e9)
    plan = plan_offload(Work(sizes, 0, 1e12, 0, True, 2 * GIB), card)
    assert (plan.resident, plan.streamed_bytes) == (4, 0)
    small = dataclasses.replace(card, vram=int(9.5 * GIB))
    plan = plan_offload(Work(sizes, 0, 1e12, 0, True, GIB // 2), small)
    assert plan.resident == 4
    tight = dataclasses.replace(card, vram=9 * GIB)
    plan = plan_offload(Work(sizes, 0, 1e12, 0, True, GIB), tight)
    assert plan.resident == 0 and plan.streamed_bytes == 7 * GIB


def test_the_verdict_counts_the_streamed_blocks() -> None:
    assert plan_offload(work("int8", "512"), CARDS["4090"]).why == "15 of 60 blocks are streamed"
    assert plan_offload(work("int4", "512"), CARDS["4090"]).why == "everything stays on the card"
    ring = plan_offload(
        dataclasses.replace(work("int8", "1024"), blocks=(9 * GIB, GIB)), CARDS["4060"]
    )
    assert ring.why == "not even two buffers of the largest block (9.00 GiB) fit"


def test_main_memory_that_is_too_small_is_said() -> None:
    plan = plan_offload(work("bf16", "1024"), CARDS["4090"], ram=32 * GIB)
    assert not plan.fits
    assert plan.why == ("streaming needs 55.9 GiB of main memory for the weights, there are 32.0")
    assert plan_offload(work("int8", "1024"), CARDS["4090"], ram=32 * GIB).fits


@pytest.mark.parametrize(
    ("change", "words"),
    [({"vram": 0}, "must be above 0"), ({"bandwidth": 0}, "must be above 0")],
)
def test_nonsense_is_refused_in_words(change, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        plan_offload(work("int8", "1024"), dataclasses.replace(CARDS["4090"], **change))


def test_a_model_without_blocks_is_refused_in_words() -> None:
    empty = dataclasses.replace(work("int8", "1024"), blocks=())
    with pytest.raises(SettingsError, match="no repeated blocks"):
        plan_offload(empty, CARDS["4090"])
