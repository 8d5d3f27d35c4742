"""Quantizing a plain torch model, without ComfyUI: the same plan, the same arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from .families import family_of
from .measured import quantize_and_measure
from .native import to_quantized_tensor
from .plan import Layer, Plan, Quantize, make_plan
from .report import LayerResult
from .settings import QuantSettings
from .weight import QuantizedWeight

Progress = Callable[[tuple[Quantize, ...]], Iterable[Quantize]]


class QuantizedLinear(torch.nn.Module):
    """`torch.nn.functional.linear` on a quantized weight, run by comfy-kitchen."""

    def __init__(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        tensor = to_quantized_tensor(weight, dtype)
        self.weight = torch.nn.Parameter(tensor, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
        self.out_features, self.in_features = weight.shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., K) to (..., N) in the dtype of x."""
        return torch.nn.functional.linear(x, self.weight, self.bias)


def describe_module(model: torch.nn.Module) -> list[Layer]:
    """The plan's view of every `torch.nn.Linear` of a model."""
    return [
        Layer(name, module.out_features, module.in_features, module.weight.nbytes)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]


def quantize_module(
    model: torch.nn.Module,
    settings: QuantSettings,
    image_model: str | None = None,
    progress: Progress = iter,
) -> tuple[Plan, dict[str, QuantizedWeight], dict[str, LayerResult]]:
    """Replace the selected Linears of `model`, in place.

    Args:
        image_model: the architecture, as ComfyUI names it, for the family table.
        progress: wraps the layers as they are worked through.

    Returns:
        The plan, the quantized weights by layer name, and size and error of each.

    Raises:
        NothingSelectedError, WeightError: see `make_plan` and `quantize_weight`; the model is
            unchanged then.
    """
    plan = make_plan(describe_module(model), settings, family_of(image_model))
    weights: dict[str, QuantizedWeight] = {}
    results: dict[str, LayerResult] = {}
    for decision in progress(plan.selected):
        name = decision.layer.name
        weight = model.get_submodule(name).get_parameter("weight").detach().float()
        weights[name], sqnr = quantize_and_measure(
            weight, decision.format, decision.group_size, name
        )
        results[name] = LayerResult(weights[name].nbytes, sqnr)
    for name, weight in weights.items():
        parent, _, child = name.rpartition(".")
        linear = dict(model.get_submodule(name).named_parameters())
        replacement = QuantizedLinear(weight, linear.get("bias"), linear["weight"].dtype)
        setattr(model.get_submodule(parent), child, replacement)
    return plan, weights, results
