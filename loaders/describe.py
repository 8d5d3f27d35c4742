"""The layers of a file as the plan wants them described."""

from __future__ import annotations

import re

from ..quant.plan import Layer
from .contents import Contents, LayerItem, PlainItem
from .dtypes import BITS
from .formats.layer import FLOATS, StoredLayer
from .layers import FP8

WEIGHT = ".weight"

LOOKUP_TABLE = re.compile(
    r"(^|\.)(embed_tokens|shared|wte|lm_head|word_embeddings?|token_embedding"
    r"|relative_attention_bias|position_embeddings?|pos_embed|embedding|embeddings)$"
)
"""Names of embedding tables: 2-D weights, but rows are looked up, not multiplied."""

DECODED_FP8 = ("float8_e4m3fn", "float8_e5m2")


def describe_layers(contents: Contents) -> list[Layer]:
    """Every 2-D weight of a file by ComfyUI's name, in the order of the file."""
    plain = (_plain(item) for item in contents.plain if _is_matrix(item))
    return [*plain, *(_quantized(item) for item in contents.layers if len(item.shape) == 2)]


def is_lookup_table(layer: str) -> bool:
    """Whether a layer's name is that of an embedding table: its rows are looked up."""
    return LOOKUP_TABLE.search(layer) is not None


def is_decoded(layer: StoredLayer) -> bool:
    """Whether a quantized layer may be quantized anew: fp8, and what ComfyUI has no format for.

    int8 and int4 in ComfyUI's own formats would only lose by it.
    """
    if any(key.endswith("pre_quant_scale") for key in layer.keys):
        return False
    native = not layer.loads_as.startswith("stored (") and "correction" not in layer.stock
    return layer.loads_as in DECODED_FP8 or not native


def _is_matrix(item: PlainItem) -> bool:
    return item.name.endswith(WEIGHT) and len(item.shape) == 2


def _plain(item: PlainItem) -> Layer:
    name = item.name.removesuffix(WEIGHT)
    packed = None
    if item.dtype not in (*FLOATS, *FP8):
        packed = f"already quantized or packed (stored as {item.dtype})"
    n, k = item.shape
    return Layer(name, n, k, n * k * BITS[item.dtype] // 8, packed, _barred(name), item.dtype)


def _quantized(item: LayerItem) -> Layer:
    kept = next((s for s in item.sources if not is_decoded(s)), None)
    packed = None if kept is None else f"already quantized ({kept.loads_as})"
    n, k = item.shape
    dtype = item.sources[0].format
    return Layer(item.name, n, k, item.nbytes, packed, _barred(item.name), dtype)


def _barred(name: str) -> str | None:
    return "an embedding table: its rows are looked up" if is_lookup_table(name) else None
