"""Text encoders quantized by the command run in ComfyUI's own classes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from leandit.loaders.contents import contents, to_float
from leandit.loaders.convert import quantize_file
from leandit.loaders.reader import open_checkpoint
from leandit.loaders.survey import survey
from leandit.quant.settings import settings_from
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.usefixtures("inference")

T5 = {
    "num_layers": 2,
    "d_model": 256,
    "d_kv": 64,
    "num_heads": 4,
    "d_ff": 512,
    "dense_act_fn": "gelu_pytorch_tanh",
    "is_gated_act": True,
    "model_type": "t5",
    "vocab_size": 100,
}
LLAMA = {
    "vocab_size": 100,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
ENCODERS = ["T5", "Qwen 2.5", "Qwen 3", "Gemma 3", "Llama"]


def architecture(name: str) -> tuple[Any, dict[str, Any]]:
    """ComfyUI's class, and a tiny configuration for it."""
    from comfy.text_encoders import llama, t5

    if name == "T5":
        return t5.T5, T5
    kind, config = {
        "Qwen 2.5": (llama.Qwen25_3B, llama.Qwen25_3BConfig),
        "Qwen 3": (llama.Qwen3_4B, llama.Qwen3_4BConfig),
        "Gemma 3": (llama.Gemma3_4B, llama.Gemma3_4B_Config),
        "Llama": (llama.Llama2, llama.Llama2Config),
    }[name]
    known = {field.name for field in dataclasses.fields(config)}
    return kind, {key: value for key, value in LLAMA.items() if key in known}


def encoder(name: str, tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """ComfyUI's text encoder as its CLIP loader builds it for these tensors."""
    import comfy.sd1_clip
    import comfy.utils

    kind, config = architecture(name)
    quantized = None if tensors is None else comfy.utils.detect_layer_quantization(tensors, "")
    options = {} if quantized is None else {"quantization_metadata": quantized}
    built = comfy.sd1_clip.SDClipModel(
        textmodel_json_config=dict(config),
        model_class=kind,
        dtype=torch.float32,
        special_tokens={"start": 1, "end": 2, "pad": 0},
        model_options=options,
    ).transformer
    if tensors is not None:
        missing, unexpected = built.load_state_dict(tensors, strict=False)
        assert (missing, unexpected) == ([], [])
    return built


def filled(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        key: torch.ones_like(value)
        if value.ndim == 1 and key.endswith("weight")
        else torch.randn(value.shape, generator=generator) * value.shape[-1] ** -0.5
        for key, value in encoder(name).state_dict().items()
    }


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("format", ["int8_convrot", "w4a8_convrot"])
def test_a_quantized_text_encoder_runs_as_the_weights_it_stands_for(
    name: str, format: str, tmp_path: Path
) -> None:
    tensors = filled(name)
    save_file(tensors, tmp_path / "in.safetensors")
    out = tmp_path / "out.safetensors"
    done = quantize_file(tmp_path / "in.safetensors", out, settings_from(format))
    matrices = {k.removesuffix(".weight") for k, v in tensors.items() if v.ndim == 2}
    kept = {d.layer.name for d in done.plan.kept}
    assert all("embed" in k or "shared" in k or "relative" in k or "lm_head" in k for k in kept)
    assert len(done.plan.selected) == len(matrices) - len(kept) == 14
    read = survey(open_checkpoint(out))
    decoded = {
        f"{read.prefix}{item.name}.weight": to_float(item.load(read.checkpoint))
        for item in contents(read).layers
    }
    tokens, mask = torch.arange(12)[None], torch.ones(1, 12)
    plain = encoder(name, tensors)(tokens, attention_mask=mask)[0]
    expected = encoder(name, {**tensors, **decoded})(tokens, attention_mask=mask)[0]
    found = encoder(name, load_file(out))(tokens, attention_mask=mask)[0]
    # Between them stand activations in 8 bits, which the sharp attention of random weights enlarges.
    assert (found - expected).norm() < 0.08 * expected.norm()
    lost = (found - plain).norm() / plain.norm()
    assert 0.001 < lost < (0.1 if format == "int8_convrot" else 0.8)
