"""Quantized layers through the cache: written once, then views of a file that ComfyUI maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..loaders.stream import TensorSpec
from ..loaders.weight_cache import CachedFile, WeightCache
from ..loaders.writer import (
    layer_specs,
    native_config,
    native_layer,
    quantization_metadata,
    weight_specs,
)
from ..quant.plan import Plan, Quantize
from ..quant.report import LayerResult
from ..quant.weight import QuantizedWeight
from .file_tensors import FileTensors

CACHE_STATES = ("memory", "written", "rewritten", "hit")
"""Not in the cache; put there now; put there in place of damaged ones; found there."""

Layer = tuple[Quantize, QuantizedWeight, float]


@dataclass(frozen=True)
class CachedLayers:
    """Weights and results by layer name, and how the cache came by them: see `CACHE_STATES`."""

    weights: dict[str, QuantizedWeight]
    results: dict[str, LayerResult]
    state: str


def cached_layers(
    cache: WeightCache,
    key: str,
    plan: Plan,
    quantize: Callable[[], Iterator[Layer]],
    about: dict[str, Any],
) -> CachedLayers:
    """The layers of a plan from the cache, which is filled first if it has to be.

    Args:
        quantize: makes the layers, one at a time; not called where the cache has them.
        about: plain data to show for the entry.

    Raises:
        CacheError: if the cache cannot be used; nothing is left in it then.
    """
    specs = [spec for decision in plan.selected for spec in _specs(decision)]
    state = "rewritten" if cache.has(key) else "written"
    found = cache.find(key, specs)
    if found is not None:
        state = "hit"
    else:
        noted = about | {"sqnr_db": {}}
        configs = {d.layer.name: native_config(d.format, d.group_size) for d in plan.selected}
        found = cache.write(
            key,
            specs,
            quantization_metadata(configs),
            _tensors(quantize(), noted["sqnr_db"]),
            noted,
        )
    source = FileTensors(found.checkpoint)
    weights = {d.layer.name: _weight(d, source, found) for d in plan.selected}
    ratios = found.about.get("sqnr_db", {})
    results = {
        name: LayerResult(weight.nbytes, math.inf if ratios.get(name) is None else ratios[name])
        for name, weight in weights.items()
    }
    return CachedLayers(weights, results, state)


def _specs(decision: Quantize) -> Iterator[TensorSpec]:
    layer = decision.layer
    return layer_specs(layer.name, decision.format, decision.group_size, layer.n, layer.k)


def _tensors(
    layers: Iterator[Layer], ratios: dict[str, float | None]
) -> Iterator[tuple[str, torch.Tensor]]:
    for decision, weight, sqnr in layers:
        ratios[decision.layer.name] = sqnr if math.isfinite(sqnr) else None
        yield from native_layer(decision.layer.name, weight.to("cpu")).items()


def _weight(decision: Quantize, source: FileTensors, file: CachedFile) -> QuantizedWeight:
    layer = decision.layer
    start = f"{layer.name}.weight"
    tensors = {}
    for spec in weight_specs(layer.name, decision.format, layer.n, layer.k):
        tensor = source.read(spec.name)
        # The entry stays in use for as long as anything holds these bytes.
        storage: Any = tensor.untyped_storage()
        storage._leandit_lease = file.lease
        tensors[spec.name.removeprefix(start)] = tensor
    return QuantizedWeight(decision.format, decision.group_size, (layer.n, layer.k), tensors)
