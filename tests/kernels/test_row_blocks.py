"""Row blocks cover every row once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from leandit.kernels.row_blocks import row_blocks


@given(st.integers(0, 300), st.integers(0, 50), st.integers(1, 200))
def test_blocks_cover_all_rows_in_order_within_the_budget(
    rows: int, columns: int, budget: int
) -> None:
    blocks = list(row_blocks(rows, columns, budget))
    covered = [row for block in blocks for row in range(block.start, block.stop)]
    assert covered == list(range(rows))
    for block in blocks:
        count = block.stop - block.start
        assert count == 1 or count * columns <= budget
