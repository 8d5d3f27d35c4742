"""How many rows one call gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from leandit.kernels.row_split import MAX_ELEMENTS, RowSplit, row_chunks, rows_per_call

QKV = (32700, 16128, 5376)


def stream_k_above(limit: int):
    return lambda m, n, k: 13 if m > limit else 0


@pytest.mark.parametrize(
    ("policy", "config", "expected"),
    [
        (RowSplit("off"), None, 32700),
        (RowSplit("fixed"), None, 8192),
        (RowSplit("fixed", max_rows=1000), None, 1000),
        (RowSplit("fixed", min_out_features=16129), None, 32700),
        (RowSplit("auto"), None, 8192),
        (RowSplit("auto"), stream_k_above(40_000), 32700),
        (RowSplit("auto"), stream_k_above(12_500), 11_008),
        (RowSplit("auto"), stream_k_above(0), 32700),
    ],
    ids=[
        "off: whole",
        "fixed: 8192",
        "fixed: the number given",
        "fixed: narrow layers stay whole",
        "auto, nobody to ask: 8192",
        "auto: whole where the whole is data-parallel",
        "auto: the largest data-parallel chunk",
        "auto: whole where no chunk would be data-parallel",
    ],
)
def test_rows_of_a_video_models_qkv(policy: RowSplit, config, expected: int) -> None:
    assert rows_per_call(*QKV, policy, config) == expected


@pytest.mark.parametrize("mode", ["off", "fixed", "auto"])
def test_no_call_indexes_beyond_32_bits(mode) -> None:
    rows = rows_per_call(100_000, 28_672, 4096, RowSplit(mode, max_rows=100_000))
    assert rows * 28_672 <= MAX_ELEMENTS < (rows + 1) * 28_672


@given(m=st.integers(0, 300_000), rows=st.integers(1, 100_000))
def test_chunks_cover_every_row_once(m: int, rows: int) -> None:
    if m // rows > 5000:
        return
    chunks = row_chunks(m, rows)
    assert [c.start for c in chunks] == [0, *(c.stop for c in chunks[:-1])]
    assert chunks[-1].stop == m
    assert all(c.stop - c.start <= rows for c in chunks)
    assert len(chunks) == max(1, -(-m // min(rows, max(m, 1)))) or rows % 128


def test_the_last_chunk_is_not_a_sliver() -> None:
    lengths = [c.stop - c.start for c in row_chunks(2 * 8192 + 3, 8192)]
    assert lengths == [5504, 5504, 5379]


@pytest.mark.parametrize("wrong", [{"mode": "always"}, {"max_rows": 0}, {"min_out_features": -1}])
def test_nonsense_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match=r"unknown mode|at least 1"):
        RowSplit(**wrong)


def test_comfy_kitchen_can_be_asked_where_it_has_the_function() -> None:
    from leandit.kernels.backends.kitchen import selected_config

    ask = selected_config()
    if ask is None:
        pytest.skip("this comfy-kitchen has no cutlass_int8_selected_config")
    assert ask(*QKV) == 13
    assert ask(8192, *QKV[1:]) == 0
    assert 1024 <= rows_per_call(*QKV, RowSplit("auto"), ask) < 32700
