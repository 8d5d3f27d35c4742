"""All attention backends by name."""

from __future__ import annotations

from .contract import AttentionBackend
from .fa import FlashAttention
from .kitchen_int8 import KitchenInt8
from .sage3 import Sage3
from .sage_attn import SageAttention
from .sdpa import Sdpa
from .sol_attn import SolAttention
from .sparge import Sparge


def attention_backends() -> dict[str, AttentionBackend]:
    """Every backend there is, whether it can run here or not."""
    every: tuple[AttentionBackend, ...] = (
        Sdpa(),
        FlashAttention(),
        SageAttention(),
        Sage3(),
        KitchenInt8(),
        SolAttention(),
        Sparge(),
    )
    return {backend.name: backend for backend in every}
