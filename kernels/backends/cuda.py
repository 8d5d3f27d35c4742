"""The package's own CUDA kernels as a backend: any CUDA torch from 12 on, no compiler needed."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from ..backend import LinearRequest
from ..cuda.compiler import OLDEST, cuda_core_missing
from ..cuda.launch import NAMES, CudaKernels
from ..cuda.tile import MAX_K, ROW_VALUES

GROUPS = (None, 16, 64, 256)


class CudaBackend:
    """Fused rotation and quantization, then the GEMM, compiled for the card at hand."""

    name = "leandit-cuda"

    def __init__(self, cache_folder: Path | None) -> None:
        self._cache_folder = cache_folder

    def refuses(self, request: LinearRequest) -> str | None:
        """Refuses what the kernels do not cover, and says what is missing."""
        if request.device != "cuda":
            return f"runs on NVIDIA cards only, the tensors are on {request.device}"
        if torch.version.hip is not None:
            return "runs on NVIDIA cards only, this torch is built for AMD"
        missing = cuda_core_missing()
        if missing is not None:
            return missing
        capability = torch.cuda.get_device_capability()
        if capability < OLDEST:
            return f"needs compute capability 7.5, the card has {capability[0]}.{capability[1]}"
        return why_shape_refused(request)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        group_size: int | None,
    ) -> torch.Tensor:
        """`kernels.int8.int8_linear` with the rotation in float32."""
        kernels = _kernels(x.device, self._cache_folder)
        flat = _aligned(x.reshape(-1, x.shape[-1]))
        q, row_scale = kernels.rotate_quantize(flat, group_size)
        columns = weight_scale.reshape(-1).float().contiguous()
        shift = None if bias is None else bias.float().contiguous()
        out = kernels.gemm(q, row_scale, _aligned(weight), columns, shift, x.dtype)
        return out.reshape(*x.shape[:-1], weight.shape[0])


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, at an address the kernels can load 16 bytes from; a misaligned load would end the
    process's whole use of the card."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def why_shape_refused(request: LinearRequest) -> str | None:
    """Why the kernels cannot take these numbers, or None: a pure function."""
    if request.dtype not in NAMES:
        return f"takes float32, float16 and bfloat16, not {request.dtype}"
    if request.group_size not in GROUPS:
        return f"rotates in groups of 16, 64 or 256, not {request.group_size}"
    if request.k % ROW_VALUES or (request.group_size and request.k % request.group_size):
        return f"needs K divisible by {ROW_VALUES} and by the group, K={request.k}"
    if request.k > MAX_K:
        return f"takes rows of at most {MAX_K} values, K={request.k}"
    return None


@cache
def _kernels(device: torch.device, cache_folder: Path | None) -> CudaKernels:
    return CudaKernels(device, cache_folder)
