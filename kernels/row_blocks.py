"""Row blocks: the way whole-layer operations keep their temporary memory small."""

from __future__ import annotations

from collections.abc import Iterator

BLOCK_ELEMENTS = 1 << 18
"""Elements of a block: 1 MiB of float32, which stays in a core's cache between operations."""


def row_blocks(rows: int, columns: int, block_elements: int = BLOCK_ELEMENTS) -> Iterator[slice]:
    """Slices that cover `rows` rows in order, each of at most `block_elements` elements.

    At least one row each, so a row longer than the budget still passes.
    """
    step = max(1, block_elements // max(columns, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
