"""ComfyUI's own ModelSave writes a file that ComfyUI alone loads and samples identically."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

pytestmark = pytest.mark.usefixtures("inference")

FORMATS = {
    "int8_convrot": {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256},
    "int8": {"format": "int8_tensorwise"},
    "w4a8_convrot": {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 256},
    "w4a4_convrot": {"format": "convrot_w4a4", "convrot_groupsize": 256},
}


LAYERS = {
    "flux": "double_blocks.1.img_attn.qkv",
    "wan": "blocks.1.ffn.0",
    "minimax_h3": "blocks.1.attn.qkv_proj",
}


def realign(model: torch.nn.Module) -> None:
    """Copy plain weights out of the mapped file.

    There they start at odd multiples of 8 bytes, and a BLAS library rounds float products on such
    weights differently by 1e-7, which now and then moves an activation to the next integer.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if type(parameter) is torch.nn.Parameter:
                copied = torch.nn.Parameter(parameter.detach().clone(), requires_grad=False)
                module.register_parameter(name, copied)


@pytest.mark.parametrize("preset", ["auto", "none"])
@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("family", list(LAYERS))
def test_core_saves_and_loads_it(
    tiny: Any, comfyui: Any, tmp_path: Path, family: str, format: str, preset: str
) -> None:
    import comfy.sd
    from leandit.host.quantize import quantize_model
    from leandit.quant.settings import settings_from

    quantized, _ = quantize_model(
        tiny.build(family, torch.bfloat16), settings_from(format, preset=preset)
    )
    expected = tiny.sample(quantized, family)
    path = tmp_path / "saved.safetensors"
    comfy.sd.save_checkpoint(str(path), quantized, metadata={"format": "pt"})

    layer = LAYERS[family]
    with safe_open(path, "pt") as file:
        name = f"model.diffusion_model.{layer}"
        stored = json.loads(file.get_tensor(f"{name}.comfy_quant").numpy().tobytes())
        payload = file.get_tensor(f"{name}.weight")
    assert stored == FORMATS[format]
    ours = quantized.model.diffusion_model.get_submodule(layer).weight._qdata
    assert torch.equal(payload, ours)

    loaded = comfy.sd.load_diffusion_model(str(path))
    assert torch.equal(loaded.model.diffusion_model.get_submodule(layer).weight._qdata, ours)
    realign(loaded.model.diffusion_model)
    assert torch.equal(tiny.sample(loaded, family), expected)
