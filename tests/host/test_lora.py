"""LoRAs before and after quantizing: every kind of patch, in every order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("inference")

QKV = "diffusion_model.double_blocks.0.img_attn.qkv.weight"
PROJ = "diffusion_model.double_blocks.1.img_attn.proj.weight"
KEPT = "diffusion_model.img_in.weight"


def randn(*shape: int, seed: int = 0, scale: float = 0.05) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def lora(n: int, k: int, **extra: Any) -> Any:
    from comfy.weight_adapter.lora import LoRAAdapter

    weights = (randn(n, 8, seed=1), randn(8, k, seed=2), 8.0, None, extra.get("dora"), None)
    return LoRAAdapter(set(), weights)


def dora(n: int, k: int) -> Any:
    return lora(n, k, dora=randn(1, k, seed=3, scale=0.3).abs() + 0.7)


def lokr(n: int, k: int) -> Any:
    from comfy.weight_adapter.lokr import LoKrAdapter

    weights = (randn(16, 16, seed=1), randn(n // 16, k // 16, seed=2), 1.0, *[None] * 6)
    return LoKrAdapter(set(), weights)


def loha(n: int, k: int) -> Any:
    from comfy.weight_adapter.loha import LoHaAdapter

    parts = [randn(n, 8, seed=1, scale=0.3), randn(8, k, seed=2, scale=0.3)]
    parts += [8.0, randn(n, 8, seed=3, scale=0.3), randn(8, k, seed=4, scale=0.3), None, None, None]
    return LoHaAdapter(set(), tuple(parts))


def diff(n: int, k: int) -> Any:
    return ("diff", (randn(n, k, seed=5),))


def overwrite(n: int, k: int) -> Any:
    return ("set", (randn(n, k, seed=6),))


KINDS: list[Any] = [lora, dora, lokr, loha, diff, overwrite]


def patches_of(kind: Callable[[int, int], Any]) -> dict[Any, Any]:
    """The kind on a whole weight, and on the value rows of a fused qkv."""
    return {PROJ: kind(256, 256), (QKV, (0, 512, 256)): kind(256, 256)}


def merged(patcher: Any, key: str) -> torch.Tensor:
    """The float32 weight with every patch on it, by ComfyUI's arithmetic."""
    import comfy.lora
    import comfy.utils

    weight = comfy.utils.get_attr(patcher.model, key).to(torch.float32, copy=True)
    return comfy.lora.calculate_weight(patcher.patches.get(key, []), weight, key)


def stored(patcher: Any, key: str) -> torch.Tensor:
    import comfy.utils

    return comfy.utils.get_attr(patcher.model, key)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.fixture
def quantize(comfyui: Any) -> Any:
    from leandit.host.quantize import quantize_model
    from leandit.quant.settings import settings_from

    def run(model: Any, loras: str = "bake", format: str = "int8_convrot", **settings: str) -> Any:
        return quantize_model(model, settings_from(format, **settings), loras)

    return run


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_baking_gives_the_bits_of_quantizing_the_float32_merge(
    tiny: Any, quantize: Any, kind: Any
) -> None:
    from leandit.quant.formats import FORMATS
    from leandit.quant.weight import quantize_weight

    source = tiny.build("flux", torch.bfloat16).clone()
    source.add_patches(patches_of(kind), 0.8)
    quantized, report = quantize(source)
    for key in (PROJ, QKV):
        merge = merged(source, key)
        assert relative(stored(source, key).float(), merge) > 0.01
        expected = quantize_weight(merge, FORMATS["int8_convrot"], 256)
        assert torch.equal(stored(quantized, key)._qdata, expected.tensors[""])
        assert torch.equal(stored(quantized, key)._params.scale, expected.tensors["_scale"])
        assert key not in quantized.patches
        assert key in source.patches
    assert report.summary["loras_baked"] == 2
    assert "LoRAs merged into 2 weights" in report.text


def test_patches_on_kept_weights_stay_on_the_list(tiny: Any, quantize: Any) -> None:
    source = tiny.build("flux", torch.bfloat16).clone()
    source.add_patches({KEPT: diff(256, 64), PROJ: diff(256, 256)})
    quantized, _ = quantize(source)
    assert set(quantized.patches) == {KEPT}
    assert quantized.patches_uuid != source.patches_uuid


def test_keep_leaves_every_patch_to_comfyui(tiny: Any, quantize: Any) -> None:
    source = tiny.build("flux", torch.bfloat16).clone()
    source.add_patches(patches_of(lora), 0.8)
    quantized, report = quantize(source, "keep")
    plain, _ = quantize(tiny.build("flux", torch.bfloat16))
    assert set(quantized.patches) == {PROJ, QKV}
    assert torch.equal(stored(quantized, PROJ)._qdata, stored(plain, PROJ)._qdata)
    assert report.summary["loras_baked"] == 0


def strong_lora() -> dict[Any, Any]:
    """A LoRA on every attention input and MLP output, strong enough to change the result."""
    return {
        f"diffusion_model.double_blocks.{index}.{part}.weight": lora(n, k)
        for index in (0, 1)
        for part, n, k in (
            ("img_attn.qkv", 768, 256),
            ("txt_attn.qkv", 768, 256),
            ("img_mlp.2", 256, 1024),
            ("txt_mlp.2", 256, 1024),
        )
    }


def run_with(tiny: Any, quantize: Any, when: str, format: str) -> torch.Tensor:
    """Latents of a quantized run with a LoRA that came in before (bake, keep) or after."""
    source = tiny.build("flux", torch.bfloat16)
    if when == "after":
        model = quantize(source, format=format)[0].clone()
        model.add_patches(strong_lora(), 4.0)
    else:
        model = source.clone()
        model.add_patches(strong_lora(), 4.0)
        model = quantize(model, when, format)[0]
    return tiny.sample(model, "flux")


