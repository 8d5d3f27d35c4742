"""The measured streaming benchmark, on a CPU with a device that copies late: its sums, not its speed."""

from __future__ import annotations

import pytest
import torch
from late_device import LateDevice
from leandit.bench import streaming


def rows() -> list[streaming.StreamingRow]:
    return streaming.bench_streaming(torch.device("cpu"), LateDevice, 8, 64, [16], torch.float32)


def test_a_row_says_what_was_streamed_and_what_the_plan_is() -> None:
    found = rows()
    assert [row.resident for row in found] == [0, 4, 6]
    assert [row.streamed_bytes for row in found] == [n * 4 * 64 * 64 * 4 for n in (8, 4, 2)]
    for row in found:
        assert row.source == "measured"
        assert row.plan_seconds >= row.compute_seconds > 0
        assert row.seconds > 0 and row.unplanned_seconds > 0


def test_what_is_computed_is_the_plain_result(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    block = streaming._block

    def kept(h: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        results.append(block(h, weights))
        return results[-1]

    monkeypatch.setattr(streaming, "_block", kept)
    monkeypatch.setattr(streaming, "_compute_seconds", lambda *_: 1.0)
    torch.manual_seed(0)
    rows()
    outputs = results[7::8]
    assert len(outputs) == 3 * (streaming.WARM_UP + streaming.ROUNDS)
    assert torch.isfinite(outputs[0]).all()
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_the_table_has_a_line_for_every_row() -> None:
    from leandit.commands.bench import _streaming_table

    row = streaming.StreamingRow(1024, 24, 12, 402653184, 0.02, 0.015, 0.018, 0.04, 0.9, 25.5)
    table = _streaming_table([row])
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == [
        "1024", "12 of 24", "0.40", "25.5", "0.0150", "0.0180", "0.0200", "0.0400", "90%",
    ]  # fmt: skip
