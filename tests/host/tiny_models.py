"""Tiny models of real architectures, built by ComfyUI's own model classes with random weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": (
        "Flux",
        {
            "image_model": "flux",
            "in_channels": 16,
            "out_channels": 16,
            "vec_in_dim": 32,
            "context_in_dim": 64,
            "hidden_size": 256,
            "mlp_ratio": 4.0,
            "num_heads": 2,
            "depth": 2,
            "depth_single_blocks": 2,
            "axes_dim": [16, 56, 56],
            "theta": 10000,
            "patch_size": 2,
            "qkv_bias": True,
            "guidance_embed": True,
            "txt_ids_dims": [],
        },
    ),
    "flux2": (
        "Flux2",
        {
            "image_model": "flux2",
            "in_channels": 128,
            "out_channels": 128,
            "vec_in_dim": None,
            "context_in_dim": 64,
            "hidden_size": 256,
            "mlp_ratio": 3.0,
            "num_heads": 2,
            "depth": 2,
            "depth_single_blocks": 2,
            "axes_dim": [32, 32, 32, 32],
            "theta": 2000,
            "patch_size": 1,
            "qkv_bias": False,
            "ops_bias": False,
            "guidance_embed": True,
            "txt_ids_dims": [3],
            "global_modulation": True,
            "mlp_silu_act": True,
        },
    ),
    "wan": (
        "WAN21_T2V",
        {
            "image_model": "wan2.1",
            "model_type": "t2v",
            "dim": 256,
            "ffn_dim": 512,
            "num_heads": 2,
            "num_layers": 2,
            "in_dim": 16,
            "out_dim": 16,
            "text_dim": 64,
            "freq_dim": 256,
        },
    ),
    "qwen_image": (
        "QwenImage",
        {
            "image_model": "qwen_image",
            "in_channels": 64,
            "num_layers": 2,
            "attention_head_dim": 128,
            "num_attention_heads": 2,
            "joint_attention_dim": 64,
        },
    ),
    "z_image": (
        "ZImage",
        {
            "image_model": "lumina2",
            "patch_size": 2,
            "in_channels": 16,
            "dim": 256,
            "cap_feat_dim": 64,
            "n_layers": 2,
            "n_heads": 2,
            "n_kv_heads": 2,
            "qk_norm": True,
            "axes_dims": [32, 48, 48],
            "axes_lens": [300, 512, 512],
            "z_image_modulation": True,
            "pad_tokens_multiple": 32,
            "time_scale": 1000.0,
            "ffn_dim_multiplier": 8.0 / 3.0,
        },
    ),
    "hunyuan_video": (
        "HunyuanVideo",
        {
            "image_model": "hunyuan_video",
            "in_channels": 16,
            "patch_size": [1, 2, 2],
            "out_channels": 16,
            "vec_in_dim": 768,
            "axes_dim": [16, 56, 56],
            "meanflow": False,
            "context_in_dim": 64,
            "hidden_size": 256,
            "mlp_ratio": 4.0,
            "num_heads": 2,
            "depth": 2,
            "depth_single_blocks": 2,
            "theta": 256,
            "qkv_bias": True,
            "byt5": False,
            "guidance_embed": True,
            "use_cond_type_embedding": False,
            "vision_in_dim": None,
            "meanflow_sum": False,
        },
    ),
    "krea2": (
        "Krea2",
        {
            "image_model": "krea2",
            "features": 256,
            "channels": 16,
            "patch": 2,
            "layers": 2,
            "heads": 2,
            "kvheads": 1,
            "txtlayers": 3,
            "txtdim": 64,
            "txtheads": 2,
            "txtkvheads": 2,
        },
    ),
    "minimax_h3": (
        "MiniMaxH3",
        {
            "image_model": "minimax_h3",
            "num_layers": 2,
            "token_refiner_num_layers": 2,
            "hidden_size": 256,
            "latents_dim": 24,
            "audio_latents_dim": 32,
            "attention_head_dim": 128,
            "num_attention_heads": 2,
            "ffn_hidden_size": 512,
            "text_dim": 64,
            "timestep_input_dim": 64,
            "time_embed_hidden_size": 256,
            "time_embed_dim": 96,
        },
    ),
    "ltxv": (
        "LTXV",
        {
            "image_model": "ltxv",
            "attention_head_dim": 64,
            "num_attention_heads": 4,
            "cross_attention_dim": 256,
            "num_layers": 2,
            "caption_channels": 64,
            "in_channels": 128,
        },
    ),
    "chroma": (
        "Chroma",
        {
            "image_model": "chroma",
            "in_channels": 64,
            "out_channels": 64,
            "context_in_dim": 64,
            "hidden_size": 256,
            "mlp_ratio": 4.0,
            "num_heads": 2,
            "depth": 2,
            "depth_single_blocks": 2,
            "axes_dim": [16, 56, 56],
            "theta": 10000,
            "patch_size": 2,
            "qkv_bias": True,
            "in_dim": 64,
            "out_dim": 256,
            "hidden_dim": 256,
            "n_layers": 2,
            "txt_ids_dims": [],
            "vec_in_dim": None,
        },
    ),
}


@dataclass(frozen=True)
class Inputs:
    """Latent noise and conditioning for one sampling run."""

    noise: Any
    positive: list[Any]
    extra: dict[str, Any] = field(default_factory=dict)


def build(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A ModelPatcher on the CPU over a tiny model of `family`.

    Args:
        dtype: of the weights; ComfyUI computes in float32 on a CPU.
        changes: configuration values to replace.
    """
    import comfy.model_patcher
    import comfy.supported_models

    class_name, config = CONFIGS[family]
    model_config = getattr(comfy.supported_models, class_name)(config | changes)
    cast = None if dtype == torch.float32 else torch.float32
    model_config.set_inference_dtype(dtype, cast)
    cpu = torch.device("cpu")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_config.get_model({}, "", device=cpu)
        fill(model)
    return comfy.model_patcher.ModelPatcher(model, cpu, cpu)


