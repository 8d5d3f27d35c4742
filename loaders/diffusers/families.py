"""The families whose diffusers names differ from ComfyUI's. Qwen-Image's do not.

Source: diffusers 0.42's transformer classes and conversion scripts beside ComfyUI's models.
"""

from __future__ import annotations

from collections.abc import Iterable

from .flux import CHROMA, FLUX, FLUX2, HUNYUAN_VIDEO
from .rule import Family, rules

WAN = Family(
    name="wan",
    signs=("condition_embedder.time_proj.weight", "blocks.0.attn2.to_out.0.weight"),
    rules=rules("""
        patch_embedding -> patch_embedding
        condition_embedder.text_embedder.linear_{1,2} -> text_embedding.{0,2}
        condition_embedder.time_embedder.linear_{1,2} -> time_embedding.{0,2}
        condition_embedder.time_proj -> time_projection.1
        blocks.*.scale_shift_table! -> blocks.*.modulation!
        blocks.*.attn1.to_{q,k,v} -> blocks.*.self_attn.{q,k,v}
        blocks.*.attn1.to_out.0 -> blocks.*.self_attn.o
        blocks.*.attn1.norm_{q,k} -> blocks.*.self_attn.norm_{q,k}
        blocks.*.attn2.to_{q,k,v} -> blocks.*.cross_attn.{q,k,v}
        blocks.*.attn2.to_out.0 -> blocks.*.cross_attn.o
        blocks.*.attn2.norm_{q,k} -> blocks.*.cross_attn.norm_{q,k}
        blocks.*.attn2.add_{k,v}_proj -> blocks.*.cross_attn.{k,v}_img
        blocks.*.attn2.norm_added_k -> blocks.*.cross_attn.norm_k_img
        blocks.*.norm2 -> blocks.*.norm3
        blocks.*.ffn.net.0.proj -> blocks.*.ffn.0
        blocks.*.ffn.net.2 -> blocks.*.ffn.2
        condition_embedder.image_embedder.norm1 -> img_emb.proj.0
        condition_embedder.image_embedder.ff.net.0.proj -> img_emb.proj.1
        condition_embedder.image_embedder.ff.net.2 -> img_emb.proj.3
        condition_embedder.image_embedder.norm2 -> img_emb.proj.4
        condition_embedder.image_embedder.pos_embed! -> img_emb.emb_pos!
        scale_shift_table! -> head.modulation!
        proj_out -> head.head
    """),
    without=("vace_patch_embedding.weight", "face_adapter.k_proj.weight"),
)

Z_IMAGE = Family(
    name="z_image",
    signs=("all_x_embedder.2-1.weight", "noise_refiner.0.attention.norm_k.weight"),
    rules=rules("""
        all_x_embedder.2-1 -> x_embedder
        all_final_layer.2-1.linear -> final_layer.linear
        all_final_layer.2-1.adaLN_modulation.1 -> final_layer.adaLN_modulation.1
        {x,cap}_pad_token! -> {x,cap}_pad_token!
        cap_embedder.{0,1} -> cap_embedder.{0,1}
        t_embedder.mlp.{0,2} -> t_embedder.mlp.{0,2}
    """)
    + tuple(
        rule
        for part in ("layers", "noise_refiner", "context_refiner")
        for rule in rules(f"""
            {part}.*.attention.to_q + {part}.*.attention.to_k + {part}.*.attention.to_v -> {part}.*.attention.qkv
            {part}.*.attention.norm_{{q,k}} -> {part}.*.attention.{{q,k}}_norm
            {part}.*.attention.to_out.0 -> {part}.*.attention.out
            {part}.*.attention_norm{{1,2}} -> {part}.*.attention_norm{{1,2}}
            {part}.*.ffn_norm{{1,2}} -> {part}.*.ffn_norm{{1,2}}
            {part}.*.feed_forward.w{{1,2,3}} -> {part}.*.feed_forward.w{{1,2,3}}
            {part}.*.adaLN_modulation.0 -> {part}.*.adaLN_modulation.0
        """)
    ),
)

LTXV = Family(
    name="ltxv",
    signs=("proj_in.weight", "time_embed.emb.timestep_embedder.linear_1.weight"),
    rules=rules("""
        proj_in -> patchify_proj
        time_embed.emb.timestep_embedder.linear_{1,2} -> adaln_single.emb.timestep_embedder.linear_{1,2}
        time_embed.linear -> adaln_single.linear
        caption_projection.linear_{1,2} -> caption_projection.linear_{1,2}
        transformer_blocks.*.scale_shift_table! -> transformer_blocks.*.scale_shift_table!
        transformer_blocks.*.attn1.norm_{q,k} -> transformer_blocks.*.attn1.{q,k}_norm
        transformer_blocks.*.attn2.norm_{q,k} -> transformer_blocks.*.attn2.{q,k}_norm
        transformer_blocks.*.attn1.to_{q,k,v,out.0} -> transformer_blocks.*.attn1.to_{q,k,v,out.0}
        transformer_blocks.*.attn2.to_{q,k,v,out.0} -> transformer_blocks.*.attn2.to_{q,k,v,out.0}
        transformer_blocks.*.ff.net.{0.proj,2} -> transformer_blocks.*.ff.net.{0.proj,2}
        scale_shift_table! -> scale_shift_table!
        proj_out -> proj_out
    """),
    without=("audio_proj_in.weight",),
)

KREA2 = Family(
    name="krea2",
    signs=("time_mod_proj.weight", "text_fusion.projector.weight"),
    rules=rules("""
        img_in -> first
        time_embed.linear_{1,2} -> tmlp.{0,2}
        time_mod_proj -> tproj.1
        txt_in.norm.weight! -> txtmlp.0.scale!
        txt_in.linear_{1,2} -> txtmlp.{1,3}
        text_fusion.projector -> txtfusion.projector
        transformer_blocks.*.scale_shift_table! -> blocks.*.mod.lin! (flatten)
        final_layer.norm.weight! -> last.norm.scale!
        final_layer.linear -> last.linear
        final_layer.scale_shift_table! -> last.modulation.lin!
    """)
    + tuple(
        rule
        for old, new in (
            ("transformer_blocks.*", "blocks.*"),
            ("text_fusion.layerwise_blocks.*", "txtfusion.layerwise_blocks.*"),
            ("text_fusion.refiner_blocks.*", "txtfusion.refiner_blocks.*"),
        )
        for rule in rules(f"""
            {old}.norm1.weight! -> {new}.prenorm.scale!
            {old}.norm2.weight! -> {new}.postnorm.scale!
            {old}.attn.to_{{q,k,v}} -> {new}.attn.w{{q,k,v}}
            {old}.attn.to_gate -> {new}.attn.gate
            {old}.attn.to_out.0 -> {new}.attn.wo
            {old}.attn.norm_{{q,k}}.weight! -> {new}.attn.qknorm.{{q,k}}norm.scale!
            {old}.ff.{{gate,up,down}} -> {new}.mlp.{{gate,up,down}}
        """)
    ),
)

FAMILIES = (CHROMA, FLUX2, HUNYUAN_VIDEO, FLUX, WAN, Z_IMAGE, LTXV, KREA2)
"""Checked in order: Chroma has Flux's names too."""


def diffusers_family(names: Iterable[str]) -> Family | None:
    """The family of a file with diffusers' names, None if its names are ComfyUI's or unknown."""
    names = frozenset(names)
    return next((family for family in FAMILIES if family.recognises(names)), None)
