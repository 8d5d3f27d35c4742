"""LoRAs on models that stream: neither lost nor applied twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from leandit.kernels.dispatch import LinearSettings
from leandit.kernels.row_split import RowSplit
from leandit.quant.linear_plan import filters_from
from leandit.quant.settings import settings_from
from offload_cases import (
    PROJECTIONS,
    error,
    flux,
    last_summary,
    longer,
    patched_twice,
    with_lora,
)

pytestmark = pytest.mark.usefixtures("inference")


STREAMED_KEY = "diffusion_model.double_blocks.1.img_attn.proj.weight"

OUTSIDE = "diffusion_model.guidance_in.in_layer.weight"


@pytest.mark.parametrize("kind", ["float", "int8"])
@pytest.mark.parametrize("order", ["before the node", "after the node"])
def test_loras_act_on_streamed_weights(
    tiny: Any, offload: Any, held: Any, order: str, kind: str
) -> None:
    model = longer(tiny, "flux")
    if kind == "int8":
        from leandit.host.quantize import quantize_model

        model = quantize_model(model, settings_from())[0]
    without = tiny.sample(model, "flux")
    results = {}
    for node in (offload, held):
        if order == "before the node":
            patched = with_lora(model, STREAMED_KEY)
            changed = node(patched)
        else:
            changed = with_lora(node(model), STREAMED_KEY)
        results[node] = tiny.sample(changed, "flux")
        # Another LoRA in the next run, and none in the one after.
        other = with_lora(node(model), STREAMED_KEY, seed=1)
        results[node, "changed"] = tiny.sample(other, "flux")
        results[node, "none"] = tiny.sample(node(model), "flux")
    assert torch.equal(results[offload], results[held])
    assert torch.equal(results[offload, "changed"], results[held, "changed"])
    assert torch.equal(results[offload, "none"], without)
    assert not torch.equal(results[offload], without)
    assert not torch.equal(results[offload], results[offload, "changed"])


@pytest.mark.parametrize("kind", ["float", "int8", "int8 row split"])
def test_baked_loras_are_in_the_weights_once(tiny: Any, offload: Any, kind: str) -> None:
    from leandit.host.quantize import quantize_model
    from leandit.host.row_split import row_split_linear

    model = longer(tiny, "flux", torch.bfloat16 if kind != "float" else torch.float32)
    if kind != "float":
        model = quantize_model(model, settings_from())[0]
    if kind == "int8 row split":
        routing = LinearSettings(RowSplit("fixed", 7, 1))
        model = row_split_linear(model, routing, filters_from())[0]
    without = tiny.sample(model, "flux")
    patched = with_lora(model, STREAMED_KEY)
    expected = tiny.sample(patched, "flux")
    baked = offload(patched, lora="bake")
    assert STREAMED_KEY in patched.patches
    assert STREAMED_KEY not in baked.patches
    result = tiny.sample(baked, "flux")
    assert (result - expected).norm() < (1e-5 if kind == "float" else 0.02) * expected.norm()
    assert (result - without).norm() > 0.02 * expected.norm()
    weights = [
        m.model.diffusion_model.double_blocks[1].img_attn.proj.weight for m in (model, baked)
    ]
    assert type(weights[0]) is type(weights[1])
    if kind != "float":
        assert weights[0]._layout_cls == weights[1]._layout_cls
    assert torch.equal(tiny.sample(model, "flux"), without)


def test_a_lora_is_neither_lost_nor_doubled_whatever_follows(
    tiny: Any, offload: Any, budget: Any
) -> None:
    model, size = flux(tiny)
    patched = with_lora(model, *PROJECTIONS)
    plain, reference = tiny.sample(model, "flux"), tiny.sample(patched, "flux")
    budget(0.6 * size)
    runs = [
        (patched, reference),
        (offload(patched, resident="3"), reference),
        (patched, reference),
        (offload(patched, resident="1"), reference),
        (offload(patched, resident="auto"), reference),
        (model, plain),
        (offload(model, resident="4"), plain),
        (patched, reference),
    ]
    for patcher, expected in runs:
        assert error(tiny.sample(patcher, "flux"), expected) < 1e-6
        assert patched_twice(patcher) == []


def test_a_lora_outside_of_the_blocks_leaves_with_its_model(
    tiny: Any, offload: Any, budget: Any
) -> None:
    model, size = flux(tiny)
    plain = tiny.sample(model, "flux")
    patched = with_lora(model, OUTSIDE)
    reference = tiny.sample(patched, "flux")
    budget(0.5 * size)
    assert error(tiny.sample(offload(patched, resident="99"), "flux"), reference) < 1e-6
    assert error(tiny.sample(model, "flux"), plain) < 1e-6
    assert not model.model.diffusion_model.guidance_in.in_layer.weight_function


def sample_with_hook(tiny: Any, model: Any, hooked: bool) -> torch.Tensor:
    """Three steps with a LoRA that conditioning switches on, as ComfyUI's Create Hook LoRA does."""
    import comfy.hooks
    import comfy.sample

    given = tiny.inputs("flux")
    positive = [[c, {**options}] for c, options in given.positive]
    if hooked:
        hook = comfy.hooks.WeightHook(strength_model=1.0)
        generator = torch.Generator().manual_seed(0)
        hook.weights = {
            key: ("diff", (torch.randn(256, 256, generator=generator) * 0.05,))
            for key in PROJECTIONS
        }
        hook.need_weight_init = False
        group = comfy.hooks.HookGroup()
        group.add(hook)
        positive = comfy.hooks.set_hooks_for_conditioning(positive, group)
    return comfy.sample.sample(
        *(model, given.noise, 3, 2.0, "euler", "simple", positive, given.positive),
        given.noise * 0,
        disable_pbar=True,
        seed=1,
    )


def test_weights_that_hooks_change_in_a_run_are_not_streamed(
    tiny: Any, offload: Any, budget: Any
) -> None:
    model, size = flux(tiny)
    budget(0.6 * size)
    plain, expected = (sample_with_hook(tiny, model, hooked) for hooked in (False, True))
    assert error(expected, plain) > 0.05
    streamed = offload(model, resident="1")
    assert error(sample_with_hook(tiny, streamed, True), expected) < 1e-6
    assert "LoRA hooks are on the model" in last_summary(streamed)["why_not"]
    assert error(sample_with_hook(tiny, streamed, False), plain) < 1e-6
    assert last_summary(streamed)["why_not"] is None
