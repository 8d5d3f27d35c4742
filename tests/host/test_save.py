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


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("family", ["flux", "wan"])
def test_core_saves_and_loads_it(
    tiny: Any, comfyui: Any, tmp_path: Path, family: str, format: str
) -> None:
    import comfy.sd
    from leandit.host.quantize import quantize_model
    from leandit.quant.settings import settings_from

    quantized, _ = quantize_model(tiny.build(family, torch.bfloat16), settings_from(format))
    expected = tiny.sample(quantized, family)
    path = tmp_path / "saved.safetensors"
    comfy.sd.save_checkpoint(str(path), quantized, metadata={"format": "pt"})

    layer = {"flux": "double_blocks.1.img_attn.qkv", "wan": "blocks.1.ffn.0"}[family]
    with safe_open(path, "pt") as file:
        stored_keys = file.keys()
        keys = [key for key in stored_keys if key.endswith(f"{layer}.comfy_quant")]
        assert len(keys) == 1
        stored = json.loads(file.get_tensor(keys[0]).numpy().tobytes())
        payload = file.get_tensor(keys[0].replace("comfy_quant", "weight"))
    assert stored == FORMATS[format]
    ours = quantized.model.diffusion_model.get_submodule(layer).weight._qdata
    assert torch.equal(payload, ours)

    loaded = comfy.sd.load_diffusion_model(str(path))
    assert torch.equal(loaded.model.diffusion_model.get_submodule(layer).weight._qdata, ours)
    assert torch.equal(tiny.sample(loaded, family), expected)
