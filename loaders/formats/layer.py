"""One quantized layer of a file: the tensors it consists of, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ...quant.stored.scheme import Scheme
from ...quant.stored.weight import StoredWeight
from ...quant.weight import QuantizedWeight
from ..header import TensorEntry

PAYLOADS = (
    "weight",
    "weight._data._data",
    "weight._data",
    "weight_packed",
    "_weight_qdata",
    "weight:qdata",
    "qweight",
)
"""Names under a layer that hold its numbers."""

PART = re.compile(
    r"\.((?:_?weight(?:_\w+)?(?:[.:].+)?)|bias|comfy_quant|input_scale|output_scale|pre_quant_scale"
    r"|scale_weight|scale_input|SCB|scale|zero_point|svd_up|svd_down|qweight|qzeros|scales|g_idx"
    r"|scale_2|scale_zero_point|zero_point_scale|zero_point_2|wscales|wzeros|proj_down|proj_up|smooth_factor|input_zero_point|smooth_scale)$"
)
"""What a tensor that belongs to a Linear may be called, after the layer's name."""

DECISIVE = frozenset(
    [
        "pre_quant_scale",
        "smooth_scale",
        "smooth_factor",
        "svd_up",
        "svd_down",
        "proj_up",
        "proj_down",
        "zero_point",
        "weight_zero_point",
        "_weight_zero_point",
        "weight:zero_point",
        "scale_2",
        "scale_zero_point",
        "zero_point_scale",
        "zero_point_2",
        "qzeros",
        "wzeros",
        "g_idx",
        "weight_g_idx",
        "weight_correction",
        "weight_scale_2",
    ]
)
"""Parts that change what a weight stands for: a reader that does not use one must not ignore it."""

FLOATS = ("BF16", "F16", "F32", "F64")


class TensorSource(Protocol):
    """Anything that gives the tensors of a file by name; a `Checkpoint` is one."""

    def read(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True)
class NativeTensors:
    """A layer that ComfyUI loads by itself (fp8, nvfp4, banks of experts): passed on.

    tensors is by the name after the layer: "weight", "weight_scale", ...
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


Weight = QuantizedWeight | StoredWeight | NativeTensors


@dataclass(frozen=True)
class LayerTensors:
    """The tensors of one layer by the part of their name after the layer's, and its marker.

    config is the parsed `comfy_quant`, None if there is none.
    """

    name: str
    parts: Mapping[str, TensorEntry]
    config: Mapping[str, Any] | None

    def key(self, part: str) -> str:
        """The full name of a part's tensor."""
        return self.parts[part].name

    def fault(self, fault: str, remedy: str = "get the file from another source") -> LayerFault:
        """An error about this layer."""
        return LayerFault(self.name, fault, remedy)

    def require(self, part: str) -> TensorEntry:
        """A part that must be there.

        Raises:
            LayerFault: naming the missing tensor.
        """
        if part not in self.parts:
            raise self.fault(f"has no {part} (it has {', '.join(sorted(self.parts))})")
        return self.parts[part]

    def require_shape(self, part: str, *shapes: tuple[int, ...]) -> TensorEntry:
        """A part that must have one of these shapes.

        Raises:
            LayerFault: naming the shape found and those expected.
        """
        entry = self.require(part)
        if entry.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise self.fault(f"its {part} has the shape {list(entry.shape)}, expected {expected}")
        return entry

    def require_dtype(self, part: str, *dtypes: str) -> TensorEntry:
        """A part that must be stored in one of these dtypes.

        Raises:
            LayerFault: naming the dtype found and those expected.
        """
        entry = self.require(part)
        if entry.dtype not in dtypes:
            raise self.fault(f"its {part} is {entry.dtype}, expected {' or '.join(dtypes)}")
        return entry


class LayerFault(ValueError):
    """Something wrong with one layer of a file."""

    def __init__(self, layer: str, fault: str, remedy: str) -> None:
        self.layer = layer
        self.fault = fault
        self.remedy = remedy
        super().__init__(f"{layer}: {fault}; {remedy}")


@dataclass(frozen=True)
class FileFacts:
    """What of a file matters to more than one layer.

    side holds the JSON objects in files beside it, such as SDNQ's quantization_config.json, by
    file name; rotation is the user's `legacy_rotation` for weights whose rotation is not recorded.
    """

    source: TensorSource
    metadata: Mapping[str, str]
    keys: frozenset[str]
    name: str = ""
    side: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rotation: str = "auto"


@dataclass(frozen=True)
class StoredLayer:
    """A layer that has been recognised: what it is, and how to read it.

    format is the on-disk format; loads_as the ComfyUI format or the scheme it runs as; stock is
    what ComfyUI without this package does with it; rotation the group size and kind, None if not
    rotated; nbytes of everything it consumes; config its label, None if it has none.
    """

    name: str
    format: str
    writer: str
    loads_as: str
    stock: str
    shape: tuple[int, ...]
    keys: tuple[str, ...]
    nbytes: int
    load: Callable[[TensorSource], Weight]
    group_size: int | None = None
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None


def read_stored(
    layer: LayerTensors, scheme: Scheme, shape: tuple[int, int], parts: Mapping[str, str]
) -> Callable[[TensorSource], StoredWeight]:
    """A `load` that takes the layer's parts as they are.

    Args:
        parts: the file's part for each tensor of `StoredWeight`.
    """

    def load(source: TensorSource) -> StoredWeight:
        tensors = {name: source.read(layer.key(part)) for name, part in parts.items()}
        return StoredWeight(scheme, shape, tensors)

    return load


def stored_layer(
    layer: LayerTensors,
    load: Callable[[TensorSource], Weight],
    *,
    format: str,
    writer: str,
    loads_as: str,
    stock: str,
    shape: tuple[int, ...],
    group_size: int | None = None,
    notes: tuple[str, ...] = (),
    uses: Iterable[str] = (),
) -> StoredLayer:
    """A recognised layer; all its parts but the bias belong to it.

    Args:
        uses: those of its `DECISIVE` parts that `load` takes into account.

    Raises:
        LayerFault: if there are others.
    """
    unused = sorted(DECISIVE.intersection(layer.parts) - set(uses))
    if unused:
        raise layer.fault(f"has {', '.join(unused)}, which a weight of {format} does not have")
    entries = [entry for part, entry in layer.parts.items() if part != "bias"]
    return StoredLayer(
        name=layer.name,
        format=format,
        writer=writer,
        loads_as=loads_as,
        stock=stock,
        shape=shape,
        keys=tuple(entry.name for entry in entries),
        nbytes=sum(entry.nbytes for entry in entries),
        load=load,
        group_size=group_size,
        notes=notes,
        config=layer.config,
    )
