"""Finding a model's repeated blocks from layer names alone.

A diffusion transformer spends nearly all its weights in towers: numbered blocks with the same
layers in each, such as `double_blocks.0.img_attn.qkv` ... `double_blocks.18.img_attn.qkv`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

SIDE_NETWORK = re.compile(
    r"embed|refiner|connector|guidance|(?<!dif)fusion|adapter|encoder|resampler|injector|(^|_)in$"
    r"|^vis(ual|ion)(_|$)",
    re.I,
)
"""Parts of a name before the block number that mark a helper of the model, not its main tower."""

MODULATION = re.compile(
    r"(^|_)mod(ulation)?($|_)|^mod[cx]+$|ada_?ln|ada_?norm|^norm|scale_shift|time_emb|^emb_layers$",
    re.I,
)
"""Parts of a name after the block number that mark a layer feeding norms: scale, shift, gate."""


@dataclass(frozen=True)
class Position:
    """Where a layer sits: tower is the name before the block number, or None outside of any.

    blocks is the number of blocks of that tower; inner is the name after the block number; helper
    is the part of the tower's name by which it is a helper network of the model, None if it is the
    main one. Where no tower would be the main one, as in a T5 encoder, all of them are.
    """

    tower: str | None
    blocks: int
    inner: str
    helper: str | None = None


def locate(names: Iterable[str]) -> dict[str, Position]:
    """Find each layer's tower.

    A tower is a name part with at least two block numbers under it that share a layer name, as in
    `blocks.0.ffn.0` and `blocks.1.ffn.0`. A plain sequence such as `time_embedding.0`,
    `time_embedding.2` is none, since nothing is repeated in it.
    """
    names = tuple(names)
    blocks_with: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name in names:
        for tower, block, inner in _splits(name):
            blocks_with[tower, inner].add(block)
    sizes: dict[str, set[str]] = defaultdict(set)
    for (tower, _inner), blocks in blocks_with.items():
        if len(blocks) > 1:
            sizes[tower] |= blocks
    helpers = {tower: _helper(tower) for tower in sizes}
    if None not in helpers.values():
        helpers = dict.fromkeys(helpers)
    return {name: _position(name, sizes, helpers) for name in names}


def _helper(tower: str) -> str | None:
    return next((part for part in tower.split(".") if SIDE_NETWORK.search(part)), None)


def _splits(name: str) -> Iterable[tuple[str, str, str]]:
    """(tower, block, inner) for every number in the name that has something on both sides."""
    parts = name.split(".")
    for index in range(1, len(parts) - 1):
        if parts[index].isdigit():
            yield ".".join(parts[:index]), parts[index], ".".join(parts[index + 1 :])


def _position(name: str, sizes: dict[str, set[str]], helpers: dict[str, str | None]) -> Position:
    for tower, _block, inner in _splits(name):
        if tower in sizes:
            return Position(tower, len(sizes[tower]), inner, helpers[tower])
    return Position(None, 0, name)


def why_keep(position: Position) -> str | None:
    """The architecture-agnostic rule: why a layer at `position` is kept, or None to quantize it."""
    if position.tower is None:
        return "outside the repeated blocks: an embedder, final layer or shared projection"
    if position.helper is not None:
        return (
            f"in the helper network {position.helper!r}, which costs little and feeds every block"
        )
    modulation = next((p for p in position.inner.split(".") if MODULATION.search(p)), None)
    if modulation is not None:
        return f"modulation or norm projection {modulation!r}: sets scale and shift of every token"
    return None
