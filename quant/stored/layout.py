"""The comfy-kitchen layout that holds a stored weight and decodes it in every call.

ComfyUI moves, counts, patches and saves a QuantizedTensor by its layout. This one has no kernels:
a linear on it decodes the weight to the activation's dtype first, so memory stays 4 or 8 bit and
speed is that of a 16-bit linear plus the decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from comfy_kitchen.tensor import QuantizedTensor
from comfy_kitchen.tensor.base import BaseLayoutParams, QuantizedLayout, register_layout_class

from .requantize import requantize
from .scheme import Scheme
from .weight import StoredWeight, decode

LAYOUT_NAME = "LeanDiTStoredLayout"
OPTIONAL = ("zero", "codebook", "nested_scale", "nested_codebook", "up", "down")


@dataclass(frozen=True)
class Params(BaseLayoutParams):
    """The tensors beside the payload, by the names of `StoredWeight`, and the scheme."""

    scheme: Scheme | None = None
    zero: torch.Tensor | None = None
    codebook: torch.Tensor | None = None
    nested_scale: torch.Tensor | None = None
    nested_codebook: torch.Tensor | None = None
    up: torch.Tensor | None = None
    down: torch.Tensor | None = None

    def _tensor_fields(self) -> list[str]:
        return [f.name for f in fields(self) if isinstance(getattr(self, f.name), torch.Tensor)]


class StoredLayout(QuantizedLayout):
    """A `StoredWeight` as comfy-kitchen sees it."""

    Params = Params

    @classmethod
    def quantize(
        cls,
        tensor: torch.Tensor,
        template: QuantizedTensor | None = None,
        stochastic_rounding: int = 0,
        **_options: Any,
    ) -> tuple[torch.Tensor, Params]:
        """A float weight in the scheme of `template`, as ComfyUI asks after merging a LoRA.

        Raises:
            ValueError: without a template, since a scheme is never made up.
        """
        if template is None:
            raise ValueError(f"{LAYOUT_NAME} only requantizes a weight that was stored in a file")
        seed = int(stochastic_rounding or 0)
        stored = requantize(tensor, stored_weight(template), seed)
        made = stored_tensor(stored, tensor.dtype)
        return made._qdata, made._params

    @classmethod
    def requantize_kwargs(cls, qtensor: QuantizedTensor) -> dict[str, Any]:
        return {"template": qtensor}

    @classmethod
    def dequantize(cls, qdata: torch.Tensor, params: Params) -> torch.Tensor:
        return decode(_stored(qdata, params), params.orig_dtype)

    @classmethod
    def get_plain_tensors(cls, qtensor: QuantizedTensor) -> tuple[torch.Tensor, ...]:
        params = qtensor._params
        beside = (getattr(params, name) for name in params._tensor_fields())
        return (qtensor._qdata, *beside)

    @classmethod
    def state_dict_tensors(cls, qdata: torch.Tensor, params: Params) -> dict[str, torch.Tensor]:
        """Everything the weight needs, under the suffixes our loader reads back."""
        tensors = {f"_{name}": getattr(params, name) for name in params._tensor_fields()}
        text = params.scheme.to_json() if params.scheme else "{}"
        shape = torch.tensor(params.orig_shape, dtype=torch.int64)
        scheme = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        return {"": qdata, **tensors, "_shape": shape, "_scheme": scheme}


def stored_tensor(weight: StoredWeight, dtype: torch.dtype) -> QuantizedTensor:
    """A stored weight as a QuantizedTensor, without copying its tensors.

    Args:
        dtype: what the tensor says it is and dequantizes to (ComfyUI's compute dtype).
    """
    register_layout_class(LAYOUT_NAME, StoredLayout)
    optional = {name: weight.tensors[name] for name in OPTIONAL if name in weight.tensors}
    params = Params(
        scale=weight.tensors["scale"],
        orig_dtype=dtype,
        orig_shape=weight.shape,
        scheme=weight.scheme,
        **optional,
    )
    return QuantizedTensor(weight.tensors["payload"], LAYOUT_NAME, params)


def stored_weight(tensor: QuantizedTensor) -> StoredWeight:
    """The stored weight a QuantizedTensor of this layout holds."""
    return _stored(tensor._qdata, tensor._params)


def _stored(payload: torch.Tensor, params: Params) -> StoredWeight:
    if params.scheme is None:
        raise ValueError(f"a tensor of {LAYOUT_NAME} has no scheme")
    tensors = {name: getattr(params, name) for name in params._tensor_fields()}
    n, k = params.orig_shape
    return StoredWeight(params.scheme, (n, k), {"payload": payload, **tensors})
