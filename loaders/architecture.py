"""Recognising a model's architecture from the names of its tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

MODEL_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "model.")
"""Prefixes under which files hold the diffusion model, most specific first."""

SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("hunyuan_video", ("txt_in.individual_token_refiner.blocks.0.norm1.weight",)),
    ("flux2", ("double_stream_modulation_img.lin.weight",)),
    ("chroma", ("distilled_guidance_layer.in_proj.weight",)),
    ("flux", ("double_blocks.0.img_attn.qkv.weight", "single_blocks.0.linear1.weight")),
    ("minimax_h3", ("video_patch_proj.weight", "audio_patch_proj.weight")),
    ("ltxav", ("adaln_single.linear.weight", "audio_adaln_single.linear.weight")),
    ("ltxv", ("adaln_single.linear.weight", "patchify_proj.weight")),
    ("lumina2", ("cap_embedder.1.weight", "noise_refiner.0.attention.k_norm.weight")),
    ("wan2.1", ("head.modulation", "blocks.0.self_attn.q.weight")),
    ("krea2", ("txtfusion.projector.weight",)),
    ("qwen_image", ("txt_norm.weight", "transformer_blocks.0.attn.add_q_proj.weight")),
)
"""ComfyUI's name of an architecture, and tensors that only its files have together. Checked in
order: Chroma, for one, has Flux's blocks too. Source: ComfyUI's model_detection.py."""


def model_prefix(names: Iterable[str]) -> str:
    """The prefix of the diffusion model's tensors in a file, "" if they have none.

    That under which most weights are; where none is, the first that any name has.
    """
    counts: Counter[str] = Counter()
    for name in names:
        prefix = next((p for p in MODEL_PREFIXES if name.startswith(p)), None)
        if prefix is not None and name.endswith("weight"):
            counts[prefix] += 1
    best = max(MODEL_PREFIXES, key=lambda prefix: counts[prefix])
    return best if counts[best] else ""


def strays(names: Iterable[str], prefix: str) -> list[str]:
    """Names without the prefix whose like, but for a block's number, is there with it.

    A model of which a part lies under another prefix would load with that part missing.
    """
    names = tuple(names)
    kinds = {_kind(name.removeprefix(prefix)) for name in names if name.startswith(prefix)}
    return [
        name
        for name in names
        if not name.startswith(prefix)
        and any(_kind(name.removeprefix(p)) in kinds for p in (*MODEL_PREFIXES, ""))
    ]


def _kind(name: str) -> str:
    """A name with `#` for its block numbers; one without any is a kind of its own."""
    kind = re.sub(r"\.\d+\.", ".#.", name)
    return kind if kind != name else f"{name}!"


def image_model_of(names: Iterable[str]) -> str | None:
    """ComfyUI's `image_model` for tensor names without prefix, or None if not recognised."""
    names = frozenset(names)
    return next((image_model for image_model, signs in SIGNS if names.issuperset(signs)), None)
