"""Cutting the rows of an INT8 linear into chunks, as a pure function of numbers.

Each row's arithmetic is its own, so a split result equals the unsplit one bit for bit. Two reasons
to split: comfy-kitchen's library picks a Stream-K kernel for many rows and loses a third of the
speed (qkv of MiniMax H3, M=32700, RTX 4090: 26.5 ms whole, 17.9 ms in chunks of 8192; source:
SGLang), and some kernels index the result with 32 bits (comfy-kitchen issue 136).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

MAX_ELEMENTS = 2**31 - 1
"""Most elements (M_chunk * N) of one call: the largest 32-bit index."""

STREAM_K = frozenset({12, 13})
"""Numbers of comfy-kitchen's CUTLASS configurations that are Stream-K; the others are data-parallel."""

ROW_TILE = 128
"""Chunks are multiples of the kernels' tile, so that only the last one is ragged."""

PROBE_STEP = 1024
MODES = ("auto", "fixed", "off")

SelectedConfig = Callable[[int, int, int], int]
"""(M, N, K) -> number of the configuration that the kernel library would run."""


@dataclass(frozen=True)
class RowSplit:
    """How to split. max_rows: most rows of one call, in mode "fixed", and in "auto" where the
    kernel library cannot be asked; min_out_features: layers with fewer columns N stay whole, since
    they get slower when split (N=5376 in SGLang's measurement)."""

    mode: Literal["auto", "fixed", "off"] = "auto"
    max_rows: int = 8192
    min_out_features: int = 8192

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"unknown mode {self.mode!r}; valid: {', '.join(MODES)}")
        if self.max_rows < 1 or self.min_out_features < 1:
            raise ValueError(
                f"max_rows and min_out_features must be at least 1, got {self.max_rows} and "
                f"{self.min_out_features}"
            )


def rows_per_call(
    m: int, n: int, k: int, policy: RowSplit, selected_config: SelectedConfig | None = None
) -> int:
    """The most rows one call should get, at least 1.

    Args:
        m, n, k: the linear's rows, out_features and in_features.
        selected_config: asks the kernel library; None where it cannot be asked.
    """
    bound = max(1, min(m, MAX_ELEMENTS // max(n, 1)))
    if policy.mode == "off" or n < policy.min_out_features:
        return bound
    if policy.mode == "auto" and selected_config is not None:
        return _largest_data_parallel(m, bound, n, k, selected_config)
    return min(bound, policy.max_rows)


def row_chunks(m: int, rows: int) -> list[slice]:
    """Slices that cover `m` rows in order, each of at most `rows`, of about equal length."""
    if m <= rows:
        return [slice(0, m)]
    even = -(-m // -(-m // rows))
    step = min(rows, -(-even // ROW_TILE) * ROW_TILE)
    return [slice(start, min(start + step, m)) for start in range(0, m, step)]


def _largest_data_parallel(
    m: int, bound: int, n: int, k: int, selected_config: SelectedConfig
) -> int:
    """`bound` where every size is Stream-K: then splitting cannot help."""
    first = (bound - 1) // PROBE_STEP * PROBE_STEP
    for rows in (bound, *range(first, 0, -PROBE_STEP)):
        # The chunks are made equal, so those that will run are asked about.
        lengths = {chunk.stop - chunk.start for chunk in row_chunks(m, rows)}
        if not any(selected_config(length, n, k) in STREAM_K for length in lengths):
            return max(lengths)
    return bound
