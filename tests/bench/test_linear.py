"""`leandit bench linear`: what it measures and what it prints."""

from __future__ import annotations

import json

import pytest
from leandit.bench.shapes import parse_shapes
from leandit.cli import main


def test_every_contender_has_a_row_and_an_error_where_it_computes_the_linear(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "linear", "--shapes", "64x96x256,33x64x128", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["machine"]["cores"] > 0
    by_shape: dict[tuple[int, ...], dict[str, dict]] = {}
    for row in data["rows"]:
        by_shape.setdefault((row["m"], row["n"], row["k"]), {})[row["backend"]] = row
    assert set(by_shape) == {(64, 96, 256), (33, 64, 128)}
    for (m, n, k), rows in by_shape.items():
        assert {"torch bf16", "torch int8 product alone", "cpu", "comfy-kitchen"} <= set(rows)
        assert rows["torch bf16"]["rel_error"] is None
        assert rows["cpu"]["rel_error"] <= 1.05 * rows["reference"]["rel_error"] < 0.02
        for row in rows.values():
            assert row["ms"] > 0
            assert row["tops"] == pytest.approx(2 * m * n * k / row["ms"] / 1e9)


def test_the_table_says_how_much_of_the_bare_product_is_reached(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "linear", "--shapes", "64x96x256"]) == 0
    text = capsys.readouterr().out
    assert "of int8" in text and "torch bf16" in text and "1.00" in text


@pytest.mark.parametrize("text", ["64x96", "0x1x1", "axbxc", "", "64x96x256,"])
def test_a_shape_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is no shape; write three sides"):
        parse_shapes(text)


def test_a_wrong_shape_is_the_users_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "linear", "--shapes", "big"]) == 2
    assert "'big' is no shape" in capsys.readouterr().err