@pytest.mark.parametrize(
    ("format", "bound"),
    [("int8_convrot", 0.03), ("int8", 0.04), ("w4a8_convrot", 0.2), ("w4a4_convrot", 0.4)],
)
@pytest.mark.parametrize("when", ["bake", "keep", "after"])
def test_a_lora_has_its_full_effect(
    tiny: Any, quantize: Any, when: str, format: str, bound: float
) -> None:
    source = tiny.build("flux", torch.bfloat16)
    without = tiny.sample(source, "flux")
    patched = source.clone()
    patched.add_patches(strong_lora(), 4.0)
    expected = tiny.sample(patched, "flux")
    effect = relative(without, expected)
    result = run_with(tiny, quantize, when, format)
    assert effect > 0.2
    assert relative(result, expected) < bound


@pytest.mark.parametrize("group", ["16", "64", "256"])
def test_comfyuis_requantization_keeps_rotation_group_and_row_scales(
    tiny: Any, quantize: Any, group: str
) -> None:
    quantized = quantize(tiny.build("flux", torch.bfloat16), group_size=group)[0].clone()
    quantized.add_patches({PROJ: diff(256, 256)})
    expected = merged_dequantized(quantized, PROJ)
    tiny.sample(quantized, "flux")
    patched = stored(quantized, PROJ)
    assert patched._params.convrot
    assert patched._params.convrot_groupsize == int(group)
    assert patched._params.scale.shape == (256, 1)
    assert relative(patched.dequantize(), expected) < 0.02


def merged_dequantized(patcher: Any, key: str) -> torch.Tensor:
    import comfy.lora

    weight = stored(patcher, key).dequantize().float()
    return comfy.lora.calculate_weight(patcher.patches[key], weight, key)


def test_a_lora_on_the_source_after_the_quantized_model_ran_has_its_full_effect(
    tiny: Any, quantize: Any
) -> None:
    fresh = tiny.build("flux", torch.bfloat16).clone()
    fresh.add_patches(strong_lora(), 4.0)
    expected = tiny.sample(fresh, "flux")

    source = tiny.build("flux", torch.bfloat16)
    quantized, _ = quantize(source)
    tiny.sample(quantized, "flux")
    patched = source.clone()
    patched.add_patches(strong_lora(), 4.0)
    assert torch.equal(tiny.sample(patched, "flux"), expected)
    tiny.sample(quantized, "flux")
    assert torch.equal(tiny.sample(patched, "flux"), expected)


@pytest.mark.parametrize("format", ["int8_convrot", "int8", "w4a8_convrot", "w4a4_convrot"])
def test_without_its_lora_a_model_has_its_own_bits_again(
    tiny: Any, quantize: Any, format: str
) -> None:
    quantized, _ = quantize(tiny.build("flux", torch.bfloat16), format=format)
    before = {key: value.clone() for key, value in quantized.model.state_dict().items()}
    expected = tiny.sample(quantized, "flux")
    patched = quantized.clone()
    patched.add_patches(strong_lora(), 4.0)
    assert not torch.equal(tiny.sample(patched, "flux"), expected)
    assert torch.equal(tiny.sample(quantized, "flux"), expected)
    for key, value in quantized.model.state_dict().items():
        assert torch.equal(value.view(torch.uint8), before[key].view(torch.uint8)), key


def test_at_strength_zero_the_weights_are_the_same_but_for_comfyuis_rounding(
    tiny: Any, quantize: Any
) -> None:
    """ComfyUI requantizes with stochastic rounding even at strength 0.

    Dequantizing and rotating twice in float32 leaves a code within 1e-5 of a whole number, so the
    rounding moves about one code in 100,000 by one.
    """
    quantized, _ = quantize(tiny.build("flux", torch.bfloat16))
    before = {key: stored(quantized, key) for key in (PROJ, QKV)}
    patched = quantized.clone()
    patched.add_patches(patches_of(lora), 0.0)
    assert set(patched.patches) == {PROJ, QKV}
    for key, weight in before.items():
        again = patched.patch_weight_to_device(key, torch.device("cpu"), return_weight=True)
        moved = (again._qdata.int() - weight._qdata.int()).abs()
        assert moved.max() <= 1
        assert moved.sum() <= 1e-4 * moved.numel()
        assert torch.allclose(again._params.scale, weight._params.scale, rtol=1e-6, atol=0)


def test_comfyuis_lora_node_at_strength_zero_changes_nothing(
    tiny: Any, quantize: Any, comfyui: Any
) -> None:
    import nodes

    quantized, _ = quantize(tiny.build("flux", torch.bfloat16))
    assert nodes.LoraLoader().load_lora(quantized, None, "any", 0, 0)[0] is quantized


def test_a_lora_that_changes_a_weights_shape_keeps_the_layer(tiny: Any, quantize: Any) -> None:
    source = tiny.build("flux", torch.bfloat16).clone()
    wider = ("diff", (torch.zeros(256, 320), {"pad_weight": True}))
    source.add_patches({PROJ: wider})
    _, report = quantize(source)
    layer = next(layer for layer in report.layers if layer["name"] in PROJ)
    assert layer["format"] is None
    assert layer["reason"] == "a LoRA on it changes its shape"


def test_two_loras_are_baked_in_order(tiny: Any, quantize: Any) -> None:
    source = tiny.build("flux", torch.bfloat16).clone()
    source.add_patches({PROJ: overwrite(256, 256)}, 1.0)
    source.add_patches({PROJ: lora(256, 256)}, 0.5, strength_model=0.25)
    quantized, _ = quantize(source)
    assert relative(stored(quantized, PROJ).dequantize(), merged(source, PROJ)) < 0.012
