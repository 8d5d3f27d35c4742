"""Finding the repeated blocks from layer names."""

from __future__ import annotations

import pytest
from leandit.quant.towers import locate, why_keep


def test_blocks_of_one_tower_need_not_have_the_same_layers() -> None:
    found = locate(["vace_blocks.0.before_proj", "vace_blocks.0.q", "vace_blocks.1.q"])
    assert found["vace_blocks.0.before_proj"].tower == "vace_blocks"
    assert found["vace_blocks.1.q"].blocks == 2
    assert found["vace_blocks.1.q"].inner == "q"


def test_a_sequence_of_layers_is_no_tower() -> None:
    found = locate(["time_embedding.0", "time_embedding.2", "img_emb.proj.1", "img_emb.proj.3"])
    assert {position.tower for position in found.values()} == {None}


def test_the_outer_number_makes_the_tower() -> None:
    found = locate([f"transformer_blocks.{i}.ff.net.{j}.proj" for i in (0, 1) for j in (0, 2)])
    assert {position.tower for position in found.values()} == {"transformer_blocks"}


def test_a_unet_has_towers_although_its_blocks_differ() -> None:
    names = [f"input_blocks.{i}.1.transformer_blocks.0.attn1.to_q" for i in (1, 2, 4)]
    names += ["input_blocks.1.0.emb_layers.1", "input_blocks.2.0.emb_layers.1", "time_embed.0"]
    found = locate(names)
    assert why_keep(found[names[0]]) is None
    assert "emb_layers" in (why_keep(found["input_blocks.1.0.emb_layers.1"]) or "")
    assert "outside" in (why_keep(found["time_embed.0"]) or "")


TEXT_ENCODERS = {
    "T5": "encoder.block.#.layer.0.SelfAttention.q",
    "CLIP": "text_model.encoder.layers.#.self_attn.q_proj",
    "Qwen, Llama and Gemma": "layers.#.mlp.gate_proj",
}


@pytest.mark.parametrize("name", TEXT_ENCODERS.values(), ids=TEXT_ENCODERS)
def test_the_blocks_of_a_text_encoder_are_the_main_tower(name: str) -> None:
    names = [name.replace("#", str(index)) for index in range(2)]
    assert why_keep(locate(names)[names[0]]) is None


def test_beside_another_tower_an_encoder_is_a_helper() -> None:
    names = [f"{tower}.{index}.q" for tower in ("encoder.block", "blocks") for index in range(2)]
    names += [f"visual.blocks.{index}.attn.qkv" for index in range(2)]
    found = locate(names)
    assert found["blocks.0.q"].helper is None
    assert "helper network 'encoder'" in (why_keep(found["encoder.block.0.q"]) or "")
    assert "helper network 'visual'" in (why_keep(found["visual.blocks.1.attn.qkv"]) or "")


@pytest.mark.parametrize(
    "name",
    [
        "blocks.#.attn.gate",
        "blocks.#.mlp.gate",
        "transformer_blocks.#.attn.add_q_proj",
        "single_blocks.#.linear1",
        "layers.#.feed_forward.w1",
        "joint_blocks.#.x_block.attn.qkv",
        "diffusion_transformer.layers.#.attn.to_q",
    ],
)
def test_attention_and_mlp_layers_are_taken(name: str) -> None:
    names = [name.replace("#", str(index)) for index in range(2)]
    assert why_keep(locate(names)[names[0]]) is None


@pytest.mark.parametrize(
    "name",
    [
        "double_blocks.#.img_mod.lin",
        "single_blocks.#.modulation.lin",
        "layers.#.adaLN_modulation.0",
        "blocks.#.adaln_proj.linear",
        "transformer_blocks.#.norm1.linear",
        "double_layers.#.modX.1",
        "double_layers.#.modC.1",
        "single_layers.#.modCX.1",
        "txt_in.individual_token_refiner.blocks.#.mlp.0",
        "noise_refiner.#.attention.qkv",
        "audio_embeddings_connector.transformer_1d_blocks.#.attn1.to_q",
        "txtfusion.layerwise_blocks.#.attn.wq",
        "distilled_guidance_layer.layers.#.in_layer",
    ],
)
def test_modulation_and_helper_networks_are_kept(name: str) -> None:
    names = [name.replace("#", str(index)) for index in range(2)]
    names += ["main.0.q", "main.1.q"]
    assert why_keep(locate(names)[names[0]]) is not None
