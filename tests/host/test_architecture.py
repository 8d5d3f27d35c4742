"""File names of tensors lead to the architecture ComfyUI builds."""

from __future__ import annotations

from typing import Any

import pytest
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


@pytest.mark.parametrize("family", FAMILIES)
def test_the_names_of_a_real_models_tensors_tell_its_architecture(tiny: Any, family: str) -> None:
    names = tiny.build(family).model.diffusion_model.state_dict().keys()
    assert image_model_of(names) == tiny.CONFIGS[family][1]["image_model"]
