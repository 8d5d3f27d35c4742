"""`leandit bench attention`: every backend has a row, with its error or its reason."""

from __future__ import annotations

import json

import pytest
from leandit.cli import main


def test_what_runs_is_measured_and_what_cannot_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", "--shapes", "2x256x128,2x100x64", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    by_name = {(row["head_dim"], row["backend"]): row for row in rows}
    assert len(rows) == 14
    for name in ("sdpa", "sol_attn"):
        row = by_name[128, name]
        assert row["ms"] > 0 and row["rel_error"] < 0.01 and not row["refusal"]
        assert row["tflops"] == pytest.approx(4 * 2 * 256**2 * 128 / row["ms"] / 1e9)
    assert by_name[64, "sol_attn"]["refusal"] == "takes heads of 128, not 64"
    assert by_name[128, "fa"]["ms"] is None
    assert "NVIDIA" in by_name[128, "fa"]["refusal"]


def test_the_table_names_the_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", "--shapes", "2x64x64"]) == 0
    text = capsys.readouterr().out
    assert "why not" in text and "takes heads of 128, not 64" in text
