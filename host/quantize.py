"""Quantize a loaded MODEL: read, bake, quantize layer by layer, and build the twin."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comfy.lora
import comfy.model_management
import comfy.ops
import torch
from comfy.model_patcher import ModelPatcher

from ..kernels.backend import LinearRequest
from ..kernels.backends.kitchen import Route, linear_route
from ..kernels.cache_folder import cache_folder
from ..loaders.errors import CacheError
from ..loaders.weight_cache import CACHE_NAME, WeightCache
from ..quant.errors import SettingsError
from ..quant.families import family_of
from ..quant.measured import quantize_and_measure
from ..quant.native import to_quantized_tensor
from ..quant.offload_report import DYNAMIC
from ..quant.plan import Plan, Quantize, make_plan, quantized_before_note
from ..quant.report import LayerResult, Report, cache_note, quantize_report
from ..quant.settings import CACHES, QuantSettings
from ..quant.weight import QuantizedWeight
from . import linears, managers
from .cached_weights import CachedLayers, Layer, cached_layers
from .fingerprint import quantized_key
from .pristine import PristineWeights, unload
from .progress import interruptible
from .twin import make_twin
from .twin_patcher import patcher_over, refuse_held_modules

logger = logging.getLogger(__name__)

FLOAT_COPIES = 4
"""Float32 copies of the largest layer that must fit on the compute device, with room to spare."""

REPORT_ROWS = 4096
"""Rows (tokens) of the linear the report asks the kernel library about: a 1024 x 1024 image."""


def quantize_model(
    model: ModelPatcher,
    settings: QuantSettings,
    loras: str = "bake",
    device: str = "auto",
    cache: str = "memory",
    weight_cache: WeightCache | None = None,
) -> tuple[ModelPatcher, Report]:
    """A quantized twin of `model`, and the report. `model` stays as it is.

    Args:
        loras: "bake" applies the patches waiting on selected weights before quantizing and takes
            them off the twin's list; "keep" leaves them to ComfyUI.
        device: where to compute: "auto", "gpu" or "cpu".
        cache: where the quantized weights are held: "memory"; "disk", in `weight_cache`, from which
            the next session reads them; "auto", on the disk under dynamic VRAM.
        weight_cache: None for the user's own.

    Raises:
        SettingsError: for an unknown `loras`, `device` or `cache`, or "gpu" without one.
        HostError: if nodes before this one hold on to the unquantized modules.
        NothingSelectedError, WeightError: see `make_plan` and `quantize_weight`.
    """
    started = time.perf_counter()
    if loras not in ("bake", "keep"):
        raise SettingsError(f"unknown loras {loras!r}; valid values: bake, keep")
    if cache not in CACHES:
        raise SettingsError(f"unknown cache {cache!r}; valid values: {', '.join(CACHES)}")
    compute_device = _compute_device(model, device)
    refuse_held_modules(model)
    unload(model.model)
    pristine = PristineWeights.of(model)
    family = family_of(_image_model(model))
    plan = make_plan(linears.describe_layers(model, pristine), settings, family)
    if not plan.selected:
        report = _report(model, model, plan, {}, settings, compute_device, 0, started)
        return model.clone(), report

    bake = loras == "bake"
    modules = linears.linear_modules(model)
    plan = _with_note_of_quantized_before(plan, modules, pristine)

    def quantize() -> Iterator[Layer]:
        _make_room(plan, compute_device)
        for decision in interruptible(plan.selected):
            module = modules[decision.layer.name]
            yield _quantize_layer(model, module, decision, pristine, compute_device, bake)

    on_disk = cache == "disk" or (cache == "auto" and managers.manager_of(model) == DYNAMIC)
    held, note = None, None
    if on_disk:
        try:
            disk = weight_cache or WeightCache(cache_folder() / CACHE_NAME)
            key = quantized_key(model, plan, pristine, bake, compute_device)
            held = cached_layers(disk, key, plan, quantize, _about(model, settings))
            note = cache_note(held.state, sum(w.nbytes for w in held.weights.values()))
        except CacheError as error:
            note = f"the weights are held in memory, not in the cache: {error}"
            logger.warning("quantize: %s", note)
    if held is None:
        held = _in_memory(quantize)
    operations = comfy.ops.mixed_precision_ops({}, compute_dtype(model))
    replaced = {}
    for name, weight in held.weights.items():
        home = pristine.parameter(linears.weight_key(name), modules[name].weight).device
        moved = weight if home.type == "cpu" else weight.to(home)
        replaced[name] = _quantized_module(operations, modules[name], moved, pristine, name)
    twin = make_twin(model.model, pristine, replaced, model.offload_device)
    quantized = patcher_over(twin, model)
    baked = _drop_patches(quantized, plan) if bake else 0
    if note is not None:
        plan = plan.with_note(note)
    report = _report(
        model, quantized, plan, held.results, settings, compute_device, baked, started, held.state
    )
    logger.info("quantize: %s", report.text.partition("\n")[0])
    return quantized, report


def _in_memory(quantize: Callable[[], Iterator[Layer]]) -> CachedLayers:
    layers = CachedLayers({}, {}, "memory")
    for decision, weight, sqnr in quantize():
        layers.weights[decision.layer.name] = weight
        layers.results[decision.layer.name] = LayerResult(weight.nbytes, sqnr)
    return layers


def _about(model: ModelPatcher, settings: QuantSettings) -> dict[str, str]:
    """What `leandit cache` shows of an entry."""
    about = {"model": type(model.model).__name__, "format": settings.format.name}
    arguments = (model.cached_patcher_init or (None, ()))[1]
    files = [Path(a).name for a in arguments if isinstance(a, str | Path) and Path(a).suffix]
    return about | ({"file": files[0]} if files else {})


def _with_note_of_quantized_before(
    plan: Plan, modules: dict[str, Any], pristine: PristineWeights
) -> Plan:
    before = []
    for layer in (decision.layer for decision in plan.selected):
        module = modules[layer.name]
        weight = pristine.parameter(linears.weight_key(layer.name), module.weight)
        if linears.is_quantized_before(weight):
            before.append(getattr(module, "quant_format", str(weight.dtype).removeprefix("torch.")))
    return plan.with_note(quantized_before_note(len(before), before[0])) if before else plan


def _image_model(model: ModelPatcher) -> str | None:
    """ComfyUI's name of the architecture; None for UNets and for models of other packages."""
    config = getattr(getattr(model.model, "model_config", None), "unet_config", None)
    return config.get("image_model") if isinstance(config, dict) else None


