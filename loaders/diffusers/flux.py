"""Flux.1, Chroma, Flux.2 and HunyuanVideo, whose double and single blocks are alike.

Source: diffusers 0.42's transformer classes and conversion scripts beside ComfyUI's models.
"""

from __future__ import annotations

from .rule import Family, rules

ATTENTION = """
transformer_blocks.*.attn.to_q + transformer_blocks.*.attn.to_k + transformer_blocks.*.attn.to_v -> double_blocks.*.img_attn.qkv
transformer_blocks.*.attn.add_q_proj + transformer_blocks.*.attn.add_k_proj + transformer_blocks.*.attn.add_v_proj -> double_blocks.*.txt_attn.qkv
transformer_blocks.*.attn.norm_q -> double_blocks.*.img_attn.norm.query_norm
transformer_blocks.*.attn.norm_k -> double_blocks.*.img_attn.norm.key_norm
transformer_blocks.*.attn.norm_added_q -> double_blocks.*.txt_attn.norm.query_norm
transformer_blocks.*.attn.norm_added_k -> double_blocks.*.txt_attn.norm.key_norm
transformer_blocks.*.attn.to_out.0 -> double_blocks.*.img_attn.proj
transformer_blocks.*.attn.to_add_out -> double_blocks.*.txt_attn.proj
single_transformer_blocks.*.attn.norm_q -> single_blocks.*.norm.query_norm
single_transformer_blocks.*.attn.norm_k -> single_blocks.*.norm.key_norm
proj_out -> final_layer.linear
"""

MLP = """
transformer_blocks.*.ff.net.0.proj -> double_blocks.*.img_mlp.0
transformer_blocks.*.ff.net.2 -> double_blocks.*.img_mlp.2
transformer_blocks.*.ff_context.net.0.proj -> double_blocks.*.txt_mlp.0
transformer_blocks.*.ff_context.net.2 -> double_blocks.*.txt_mlp.2
single_transformer_blocks.*.attn.to_q + single_transformer_blocks.*.attn.to_k + single_transformer_blocks.*.attn.to_v + single_transformer_blocks.*.proj_mlp -> single_blocks.*.linear1
single_transformer_blocks.*.proj_out -> single_blocks.*.linear2
"""

MODULATION = """
transformer_blocks.*.norm1.linear -> double_blocks.*.img_mod.lin
transformer_blocks.*.norm1_context.linear -> double_blocks.*.txt_mod.lin
single_transformer_blocks.*.norm.linear -> single_blocks.*.modulation.lin
norm_out.linear -> final_layer.adaLN_modulation.1 (swap)
"""

TIME = """
time_text_embed.timestep_embedder.linear_{1,2} -> time_in.{in,out}_layer
time_text_embed.text_embedder.linear_{1,2} -> vector_in.{in,out}_layer
time_text_embed.guidance_embedder.linear_{1,2} -> guidance_in.{in,out}_layer
"""

INPUTS = """
x_embedder -> img_in
context_embedder -> txt_in
"""

FLUX = Family(
    name="flux",
    signs=(
        "x_embedder.weight",
        "time_text_embed.text_embedder.linear_1.weight",
        "norm_out.linear.weight",
    ),
    rules=rules(INPUTS + TIME + ATTENTION + MLP + MODULATION),
    without=("context_embedder.proj_in.weight", "pos_embed.proj.weight"),
)

CHROMA = Family(
    name="chroma",
    signs=("x_embedder.weight", "distilled_guidance_layer.layers.0.linear_1.weight"),
    rules=rules(
        INPUTS
        + ATTENTION
        + MLP
        + """
        distilled_guidance_layer.layers.*.linear_{1,2} -> distilled_guidance_layer.layers.*.{in,out}_layer
        distilled_guidance_layer.{in,out}_proj -> distilled_guidance_layer.{in,out}_proj
        distilled_guidance_layer.norms.* -> distilled_guidance_layer.norms.*
        """
    ),
)

FLUX2 = Family(
    name="flux2",
    signs=(
        "time_guidance_embed.timestep_embedder.linear_1.weight",
        "double_stream_modulation_img.linear.weight",
    ),
    rules=rules(
        INPUTS
        + ATTENTION
        + """
        time_guidance_embed.timestep_embedder.linear_{1,2} -> time_in.{in,out}_layer
        time_guidance_embed.guidance_embedder.linear_{1,2} -> guidance_in.{in,out}_layer
        double_stream_modulation_{img,txt}.linear -> double_stream_modulation_{img,txt}.lin
        single_stream_modulation.linear -> single_stream_modulation.lin
        transformer_blocks.*.ff.linear_in -> double_blocks.*.img_mlp.0
        transformer_blocks.*.ff.linear_out -> double_blocks.*.img_mlp.2
        transformer_blocks.*.ff_context.linear_in -> double_blocks.*.txt_mlp.0
        transformer_blocks.*.ff_context.linear_out -> double_blocks.*.txt_mlp.2
        single_transformer_blocks.*.attn.to_qkv_mlp_proj -> single_blocks.*.linear1
        single_transformer_blocks.*.attn.to_out -> single_blocks.*.linear2
        norm_out.linear -> final_layer.adaLN_modulation.1 (swap)
        """
    ),
)

REFINER = "context_embedder.token_refiner.refiner_blocks.*"
REFINED = "txt_in.individual_token_refiner.blocks.*"

HUNYUAN_VIDEO = Family(
    name="hunyuan_video",
    signs=(
        "context_embedder.token_refiner.refiner_blocks.0.attn.to_q.weight",
        "time_text_embed.text_embedder.linear_1.weight",
    ),
    rules=rules(
        TIME
        + ATTENTION
        + MLP
        + MODULATION
        + f"""
        x_embedder.proj -> img_in.proj
        context_embedder.proj_in -> txt_in.input_embedder
        context_embedder.time_text_embed.timestep_embedder.linear_{{1,2}} -> txt_in.t_embedder.{{in,out}}_layer
        context_embedder.time_text_embed.text_embedder.linear_{{1,2}} -> txt_in.c_embedder.{{in,out}}_layer
        {REFINER}.norm{{1,2}} -> {REFINED}.norm{{1,2}}
        {REFINER}.attn.to_q + {REFINER}.attn.to_k + {REFINER}.attn.to_v -> {REFINED}.self_attn.qkv
        {REFINER}.attn.to_out.0 -> {REFINED}.self_attn.proj
        {REFINER}.ff.net.0.proj -> {REFINED}.mlp.0
        {REFINER}.ff.net.2 -> {REFINED}.mlp.2
        {REFINER}.norm_out.linear -> {REFINED}.adaLN_modulation.1
        """
    ),
)
