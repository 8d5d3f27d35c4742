"""Running the compiled kernels on torch tensors, on torch's current stream."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .compiler import compile_kernel
from .tile import choose_tile, quantize_macros

NAMES = {torch.float32: "Float32", torch.float16: "Float16", torch.bfloat16: "BFloat16"}
"""torch's dtypes by the names in number.cuh."""


class CudaKernels:
    """The kernels of one GPU, each compiled and loaded when it is first needed."""

    def __init__(self, device: torch.device, cache: Path | None) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._core: Any = importlib.import_module("cuda.core")
        self._device = self._core.Device(device.index if device.index is not None else 0)
        self._arch = f"sm_{properties.major}{properties.minor}"
        self._multiprocessors = properties.multi_processor_count
        self._cache = cache
        self._loaded: dict[tuple[str, str], Any] = {}

    def rotate_quantize(
        self, x: torch.Tensor, group_size: int | None, activation: str = "Identity"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`quantize_int8_rowwise(rotate_in_steps(activation(x).float(), G))`.

        Args:
            x: (M, K) contiguous, K a multiple of 16 and of G.

        Returns:
            q (M, K) int8 and scale (M,) float32.
        """
        m, k = x.shape
        q = torch.empty(m, k, dtype=torch.int8, device=x.device)
        scale = torch.empty(m, dtype=torch.float32, device=x.device)
        macros = quantize_macros(k, NAMES[x.dtype], group_size, activation)
        kernel = self._kernel("rotate_quantize", macros)
        self._launch(kernel, m, int(str(macros["THREADS"])), x, q, scale, k)
        return q, scale

    def gemm(
        self,
        q: torch.Tensor,
        row_scale: torch.Tensor,
        weight: torch.Tensor,
        column_scale: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        weight_bits: int = 8,
    ) -> torch.Tensor:
        """`((q.int() @ weight.int().T).float() * row_scale * column_scale.T + bias).to(dtype)`.

        Args:
            q: (M, K) int8. weight: (N, K) int8, or (N, K / 2) with two codes a byte.
            row_scale (M,), column_scale (N,), bias (N,): float32.
        """
        m, k = q.shape
        n = weight.shape[0]
        out = torch.empty(m, n, dtype=dtype, device=q.device)
        tile = choose_tile(m, n, self._multiprocessors)
        kernel = self._kernel("int8_gemm", tile.macros(weight_bits, NAMES[dtype]))
        blocks = -(-m // tile.m) * -(-n // tile.n)
        tensors = (q, weight, row_scale, column_scale, bias, out)
        self._launch(kernel, blocks, tile.threads, *tensors, m, n, k)
        return out

    def _kernel(self, name: str, macros: Mapping[str, object]) -> Any:
        key = (name, repr(sorted(macros.items())))
        if key not in self._loaded:
            self._device.set_current()
            self._loaded[key] = self._load(name, macros)
        return self._loaded[key]

    def _load(self, name: str, macros: Mapping[str, object]) -> Any:
        code = compile_kernel(name, macros, self._arch, self._cache).code
        try:
            return self._core.ObjectCode.from_cubin(code).get_kernel(name)
        except Exception:  # what was kept is damaged: compile it anew, whose errors count
            code = compile_kernel(name, macros, self._arch, self._cache, anew=True).code
            return self._core.ObjectCode.from_cubin(code).get_kernel(name)

    def _launch(self, kernel: Any, blocks: int, threads: int, *arguments: Any) -> None:
        self._device.set_current()
        stream = self._core.Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        values = []
        for argument in arguments:
            if argument is None:
                values.append(0)
            elif isinstance(argument, torch.Tensor):
                values.append(argument.data_ptr())
            else:
                values.append(ctypes.c_int(argument))
        config = self._core.LaunchConfig(grid=blocks, block=threads)
        self._core.launch(stream, config, kernel, *values)
