"""SageAttention 1 and 2: queries and keys in INT8.

Version 2's own choice makes black pictures on sm86 (its Triton kernel, ComfyUI issue 9773), so the
kernel is chosen here. Source: SageAttention's core.py.
"""

from __future__ import annotations

from typing import Any

import torch

from .contract import Kind, SparseOptions, expand_kv, require_half_range
from .request import MAX_OFFSET, AttentionRequest
from .symbols import find

MODULE = "sageattention"
INSTALL = "pip install sageattention (version 1; version 2 is built from its repository)"

CUDA_KERNELS: dict[tuple[int, int], tuple[str, dict[str, Any]]] = {
    (8, 0): ("sageattn_qk_int8_pv_fp16_cuda", {"pv_accum_dtype": "fp32"}),
    (8, 6): ("sageattn_qk_int8_pv_fp16_cuda", {"pv_accum_dtype": "fp32"}),
    (8, 7): ("sageattn_qk_int8_pv_fp16_cuda", {"pv_accum_dtype": "fp32"}),
    (8, 9): ("sageattn_qk_int8_pv_fp8_cuda", {"pv_accum_dtype": "fp32+fp16"}),
    (9, 0): ("sageattn_qk_int8_pv_fp8_cuda_sm90", {"pv_accum_dtype": "fp32+fp32"}),
    (12, 0): ("sageattn", {}),
    (12, 1): ("sageattn", {}),
}
"""Version 2's kernel by card; on Blackwell only its automatic choice runs (ComfyUI issue 15263)."""

VERSION_1_HEAD_DIMS = (64, 96, 128)
MAX_HEAD_DIM = 128
CASTS_TO_HALF = ("sageattn_qk_int8_pv_fp16_cuda", "version 1")


class SageAttention:
    """INT8 attention on NVIDIA cards."""

    name = "sage_attn"
    kind: Kind = "quantized"

    def refuses(self, request: AttentionRequest) -> str | None:
        """Refuses masks (its automatic kernels ignore them silently), and what no kernel takes."""
        if request.device != "cuda" or request.capability is None:
            return f"needs an NVIDIA card, the tensors are on {request.device}"
        if request.exact_only:
            return "the model asks for exact attention here"
        if request.mask != "none":
            return "its kernels ignore masks"
        if request.dtype not in (torch.float16, torch.bfloat16):
            return f"takes float16 and bfloat16, not {request.dtype}"
        if request.largest_offset > MAX_OFFSET:
            return "its operands reach beyond its 32-bit indices"
        missing = find(MODULE, "sageattn", INSTALL)
        if missing.function is None:
            return missing.reason
        if is_version_1():
            if request.head_dim not in VERSION_1_HEAD_DIMS:
                return f"version 1 takes heads of 64, 96 or 128, not {request.head_dim}"
            return None
        if request.capability not in CUDA_KERNELS:
            major, minor = request.capability
            return f"version 2 has no kernel for compute capability {major}.{minor}"
        if request.head_dim > MAX_HEAD_DIM:
            return f"takes heads of up to {MAX_HEAD_DIM}, not {request.head_dim}"
        name, _ = CUDA_KERNELS[request.capability]
        return find(MODULE, name, INSTALL).reason or None

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        options: SparseOptions,
    ) -> torch.Tensor:
        """See the contract."""
        k, v = expand_kv(q, k, v)
        name, settings = self._kernel(torch.cuda.get_device_capability(q.device))
        if name in CASTS_TO_HALF:
            require_half_range(v, "SageAttention")
        if name == "version 1":
            name, k = "sageattn", k.clone()  # it subtracts the mean in place
        function = find(MODULE, name, INSTALL).require()
        return function(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=scale, **settings)

    def _kernel(self, capability: tuple[int, int]) -> tuple[str, dict[str, Any]]:
        return ("version 1", {}) if is_version_1() else CUDA_KERNELS[capability]


def is_version_1() -> bool:
    """Version 2 alone has CUDA kernels by name."""
    return find(MODULE, "sageattn_qk_int8_pv_fp16_cuda", INSTALL).function is None
