"""Which tiles a GEMM is cut into and how a row is spread over threads: pure functions of numbers."""

from __future__ import annotations

from dataclasses import dataclass

DEPTH = 64
"""Bytes of K that one step of the GEMM multiplies."""

SHARED_BYTES = 48 * 1024
"""Shared memory that every card gives a block without being asked for more."""

ROW_VALUES = 16
"""Values of a row that one thread of the quantizer holds in a pass."""

MAX_K = 32_768
"""Longest row the quantizer takes: 512 threads with four passes of 16 values in registers."""


@dataclass(frozen=True)
class GemmTile:
    """m, n: sides of a block's tile of the result; warps_m, warps_n: warps along each side; stages:
    tiles in flight; panels: columns of tiles walked together; speed: of a full tile, per element,
    relative to the largest one. An estimate until a card has been measured: larger tiles read each
    operand fewer times."""

    m: int
    n: int
    warps_m: int
    warps_n: int
    stages: int
    speed: float
    panels: int = 8

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps_m * self.warps_n

    def shared_bytes(self, weight_bits: int) -> int:
        """Shared memory of a block in bytes."""
        return self.stages * DEPTH * (self.m + self.n * weight_bits // 8)

    def macros(self, weight_bits: int, output: str) -> dict[str, object]:
        """What `int8_gemm.cu` is compiled with."""
        return {
            "OUTPUT": output,
            "WEIGHT_BITS": weight_bits,
            "TILE_M": self.m,
            "TILE_N": self.n,
            "DEPTH": DEPTH,
            "WARPS_M": self.warps_m,
            "WARPS_N": self.warps_n,
            "STAGES": self.stages,
            "PANELS": self.panels,
        }


TILES = (
    GemmTile(128, 128, 2, 4, 3, 1.0),
    GemmTile(64, 128, 2, 2, 4, 0.8),
    GemmTile(64, 64, 2, 2, 4, 0.65),
    GemmTile(32, 64, 1, 2, 4, 0.45),
    GemmTile(16, 64, 1, 2, 4, 0.25),
)


def choose_tile(m: int, n: int, multiprocessors: int) -> GemmTile:
    """The tile with the least estimated time: waves of blocks over the card, times a tile's work.

    Args:
        m, n: rows and columns of the result. multiprocessors: of the card.
    """

    def cost(tile: GemmTile) -> float:
        tiles = -(-m // tile.m) * -(-n // tile.n)
        waves = -(-tiles // multiprocessors)
        return waves * tile.m * tile.n / tile.speed

    return min(TILES, key=cost)


def quantize_macros(
    k: int, dtype: str, group_size: int | None, activation: str
) -> dict[str, object]:
    """What `rotate_quantize.cu` is compiled with for rows of K values: few threads for short rows.

    Raises:
        ValueError: if K is beyond `MAX_K`.
    """
    if k > MAX_K:
        raise ValueError(f"rows of K={k} values do not fit a block's registers; at most {MAX_K}")
    passes = 1 if k <= 8192 else 2 if k <= 16_384 else 4
    threads = -(-k // (ROW_VALUES * passes * 32)) * 32
    return {
        "INPUT": dtype,
        "GROUP": group_size or 0,
        "THREADS": threads,
        "PASSES": passes,
        "ACTIVATION": activation,
    }
