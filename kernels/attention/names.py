"""Names of attention backends, as people and other tools write them."""

from __future__ import annotations

DENSE = ("auto", "keep", "sdpa", "fa", "sage_attn", "sage3", "kitchen_int8")
SPARSE = ("none", "sol_attn", "sparge")

ALIASES = {
    "pytorch": "sdpa",
    "torch": "sdpa",
    "torch_sdpa": "sdpa",
    "pytorch_attention": "sdpa",
    "flash": "fa",
    "fa2": "fa",
    "fa3": "fa",
    "fa4": "fa",
    "flash_attn": "fa",
    "flash_attention": "fa",
    "flashattention": "fa",
    "sage": "sage_attn",
    "sage1": "sage_attn",
    "sage2": "sage_attn",
    "sageattn": "sage_attn",
    "sageattention": "sage_attn",
    "sage_attention": "sage_attn",
    "sageattn3": "sage3",
    "sageattention3": "sage3",
    "ck": "kitchen_int8",
    "ck_int8": "kitchen_int8",
    "comfy_kitchen": "kitchen_int8",
    "comfy_kitchen_int8": "kitchen_int8",
    "comfy_kitchen_attention": "kitchen_int8",
    "sol": "sol_attn",
    "solattn": "sol_attn",
    "sol_attention": "sol_attn",
    "spargeattn": "sparge",
    "sparge_attn": "sparge",
    "spas_sage_attn": "sparge",
    "off": "none",
    "": "none",
}


def dense_name(text: str) -> str:
    """The dense backend's name.

    Raises:
        ValueError: listing the valid names.
    """
    return _name(text, DENSE, "dense")


def sparse_name(text: str) -> str:
    """The sparse backend's name.

    Raises:
        ValueError: listing the valid names.
    """
    return _name(text, SPARSE, "sparse")


def _name(text: str, valid: tuple[str, ...], what: str) -> str:
    plain = text.strip().lower().replace("-", "_").replace(" ", "_")
    name = plain if plain in valid else ALIASES.get(plain)
    if name not in valid:
        raise ValueError(f"unknown {what} attention {text!r}; valid: {', '.join(valid)}")
    return name
