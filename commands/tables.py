"""The look of all tables and sizes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table


def table(
    columns: Sequence[str], left: Sequence[str], title: str | None = None, wrap: bool = True
) -> Table:
    """An empty table; columns are set to the right unless they are named in `left`."""
    made = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        made.add_column(name, justify="left" if name in left else "right", no_wrap=not wrap)
    return made


def megabytes(nbytes: int) -> str:
    """Bytes as text."""
    return f"{nbytes / 1e6:.2f} MB"
