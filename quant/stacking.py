"""Stacking the rows of quantized weights into one, without touching a code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .stored.codebook import block_scales
from .stored.grid import from_halves, to_halves
from .stored.scheme import Codebook, Grid
from .stored.weight import StoredWeight
from .weight import QuantizedWeight


def stack_native(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """The weight whose rows are those of `weights` in order, or None if their formats differ."""
    first = weights[0]
    for other in weights[1:]:
        alike = replace(other, shape=first.shape, tensors=first.tensors) == first
        if (
            not alike
            or other.shape[1] != first.shape[1]
            or set(other.tensors) != set(first.tensors)
        ):
            return None
        if "_codebook" in first.tensors and not torch.equal(
            other.tensors["_codebook"], first.tensors["_codebook"]
        ):
            return None
    tensors = {
        suffix: tensor
        if suffix == "_codebook"
        else torch.cat([w.tensors[suffix] for w in weights], 1 if suffix == "_correction" else 0)
        for suffix, tensor in first.tensors.items()
    }
    rows = sum(weight.shape[0] for weight in weights)
    return replace(first, shape=(rows, first.shape[1]), tensors=tensors)


def stack_stored(weights: Sequence[StoredWeight]) -> StoredWeight | None:
    """The weight whose rows are those of `weights` in order, or None if one scheme cannot hold it."""
    weights = [_unnested(weight) for weight in weights]
    first = weights[0]
    k = first.shape[1]
    if any(w.scheme != first.scheme or w.shape[1] != k for w in weights[1:]):
        return None
    shape = (sum(weight.shape[0] for weight in weights), k)
    codes = first.scheme.codes
    made = (
        _stack_codebook(weights, codes)
        if isinstance(codes, Codebook)
        else _stack_grid(weights, codes, shape)
    )
    if made is None:
        return None
    if first.scheme.low_rank != "none":
        made["up"] = torch.block_diag(*(weight.tensors["up"] for weight in weights))
        made["down"] = torch.cat([weight.tensors["down"] for weight in weights])
    return StoredWeight(first.scheme, shape, made)


def _unnested(weight: StoredWeight) -> StoredWeight:
    """A codebook weight with its block scales in float32 instead of two levels of codes."""
    codes = weight.scheme.codes
    if not isinstance(codes, Codebook) or codes.nested_block is None:
        return weight
    tensors = {
        name: tensor for name, tensor in weight.tensors.items() if not name.startswith("nested")
    }
    tensors["scale"] = block_scales(weight.tensors, codes)
    return StoredWeight(replace(weight.scheme, codes=Codebook(codes.block)), weight.shape, tensors)


def _stack_codebook(
    weights: Sequence[StoredWeight], codes: Codebook
) -> dict[str, torch.Tensor] | None:
    table = weights[0].tensors["codebook"]
    for weight in weights:
        n, k = weight.shape
        if n * k % codes.block or not torch.equal(weight.tensors["codebook"], table):
            return None
    return {
        "payload": torch.cat([weight.tensors["payload"].flatten() for weight in weights]),
        "scale": torch.cat([weight.tensors["scale"].flatten() for weight in weights]),
        "codebook": table,
    }


def _stack_grid(
    weights: Sequence[StoredWeight], codes: Grid, shape: tuple[int, int]
) -> dict[str, torch.Tensor] | None:
    if any(weight.shape[0] % codes.block_rows for weight in weights[:-1]):
        return None
    made = {
        name: torch.cat([weight.tensors[name] for weight in weights])
        for name in ("scale", "zero")
        if name in weights[0].tensors
    }
    payloads = [weight.tensors["payload"] for weight in weights]
    if codes.packing == "row_halves":
        values = [from_halves(p, w.shape, codes) for p, w in zip(payloads, weights, strict=True)]
        return made | {"payload": to_halves(torch.cat(values), codes)}
    return made | {"payload": torch.cat(payloads)}
