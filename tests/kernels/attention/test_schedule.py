"""When attention is dense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from leandit.kernels.attention.names import DENSE, SPARSE, dense_name, sparse_name
from leandit.kernels.attention.schedule import (
    Moment,
    Schedule,
    parse_layers,
    parse_tau_profile,
    step_of,
    why_dense,
)

SIGMAS = [1.0, 0.9, 0.7, 0.4, 0.0]


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("0,1,-1", {0, 1, 9}),
        ("0-3", {0, 1, 2, 3}),
        (" 2 , 5 - 6 ", {2, 5, 6}),
        ("-2--1", {8, 9}),
        ("7--1", {7, 8, 9}),
        ("", set()),
        ("20", set()),
    ],
)
def test_layers(text: str, inside: set[int]) -> None:
    layers = parse_layers(text)
    assert {layer for layer in range(10) if layers.contains(layer, 10)} == inside


def test_negative_layers_need_the_number_of_layers() -> None:
    assert not parse_layers("-1").contains(9, None)
    assert parse_layers("0,-1").contains(0, None)


@pytest.mark.parametrize("text", ["a", "1-", "3-1", "1 2", "0x1", "1,,b", "-1--3"])
def test_what_is_no_layer_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no layer|ends before it begins"):
        parse_layers(text)


@pytest.mark.parametrize(
    ("sigma", "step"),
    [(1.0, 0), (0.96, 0), (0.9, 1), (0.94, 1), (0.82, 1), (0.5, 3), (0.4, 3), (0.0, 3), (2, 0)],
)
def test_the_step_of_a_noise_level(sigma: float, step: int) -> None:
    assert step_of(sigma, SIGMAS) == step


@given(sigma=st.floats(0, 2))
def test_a_step_is_always_one_of_the_run(sigma: float) -> None:
    assert 0 <= step_of(sigma, SIGMAS) < len(SIGMAS) - 1


def test_rising_levels_count_in_their_own_order() -> None:
    assert [step_of(sigma, SIGMAS[::-1]) for sigma in SIGMAS[::-1]] == [0, 1, 2, 3, 3]


LONG = 20_000


@pytest.mark.parametrize(
    ("schedule", "moment", "layer", "tokens", "reason"),
    [
        (Schedule(dense_steps=2), Moment(1), 5, LONG, "first 2 steps"),
        (Schedule(dense_steps=2), Moment(2), 5, LONG, None),
        (Schedule(), Moment(0, 0.95, (0.9, 0.0)), 5, LONG, "before 20%"),
        (Schedule(), Moment(1, 0.9, (0.9, 0.0)), 5, LONG, None),
        (Schedule(end_percent=0.8), Moment(3, 0.1, (0.9, 0.2)), 5, LONG, "after 80%"),
        (Schedule(end_percent=0.8), Moment(3, 0.2 - 1e-6, (0.9, 0.2)), 5, LONG, None),
        (Schedule(), Moment(3, 0.9 + 1e-6, (0.9, 0.2)), 5, LONG, None),
        (Schedule(dense_layers=parse_layers("0,-1")), Moment(3), 9, LONG, "layers 0,-1"),
        (Schedule(dense_layers=parse_layers("0,-1")), Moment(3), 5, LONG, None),
        (Schedule(dense_layers=parse_layers("0,-1")), Moment(3), None, LONG, None),
        (Schedule(min_tokens=30_000), Moment(3), 5, LONG, "fewer than 30000 tokens"),
        (Schedule(), Moment(), None, LONG, None),
    ],
)
def test_the_first_reason_counts(schedule, moment, layer, tokens, reason) -> None:
    assert why_dense(schedule, moment, layer, 10, tokens) == reason


def test_a_window_that_falls_is_refused() -> None:
    with pytest.raises(ValueError, match="must rise"):
        Schedule(start_percent=0.9, end_percent=0.2)


def test_tau_by_layer() -> None:
    profile = parse_tau_profile(1.3, "0-1 = 0.5; -1=0.7\n5=2")
    assert [profile.of(layer, 10) for layer in (0, 1, 5, 6, 9, None)] == [
        0.5,
        0.5,
        2,
        1.3,
        0.7,
        1.3,
    ]
    for wrong in ("3", "a=1", "3=x", "3=nan"):
        with pytest.raises(ValueError, match=r"is no (tau|layer)"):
            parse_tau_profile(1.3, wrong)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("FA3", "fa"),
        ("Flash-Attention", "fa"),
        (" sageattention ", "sage_attn"),
        ("sage", "sage_attn"),
        ("PyTorch", "sdpa"),
        ("pytorch attention", "sdpa"),
        ("comfy kitchen attention", "kitchen_int8"),
        *((name, name) for name in DENSE),
    ],
)
def test_dense_names_as_people_write_them(text: str, name: str) -> None:
    assert dense_name(text) == name


def test_sparse_names_and_unknown_ones() -> None:
    assert [sparse_name(n) for n in ("Sol-Attn", "SpargeAttn", "", "None")] == [
        "sol_attn",
        "sparge",
        "none",
        "none",
    ]
    with pytest.raises(ValueError, match=f"unknown dense attention 'magic'; valid: {DENSE[0]}"):
        dense_name("magic")
    with pytest.raises(ValueError, match=f"valid: {', '.join(SPARSE)}"):
        sparse_name("fa")
