"""File names of tensors lead to the architecture ComfyUI builds."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from leandit.loaders.architecture import image_model_of

FAMILIES = [
    "flux",
    "flux2",
    "wan",
    "qwen_image",
    "z_image",
    "hunyuan_video",
    "krea2",
    "minimax_h3",
    "ltxv",
    "chroma",
]


MODULATION_TAKEN = {
    "qwen_image": {"transformer_blocks.1.img_mod.1", "transformer_blocks.1.txt_mod.1"},
    "minimax_h3": {"blocks.0.adaln_proj.linear", "blocks.1.adaln_proj.linear"},
}
"""Families whose modulation is too large to keep; see the reasons in quant/families.py."""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_names_of_a_real_models_tensors_tell_its_architecture(tiny: Any, family: str) -> None:
    names = tiny.build(family).model.diffusion_model.state_dict().keys()
    assert image_model_of(names) == tiny.CONFIGS[family][1]["image_model"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_family_is_recognised_from_the_model_comfyui_built(tiny: Any, family: str) -> None:
    """And what it selects: the blocks' attention and MLP, nothing that makes modulation but ours."""
    from leandit.host.quantize import quantize_model
    from leandit.quant.settings import settings_from

    with torch.inference_mode():
        _, report = quantize_model(tiny.build(family, torch.bfloat16), settings_from())
    assert report.summary["family"] == family
    taken = {layer["name"] for layer in report.layers if layer["format"]}
    modulation = {name for name in taken if re.search(r"mod|adaln|norm", name, re.I)}
    assert modulation == MODULATION_TAKEN.get(family, set())
    assert len(taken) >= 10
