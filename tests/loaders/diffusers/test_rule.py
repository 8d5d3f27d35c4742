"""Names of diffusers' files in ComfyUI's names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from format_builders import bnb, int8
from leandit.loaders.contents import contents, to_float
from leandit.loaders.diffusers.families import FAMILIES, diffusers_family
from leandit.loaders.diffusers.rule import Place, Renamer
from leandit.loaders.errors import CheckpointError
from leandit.loaders.reader import open_checkpoint
from leandit.loaders.survey import survey
from safetensors.torch import save_file

PLACES = {
    "flux": {
        "transformer_blocks.7.attn.to_k": Place("double_blocks.7.img_attn.qkv", 1, 3, ""),
        "single_transformer_blocks.3.proj_mlp": Place("single_blocks.3.linear1", 3, 4, ""),
        "norm_out.linear": Place("final_layer.adaLN_modulation.1", 0, 1, "swap"),
        "time_text_embed.guidance_embedder.linear_2": Place("guidance_in.out_layer", 0, 1, ""),
    },
    "flux2": {
        "single_transformer_blocks.0.attn.to_out": Place("single_blocks.0.linear2", 0, 1, "")
    },
    "wan": {
        "blocks.11.norm2": Place("blocks.11.norm3", 0, 1, ""),
        "blocks.11.attn2.add_k_proj": Place("blocks.11.cross_attn.k_img", 0, 1, ""),
        "scale_shift_table!": Place("head.modulation", 0, 1, ""),
    },
    "z_image": {
        "context_refiner.1.attention.to_v": Place("context_refiner.1.attention.qkv", 2, 3, "")
    },
    "krea2": {
        "transformer_blocks.2.scale_shift_table!": Place("blocks.2.mod.lin", 0, 1, "flatten")
    },
    "ltxv": {
        "transformer_blocks.2.attn1.norm_q": Place("transformer_blocks.2.attn1.q_norm", 0, 1, "")
    },
    "hunyuan_video": {
        "context_embedder.token_refiner.refiner_blocks.1.attn.to_q": Place(
            "txt_in.individual_token_refiner.blocks.1.self_attn.qkv", 0, 3, ""
        )
    },
    "chroma": {
        "distilled_guidance_layer.layers.4.linear_1": Place(
            "distilled_guidance_layer.layers.4.in_layer", 0, 1, ""
        )
    },
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_name_goes_to_its_place(family) -> None:
    renamer = Renamer(family)
    for name, place in PLACES[family.name].items():
        assert renamer.place(name) == place
    assert renamer.place("something.else") is None
    assert diffusers_family(family.signs) is family


FLUX = {
    "x_embedder.weight": torch.ones(64, 4),
    "time_text_embed.text_embedder.linear_1.weight": torch.ones(64, 4),
    "norm_out.linear.weight": torch.arange(8.0).reshape(4, 2),
    **{
        f"transformer_blocks.0.attn.to_{part}.bias": torch.full((64,), float(i))
        for i, part in enumerate("qkv")
    },
}
PARTS = {
    f"transformer_blocks.0.attn.to_{part}": torch.randn(64, 256).double() / 16 for part in "qkv"
}


@pytest.mark.parametrize(
    "build",
    [
        int8(config={"format": "int8_tensorwise"}),
        int8("[]", config={"format": "int8_tensorwise"}),
        bnb("nf4", False),
        bnb("nf4", True),
    ],
    ids=["int8 rows", "int8 with one scale", "nf4", "nf4, double-quantized"],
)
def test_a_fused_attention_is_stacked_in_its_order_without_changing_a_code(
    build, tmp_path: Path
) -> None:
    tensors, references = dict(FLUX), []
    for layer, weight in PARTS.items():
        parts, reference = build(weight)
        tensors |= {f"{layer}.{part}": value.clone() for part, value in parts.items()}
        references.append(reference)
    save_file(tensors, tmp_path / "flux.safetensors")
    items = contents(survey(open_checkpoint(tmp_path / "flux.safetensors")))
    source = open_checkpoint(tmp_path / "flux.safetensors")
    assert items.family == "flux"
    (layer,) = items.layers
    assert (layer.name, layer.shape) == ("double_blocks.0.img_attn.qkv", (192, 256))
    weight = layer.load(source)
    assert not isinstance(weight, torch.Tensor)
    expected = torch.cat(references)
    assert (to_float(weight).double() - expected).abs().max() <= 1e-6 * expected.abs().max()
    plain = {item.name: item.load(source) for item in items.plain}
    assert plain["double_blocks.0.img_attn.qkv.bias"].tolist() == [0] * 64 + [1] * 64 + [2] * 64
    swapped = plain["final_layer.adaLN_modulation.1.weight"]
    assert swapped.tolist() == [[4, 5], [6, 7], [0, 1], [2, 3]]


def test_a_missing_part_is_refused(tmp_path: Path) -> None:
    tensors = dict(FLUX)
    del tensors["transformer_blocks.0.attn.to_k.bias"]
    save_file(tensors, tmp_path / "flux.safetensors")
    with pytest.raises(CheckpointError, match="has 2 of the 3 parts"):
        contents(survey(open_checkpoint(tmp_path / "flux.safetensors")))


def test_parts_of_different_schemes_are_held_in_16_bit(tmp_path: Path) -> None:
    tensors = dict(FLUX)
    for index, (layer, weight) in enumerate(PARTS.items()):
        build = bnb("nf4", False) if index else int8(config={"format": "int8_tensorwise"})
        parts, _ = build(weight)
        tensors |= {f"{layer}.{part}": value.clone() for part, value in parts.items()}
    save_file(tensors, tmp_path / "flux.safetensors")
    source = open_checkpoint(tmp_path / "flux.safetensors")
    (layer,) = contents(survey(source)).layers
    weight = layer.load(source)
    assert isinstance(weight, torch.Tensor) and weight.dtype == torch.bfloat16