def parts(family: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights of the blocks' layers by layer, and everything else by name, all float32."""
    tensors = build(family).model.diffusion_model.state_dict()
    layers = {
        name.removesuffix(".weight"): value
        for name, value in tensors.items()
        if "blocks." in name
        and name.endswith(".weight")
        and value.ndim == 2
        and value.shape[1] % 256 == 0
        and "mod" not in name
    }
    plain = {n: v.clone() for n, v in tensors.items() if n.removesuffix(".weight") not in layers}
    return layers, plain


def fill(model: torch.nn.Module) -> None:
    """Random weights with some large columns, as trained transformers have."""
    for name, parameter in model.diffusion_model.named_parameters():
        if parameter.dim() < 2:
            value = torch.randn(parameter.shape) * 0.02
            if "norm" in name and "bias" not in name:
                value += 1.0
        else:
            value = torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5
            value[..., ::37] *= 3.0
        parameter.data = value.to(parameter.dtype)
    for name, buffer in model.diffusion_model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.copy_(1.0 / 10000 ** torch.linspace(0, 1, buffer.numel()))


def inputs(family: str, seed: int = 1) -> Inputs:
    """Inputs of a size that runs in a fraction of a second."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    image, video = (1, 16, 8, 8), (1, 16, 2, 8, 8)
    if family == "minimax_h3":
        import comfy.nested_tensor

        noise = comfy.nested_tensor.NestedTensor([randn(1, 24, 2, 4, 4), randn(1, 32, 2, 1)])
        return Inputs(noise, [[randn(1, 6, 64), {}]])
    shapes = {
        "wan": video,
        "hunyuan_video": video,
        "ltxv": (1, 128, 2, 4, 4),
        "flux2": (1, 128, 4, 4),
        "qwen_image": (1, 16, 1, 8, 8),
        "krea2": (1, 16, 1, 8, 8),
    }
    noise = randn(*shapes.get(family, image))
    width = 3 * 64 if family == "krea2" else 64
    options: dict[str, Any] = {}
    if family == "flux":
        options["pooled_output"] = randn(1, 32)
    elif family == "hunyuan_video":
        options["pooled_output"] = randn(1, 768)
    elif family == "ltxv":
        options["attention_mask"] = torch.ones(1, 6)
    return Inputs(noise, [[randn(1, 6, width), options]])


def sample(patcher: Any, family: str, steps: int = 2, seed: int = 1) -> torch.Tensor:
    """Latents of a short Euler run through ComfyUI's own sampler, as one flat float tensor."""
    import comfy.sample

    given = inputs(family, seed)
    latent = given.noise * 0
    result = comfy.sample.sample(
        patcher,
        given.noise,
        steps,
        1.0,
        "euler",
        "simple",
        given.positive,
        given.positive,
        latent,
        disable_pbar=True,
        seed=seed,
    )
    parts = result.unbind() if getattr(result, "is_nested", False) else [result]
    return torch.cat([part.float().flatten() for part in parts])
