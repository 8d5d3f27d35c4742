"""The choice of tiles and threads."""

from __future__ import annotations

import pytest
from leandit.kernels.cuda.tile import (
    MAX_K,
    ROW_VALUES,
    SHARED_BYTES,
    TILES,
    choose_tile,
    quantize_macros,
)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.m}x{tile.n}")
def test_a_tile_fits_every_card(tile) -> None:
    assert tile.shared_bytes(8) <= SHARED_BYTES
    assert tile.threads <= 256
    assert tile.m // tile.warps_m % 16 == 0 and tile.n // tile.warps_n % 16 == 0


@pytest.mark.parametrize(
    ("m", "n", "multiprocessors", "expected"),
    [
        (32_700, 16_128, 128, (128, 128)),
        (4096, 3072, 128, (128, 128)),
        (1, 3072, 128, (16, 64)),
        (32, 3072, 96, (16, 64)),
        (200, 3072, 128, (64, 128)),
    ],
    ids=["video", "image", "one row", "few rows", "text"],
)
def test_large_work_gets_large_tiles(m, n, multiprocessors, expected) -> None:
    tile = choose_tile(m, n, multiprocessors)
    assert (tile.m, tile.n) == expected


@pytest.mark.parametrize("k", [16, 256, 3072, 5376, 8192, 8208, 14_336, 21_504, MAX_K])
def test_every_value_of_a_row_has_a_thread(k: int) -> None:
    macros = quantize_macros(k, "Float32", 16, "Identity")
    threads, passes = int(str(macros["THREADS"])), int(str(macros["PASSES"]))
    assert threads % 32 == 0 and 32 <= threads <= 512
    assert ROW_VALUES * threads * passes >= k > ROW_VALUES * (threads - 32) * passes


def test_a_row_beyond_the_registers_is_refused() -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_K}"):
        quantize_macros(MAX_K + 16, "Float32", 16, "Identity")
