"""Putting the dispatcher's layout on the int8 layers of a MODEL."""

from __future__ import annotations

from typing import Any

from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor

from ..kernels.dispatch import LinearSettings
from ..kernels.linear_dispatch import dispatcher_for
from ..quant.errors import SettingsError
from ..quant.formats import DISPATCHED_INT8_LAYOUT, INT8_LAYOUT
from ..quant.int8_layout import int8_tensor
from ..quant.linear_plan import LinearFilters, plan_linears
from ..quant.linear_report import linear_report
from ..quant.report import Report, plain_report
from . import linears
from .pristine import PristineWeights, unload
from .quantize import compute_dtype
from .twin import make_twin
from .twin_patcher import patcher_over, refuse_held_modules

NODE = "LeanDiTRowSplitLinear"


def row_split_linear(
    model: ModelPatcher, settings: LinearSettings, filters: LinearFilters
) -> tuple[ModelPatcher, Report]:
    """A twin whose int8 layers run through the dispatcher, over the same weights; and the report.

    Raises:
        SettingsError: for an unknown backend.
        HostError: if nodes before this one hold on to the model's modules.
    """
    if settings.split.mode == "off":
        return model.clone(), plain_report(NODE, "mode off: the model is unchanged")
    try:
        dispatcher = dispatcher_for(settings)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    refuse_held_modules(model)
    unload(model.model)
    pristine = PristineWeights.of(model)
    plan = plan_linears(linears.describe_layers(model, pristine), filters)
    modules = linears.linear_modules(model)
    weights: dict[str, Any] = {}
    groups: dict[str, int | None] = {}
    for layer in plan.routed:
        key = linears.weight_key(layer.name)
        held: Any = pristine.parameter(key, modules[layer.name].weight)
        if isinstance(held, QuantizedTensor) and held._layout_cls in (
            INT8_LAYOUT,
            DISPATCHED_INT8_LAYOUT,
        ):
            weights[key] = int8_tensor(held, settings)
            groups[layer.name] = held._params.convrot_groupsize if held._params.convrot else None
    if not weights:
        sentence = "the model has no int8 layers that the settings ask for: it is unchanged"
        return model.clone(), plain_report(NODE, sentence)
    twin = make_twin(model.model, pristine, {}, model.offload_device, weights)
    report = linear_report(
        NODE, plan, dispatcher, model.load_device.type, compute_dtype(model), groups
    )
    return patcher_over(twin, model), report