def _compute_device(model: ModelPatcher, device: str) -> torch.device:
    if device not in ("auto", "gpu", "cpu"):
        raise SettingsError(f"unknown device {device!r}; valid values: auto, gpu, cpu")
    has_gpu = not comfy.model_management.is_device_cpu(model.load_device)
    if device == "gpu" and not has_gpu:
        raise SettingsError("device is 'gpu' but ComfyUI runs on the CPU; use 'auto' or 'cpu'")
    return torch.device("cpu") if device == "cpu" or not has_gpu else model.load_device


def _make_room(plan: Plan, device: torch.device) -> None:
    largest = max(decision.layer.n * decision.layer.k for decision in plan.selected)
    if not comfy.model_management.is_device_cpu(device):
        comfy.model_management.free_memory(largest * 4 * FLOAT_COPIES, device)


def compute_dtype(model: ModelPatcher) -> torch.dtype:
    """The dtype of activations, also where a node has set it on this clone."""
    return model.get_model_object("manual_cast_dtype") or model.model.get_dtype()


def _quantize_layer(
    model: ModelPatcher,
    module: Any,
    decision: Quantize,
    pristine: PristineWeights,
    device: torch.device,
    bake: bool,
) -> Layer:
    """Home device -> compute device -> home; the float copy is gone when this returns."""
    name, key = decision.layer.name, linears.weight_key(decision.layer.name)
    source = pristine.parameter(key, module.weight)
    weight = linears.float_weight(source, device)
    if bake and key in model.patches:
        weight = comfy.lora.calculate_weight(
            model.patches[key], weight, key, intermediate_dtype=torch.float32
        )
    quantized, sqnr = quantize_and_measure(weight, decision.format, decision.group_size, name)
    return decision, quantized.to(source.device), sqnr


def _quantized_module(
    operations: Any,
    source: Any,
    weight: QuantizedWeight,
    pristine: PristineWeights,
    name: str,
) -> torch.nn.Module:
    """ComfyUI's own mixed-precision Linear over the quantized weight and the source's bias."""
    module = operations.Linear(source.in_features, source.out_features, bias=False, device="meta")
    tensor = to_quantized_tensor(weight, operations._compute_dtype)
    module.weight = torch.nn.Parameter(tensor, requires_grad=False)
    module.layout_type = weight.format.layout
    module.quant_format = weight.format.native_format
    if source.bias is not None:
        bias = pristine.parameter(linears.bias_key(name), source.bias).detach()
        module.bias = torch.nn.Parameter(bias, requires_grad=False)
        module.bias_comfy_model_dtype = getattr(source, "bias_comfy_model_dtype", bias.dtype)
    module.factory_kwargs["device"] = weight.tensors[""].device
    return module.eval()


def _drop_patches(quantized: ModelPatcher, plan: Plan) -> int:
    """Take the baked patches off the twin's list; returns how many weights had some."""
    keys = [linears.weight_key(decision.layer.name) for decision in plan.selected]
    return sum(quantized.patches.pop(key, None) is not None for key in keys)


def _report(
    source: ModelPatcher,
    result: ModelPatcher,
    plan: Plan,
    results: dict[str, LayerResult],
    settings: QuantSettings,
    device: torch.device,
    baked: int,
    started: float,
    cache: str = "memory",
) -> Report:
    sizes = [
        comfy.model_management.module_size(patcher.model.diffusion_model)
        for patcher in (source, result)
    ]
    if source.force_cast_weights and plan.selected:
        plan = plan.with_note(
            "a node has set a compute dtype on the model, so ComfyUI dequantizes every weight in "
            "every call and no integer kernel runs; take that node out"
        )
    return quantize_report(
        node="LeanDiTQuantizeModel",
        plan=plan,
        results=results,
        settings=settings,
        model_bytes=(sizes[0], sizes[1]),
        route=_route(source, plan),
        device=str(device),
        baked=baked,
        seconds=time.perf_counter() - started,
        cache=cache,
    )


def _route(model: ModelPatcher, plan: Plan) -> Route | None:
    """Which kernels will run the largest quantized layer."""
    if not plan.selected:
        return None
    largest = max(plan.selected, key=lambda decision: decision.layer.n * decision.layer.k)
    request = LinearRequest(
        device=model.load_device.type,
        dtype=compute_dtype(model),
        m=REPORT_ROWS,
        n=largest.layer.n,
        k=largest.layer.k,
        group_size=largest.group_size,
    )
    return linear_route(largest.format.layout, request)
