"""A comfy-kitchen layout over the same int8 bytes whose linear goes through our dispatcher.

It is a `TensorWiseINT8Layout` in everything else: moving, LoRA, saving (still int8_tensorwise). Its
own transpose, mm and addmm are needed, too: without inference mode a Linear arrives as those, and
comfy-kitchen's transpose gives a tensor of its own layout back.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from comfy_kitchen.tensor import QuantizedTensor, TensorWiseINT8Layout
from comfy_kitchen.tensor.base import (
    dequantize_args,
    register_layout_class,
    register_layout_op,
)

from ..kernels import linear_op
from ..kernels.dispatch import LinearSettings
from .formats import DISPATCHED_INT8_LAYOUT, INT8_LAYOUT

LAYOUT_NAME = DISPATCHED_INT8_LAYOUT


@dataclass(frozen=True)
class Params(TensorWiseINT8Layout.Params):
    """comfy-kitchen's, and how the linear runs, as text (see `linear_op.to_text`)."""

    settings: str = ""


class LeanDiTInt8Layout(TensorWiseINT8Layout):
    """int8 with one scale a row, run by the dispatcher."""

    Params = Params

    @classmethod
    def quantize(cls, tensor: torch.Tensor, settings: str = "", **options: Any) -> Any:
        """See comfy-kitchen's; `settings` is kept. ComfyUI asks for it after merging a LoRA."""
        codes, params = super().quantize(tensor, **options)
        return codes, _with_settings(params, settings)

    @classmethod
    def requantize_kwargs(cls, qtensor: QuantizedTensor) -> dict[str, Any]:
        kept = super().requantize_kwargs(qtensor)
        return {**kept, "settings": qtensor._params.settings}

    @classmethod
    def linear_input_act(cls, *arguments: Any, **options: Any) -> Any:
        """The activation is not fused into the linear here; the caller applies it before."""
        return NotImplemented

    @classmethod
    def fused_rms_modulated(cls, *arguments: Any, **options: Any) -> Any:
        """Nor are norm and modulation."""
        return NotImplemented


def int8_tensor(tensor: QuantizedTensor, settings: LinearSettings) -> QuantizedTensor:
    """The same weight, over the same memory, run by the dispatcher of `settings`.

    Args:
        tensor: of comfy-kitchen's int8 layout, or of this one.
    """
    register()
    params = _with_settings(tensor._params, linear_op.to_text(settings))
    return QuantizedTensor(tensor._qdata, LAYOUT_NAME, params)


def with_settings_of(tensor: QuantizedTensor, other: QuantizedTensor) -> QuantizedTensor:
    """An int8 tensor in this layout, run as `other` is."""
    register()
    return QuantizedTensor(
        tensor._qdata, LAYOUT_NAME, _with_settings(tensor._params, other._params.settings)
    )


def plain_int8_tensor(tensor: QuantizedTensor) -> QuantizedTensor:
    """The same weight in comfy-kitchen's own layout."""
    fields = dataclasses.fields(TensorWiseINT8Layout.Params)
    values = {field.name: getattr(tensor._params, field.name) for field in fields}
    return QuantizedTensor(tensor._qdata, INT8_LAYOUT, TensorWiseINT8Layout.Params(**values))


@cache
def register() -> None:
    """Tell comfy-kitchen of the layout and torch of the operator, once."""
    register_layout_class(LAYOUT_NAME, LeanDiTInt8Layout)
    aten = torch.ops.aten
    for operation, handler in (
        (aten.linear.default, _linear),
        (aten.t.default, _transpose),
        (aten.mm.default, _mm),
        (aten.addmm.default, _addmm),
    ):
        register_layout_op(operation, LeanDiTInt8Layout)(handler)
    linear_op.registered()


def _with_settings(params: Any, settings: str) -> Params:
    fields = dataclasses.fields(TensorWiseINT8Layout.Params)
    return Params(
        **{field.name: getattr(params, field.name) for field in fields}, settings=settings
    )


def _linear(_first: Any, args: Any, kwargs: Any) -> torch.Tensor:
    operands: Any = (*args, None)
    x, weight, bias = operands[:3]
    if not _is_ours(weight) or weight._params.transposed:
        return torch.nn.functional.linear(*dequantize_args(args), **dequantize_args(kwargs))
    return _run(x, weight, bias)


def _transpose(_first: Any, args: Any, kwargs: Any) -> torch.Tensor:
    (tensor,) = args
    old = tensor._params
    shape = (old.orig_shape[1], old.orig_shape[0])
    params = dataclasses.replace(old, orig_shape=shape, transposed=not old.transposed)
    return QuantizedTensor(tensor._qdata, LAYOUT_NAME, params)


def _mm(_first: Any, args: Any, kwargs: Any) -> torch.Tensor:
    x, weight = args
    if not _is_ours(weight) or not weight._params.transposed:
        plain: Any = (dequantize_args(args), dequantize_args(kwargs))
        return torch.mm(*plain[0], **plain[1])
    return _run(x, weight, None)


def _addmm(_first: Any, args: Any, kwargs: Any) -> torch.Tensor:
    bias, x, weight = args
    fits = _is_ours(weight) and weight._params.transposed and not kwargs and bias.ndim == 1
    if not fits:
        plain: Any = (dequantize_args(args), dequantize_args(kwargs))
        return torch.addmm(*plain[0], **plain[1])
    return _run(x, weight, bias)


def _is_ours(weight: Any) -> bool:
    return isinstance(weight, QuantizedTensor) and weight._layout_cls == LAYOUT_NAME


def _run(x: Any, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    params = weight._params
    if isinstance(x, QuantizedTensor):
        x = x.dequantize()
    codes = weight._qdata
    scale = params.scale.float().reshape(-1, 1).expand(codes.shape[0], 1)
    group = params.convrot_groupsize if params.convrot else 0
    return torch.ops.leandit.int8_linear(x, codes, scale, bias, group, params.settings)
