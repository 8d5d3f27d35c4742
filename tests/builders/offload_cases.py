"""Models for the offload tests, and what the tests ask of them."""

from __future__ import annotations

from typing import Any

import torch

LONGER: dict[str, dict[str, int]] = {
    "flux": {"depth": 3, "depth_single_blocks": 3},
    "wan": {"num_layers": 5},
    "qwen_image": {"num_layers": 5},
    "z_image": {"n_layers": 5},
    "minimax_h3": {"num_layers": 5},
    "hunyuan_video": {"depth": 3, "depth_single_blocks": 3},
    "ltxv": {"num_layers": 5},
}
"""Enough blocks for a ring of two or three to go around."""

PROJECTIONS = [f"diffusion_model.double_blocks.{i}.img_attn.proj.weight" for i in range(3)]


def longer(tiny: Any, family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model with more blocks than buffers."""
    return tiny.build(family, dtype, **LONGER[family])


def flux(tiny: Any) -> tuple[Any, float]:
    """A Flux of six blocks, and its bytes."""
    import comfy.model_management

    model = tiny.build("flux", depth=3, depth_single_blocks=3)
    return model, comfy.model_management.module_size(model.model)


def with_lora(model: Any, *keys: str, seed: int = 0) -> Any:
    """A clone with random differences on some weights."""
    generator = torch.Generator().manual_seed(seed)
    weights = dict(model.model.named_parameters())
    clone = model.clone()
    for key in keys:
        difference = torch.randn(weights[key].shape, generator=generator) * 0.05
        clone.add_patches({key: ("diff", (difference,))})
    return clone


def wrapper_of(model: Any) -> Any:
    """The node's wrappers on a model."""
    from leandit.host.offload import KEY

    return next(by_key[KEY][0].__self__ for by_key in model.wrappers.values() if by_key.get(KEY))


def last_summary(model: Any) -> dict[str, Any]:
    """The figures of the last run of a model that went through the node."""
    return wrapper_of(model).last_report.summary


def parameters(model: Any) -> dict[str, int]:
    """The identity of every Parameter, by name."""
    return {name: id(p) for name, p in model.model.diffusion_model.named_parameters()}


def hooks(model: Any) -> int:
    """How many forward hooks a model has."""
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks)
        for module in model.model.modules()
    )


def on_card(model: Any) -> int:
    """Bytes of the modules that ComfyUI has marked as loaded."""
    return sum(
        parameter.nbytes
        for module in model.model.modules()
        if getattr(module, "comfy_patched_weights", False)
        for parameter in module._parameters.values()
        if parameter is not None
    )


def patched_twice(model: Any) -> list[str]:
    """Modules whose LoRA is in the weight and applied to it again when it runs."""
    return [
        name
        for name, module in model.model.named_modules()
        if getattr(module, "comfy_patched_weights", False) and module.weight_function
    ]


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative difference of two results."""
    return float((one - other).norm() / other.norm())
