"""`leandit bench offload`: the plan beside a simulation of it."""

from __future__ import annotations

import json

import pytest
from leandit.bench.offload import bench_offload
from leandit.cli import main


def test_the_plan_and_the_simulation_agree_and_say_that_they_are_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "offload", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 5 * 3 * 3
    assert {row["source"] for row in rows} == {"simulated"}
    for row in rows:
        if row["fits"]:
            assert row["seconds"] <= row["simulated"] * 1.0001 <= 1.04 * row["seconds"]
            assert row["contiguous"] >= row["simulated"] * 0.999
    by_key = {(row["card"], row["format"], row["work"]): row for row in rows}
    bf16 = by_key["RTX 4090", "bf16", "1024 x 1024"]
    assert (bf16["resident"], bf16["hidden"]) == (18, True)
    int8 = by_key["RTX 4090", "int8", "1024 x 1024"]
    assert int8["contiguous"] > 1.02 * int8["simulated"]


def test_the_table_says_that_it_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offload"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Simulated, from assumed speeds of cards: a model of 60 blocks and 30")
    assert "RTX 4060" in text and "contiguous" in text


def test_shapes_are_not_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offload", "--shapes", "1x2x3"]) == 2
    assert "--shapes is for linear and attention" in capsys.readouterr().err


def test_the_rows_of_the_readme() -> None:
    rows = bench_offload(["4090"])
    row = next(r for r in rows if (r.format, r.work) == ("int8", "512 x 512"))
    assert (row.resident, round(row.simulated, 2), round(row.contiguous, 2)) == (45, 0.27, 0.44)
