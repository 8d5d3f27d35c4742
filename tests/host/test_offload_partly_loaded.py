"""Layerwise offload where ComfyUI has loaded a part of the model, as on a card that is too small.

ComfyUI's own `load` divides the model: it is given a budget for weights, as it computes one from the
memory of a card. "The card" are the modules that it has marked as loaded.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from late_device import LateDevice
from offload_cases import (
    PROJECTIONS,
    error,
    flux,
    last_summary,
    longer,
    on_card,
    with_lora,
    wrapper_of,
)

pytestmark = pytest.mark.usefixtures("inference")


@pytest.mark.parametrize("resident", ["auto", "0", "2", "99"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_what_comfyui_left_in_main_memory_streams(
    tiny: Any, offload: Any, budget: Any, share: float, resident: str
) -> None:
    model, size = flux(tiny)
    model = with_lora(model, *PROJECTIONS)
    budget(share * size)
    expected = tiny.sample(model, "flux")
    streamed = offload(model, resident=resident)
    assert error(tiny.sample(streamed, "flux"), expected) < 1e-6
    summary = last_summary(streamed)
    if resident != "99":
        assert summary["streaming"] is True
        assert summary["streamed_bytes_per_step"] > 0
        assert any(device.copies for device in LateDevice.made)


@pytest.mark.parametrize("keys", [(), PROJECTIONS], ids=["no LoRA", "a LoRA"])
@pytest.mark.usefixtures("nearly_full")
def test_runs_in_a_row_never_hold_more_than_the_budget(
    tiny: Any, offload: Any, budget: Any, keys: tuple[str, ...]
) -> None:
    from comfy.patcher_extension import WrappersMP

    model, size = flux(tiny)
    model = with_lora(model, *keys)
    limit = 0.6 * size
    budget(limit)
    streamed = offload(model, resident="3")
    seen = []

    def look(executor: Any, *args: Any, **kwargs: Any) -> Any:
        base = executor.class_obj
        seen.append((on_card(streamed), base.model_loaded_weight_memory))
        # What ComfyUI has set aside to cast weights of the rest is still set aside.
        assert base.model_offload_buffer_memory > 0
        return executor(*args, **kwargs)

    streamed.add_wrapper(WrappersMP.APPLY_MODEL, look)
    for _ in range(3):
        tiny.sample(streamed, "flux")
        assert on_card(streamed) <= limit
    assert len(seen) == 6
    for held, said in seen:
        assert held <= limit
        assert said == pytest.approx(held, rel=0.02)


@pytest.mark.usefixtures("nearly_full")
def test_a_number_that_does_not_fit_is_lowered_and_said(tiny: Any, offload: Any) -> None:
    model = longer(tiny, "wan")
    expected = tiny.sample(model, "wan")
    # Two blocks have to go for two buffers.
    streamed = offload(model, resident="4")
    assert torch.equal(tiny.sample(streamed, "wan"), expected)
    report = wrapper_of(streamed).last_report
    assert report.summary["streamed_blocks"] == 2
    assert "4 blocks were to stay on the card, 3 fit" in report.text


@pytest.mark.usefixtures("nearly_full")
def test_memory_kept_free_is_taken_off_the_model(tiny: Any, offload: Any) -> None:
    model = longer(tiny, "wan")
    expected = tiny.sample(model, "wan")
    assert torch.equal(tiny.sample(offload(model, resident="auto"), "wan"), expected)
    streamed = offload(model, resident="auto", keep_free_gb=0.002)
    assert torch.equal(tiny.sample(streamed, "wan"), expected)
    summary = wrapper_of(streamed).last_report.summary
    assert summary["streaming"] is True
    wanted = 0.002 * 2**30 + summary["ring_bytes"]
    taken = summary["model_bytes"] - model.model.model_loaded_weight_memory
    # ComfyUI frees somewhat more, for buffers of its own.
    assert 0.95 * wanted <= taken <= 1.6 * wanted


def test_the_books_of_comfyui_stay_right(tiny: Any, offload: Any) -> None:
    from comfy.patcher_extension import WrappersMP

    model = longer(tiny, "wan")
    streamed = offload(model, resident="2")
    books = []

    def look(executor: Any, *args: Any, **kwargs: Any) -> Any:
        base = executor.class_obj
        loaded = sum(
            p.numel() * p.element_size()
            for module in base.modules()
            if getattr(module, "comfy_patched_weights", False)
            for p in module._parameters.values()
            if p is not None
        )
        books.append((base.model_loaded_weight_memory, loaded, base.model_lowvram))
        return executor(*args, **kwargs)

    streamed.add_wrapper(WrappersMP.APPLY_MODEL, look)
    tiny.sample(streamed, "wan")
    said, loaded, partly = books[0]
    assert said == pytest.approx(loaded, rel=0.01)
    assert partly is True


def test_memory_for_one_step_counts_what_conditioning_needs(tiny: Any, comfyui: Any) -> None:
    import comfy.sampler_helpers
    from leandit.host.residency import bytes_for_one_step

    model, _ = flux(tiny)
    shape = [1, 16, 512, 512]
    references = [torch.zeros(1, 16, 512, 512)] * 3
    conds = {"positive": [{"cross_attn": torch.zeros(1, 6, 64), "reference_latents": references}]}
    with_references = bytes_for_one_step(model, shape, conds)
    core = comfy.sampler_helpers.estimate_memory(model, shape, conds)[1]
    assert with_references == int(core + comfy.model_management.extra_reserved_memory())
    assert with_references > 2 * bytes_for_one_step(model, shape, None)


def test_half_a_module_is_never_bound(tiny: Any, offload: Any, budget: Any) -> None:
    """A bias that cannot be copied in one go keeps its whole module out of the stream."""
    model, size = flux(tiny)
    expected = tiny.sample(model, "flux")
    layer = model.model.diffusion_model.double_blocks[1].img_mlp[0]
    strided = torch.zeros(2 * layer.bias.numel())[::2]
    strided.copy_(layer.bias)
    layer.bias = torch.nn.Parameter(strided, requires_grad=False)
    budget(0.1 * size)
    streamed = offload(model, resident="0")
    assert error(tiny.sample(streamed, "flux"), expected) < 1e-6
    bytes_of_others = last_summary(streamed)["streamed_bytes_per_step"]
    assert bytes_of_others < last_summary(streamed)["block_bytes"] - layer.weight.nbytes + 10_000
