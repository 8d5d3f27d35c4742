"""A surveyed file as a state dict that ComfyUI's own model detection and loading take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from ..loaders.contents import Contents, LayerItem, LoadedWeight, to_float
from ..loaders.describe import is_lookup_table
from ..loaders.formats.layer import NativeTensors, TensorSource
from ..loaders.kept import is_native
from ..loaders.writer import marker, native_layer
from ..quant import towers
from ..quant.native import to_quantized_tensor
from ..quant.nearest import nearest_native
from ..quant.stored.layout import stored_tensor
from ..quant.stored.weight import StoredWeight
from ..quant.weight import QuantizedWeight

DETECTION_DTYPE = torch.bfloat16
"""What quantized weights pretend to be until ComfyUI has chosen the compute dtype."""

SWITCH = "leandit_loads_these_layers.comfy_quant"
"""A key whose only effect is that ComfyUI builds the model from its mixed-precision layers."""

Progress = Callable[[tuple[LayerItem, ...]], Iterable[LayerItem]]


@dataclass
class StateDict:
    """tensors by ComfyUI's names; held is what each quantized layer is held as; sqnr the error of
    layers converted to a native format, in dB."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    held: dict[str, LoadedWeight] = field(default_factory=dict)
    sqnr: dict[str, float] = field(default_factory=dict)


def state_dict(
    contents: Contents, source: TensorSource, to_native: bool, progress: Progress = iter
) -> StateDict:
    """Read everything; tensors whose bytes are used as stored stay views of the file.

    Args:
        to_native: convert what ComfyUI has no format for.
        progress: wraps the layers as they are read.

    Raises:
        WeightError: if a weight to convert holds NaN or Inf.
    """
    made = StateDict()
    positions = towers.locate(layer.name for layer in contents.layers)
    for item in contents.plain:
        made.tensors[item.name] = item.load(source)
    for item in progress(contents.layers):
        weight = item.load(source)
        if to_native and needs_conversion(weight):
            in_blocks = positions[item.name].tower is not None
            bits = weight.scheme.bits if isinstance(weight, StoredWeight) else 4
            weight, made.sqnr[item.name] = nearest_native(
                to_float(weight), bits, item.name, in_blocks
            )
        made.held[item.name] = weight
        made.tensors |= _tensors(item.name, weight)
    if made.held:
        made.tensors[SWITCH] = marker({})
    return made


def needs_conversion(weight: LoadedWeight) -> bool:
    """Whether stock ComfyUI could not load this weight, or not all of it, from a native file."""
    return isinstance(weight, QuantizedWeight | StoredWeight) and not is_native(weight)


def _tensors(name: str, weight: LoadedWeight) -> dict[str, torch.Tensor]:
    if isinstance(weight, torch.Tensor):
        return {f"{name}.weight": weight}
    if isinstance(weight, NativeTensors):
        tensors = {f"{name}.{part}": tensor for part, tensor in weight.tensors.items()}
        return tensors | {f"{name}.comfy_quant": marker(weight.config)}
    if isinstance(weight, StoredWeight):
        return {f"{name}.weight": stored_tensor(weight, DETECTION_DTYPE)}
    if is_lookup_table(name):
        return native_layer(name, weight)  # embeddings read their own label
    return {f"{name}.weight": to_quantized_tensor(weight, DETECTION_DTYPE)}
