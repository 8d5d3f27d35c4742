"""A file made without ComfyUI is what the node makes, and plain ComfyUI loads and samples it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from leandit.demo import run as demo
from leandit.demo.digits import from_host, label_context, label_vector, to_image
from leandit.demo.flux import load_flux
from leandit.loaders.writer import write_native
from leandit.quant.error import psnr_db
from leandit.quant.module import quantize_module
from leandit.quant.settings import settings_from
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("inference")

PSNR_DB = {"int8_convrot": 40, "int8": 40, "w4a8_convrot": 28, "w4a4_convrot": 22}


def draw(patcher: Any) -> torch.Tensor:
    """Ten digits through ComfyUI's sampler."""
    import comfy.sample

    labels = torch.arange(10)
    noise = torch.randn(10, 16, 8, 8, generator=torch.Generator().manual_seed(3))
    given = [[label_context(labels), {"pooled_output": label_vector(labels)}]]
    latent = comfy.sample.sample(
        patcher, noise, 8, 1.0, "euler", "simple", given, given, noise * 0, disable_pbar=True
    )
    return to_image(from_host(latent)).clamp(0, 1)


@pytest.mark.parametrize("format", list(PSNR_DB))
def test_a_file_made_without_comfyui(comfyui: Path, tmp_path: Path, format: str) -> None:
    import comfy.sd
    from leandit.host.quantize import quantize_model

    settings = settings_from(format)
    _, weights, _ = quantize_module(load_flux(demo.MODEL_FILE, torch.bfloat16), settings, "flux")
    plain = load_file(demo.MODEL_FILE)
    for layer in weights:
        plain.pop(f"{layer}.weight")
    path = tmp_path / "digits.safetensors"
    write_native(path, plain, weights, {})

    source = comfy.sd.load_diffusion_model(str(demo.MODEL_FILE))
    by_node = quantize_model(source, settings)[0].model.state_dict()
    loaded = comfy.sd.load_diffusion_model(str(path))
    by_file = loaded.model.state_dict()
    assert set(by_file) == set(by_node)
    for key, value in by_file.items():
        if value.dtype in (torch.int8, torch.uint8) or "weight_s" in key:
            assert torch.equal(value.view(torch.uint8), by_node[key].view(torch.uint8)), key
    assert psnr_db(draw(loaded), draw(source)) > PSNR_DB[format]
