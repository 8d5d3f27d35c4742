"""Timing work on a GPU with events, and what a timing is true for."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import torch

REPEATS = 3


class CudaClock:
    """The median of a few runs on the current stream, after one to warm up."""

    def milliseconds(self, work: Callable[[], object]) -> float:
        """Time of one call of `work` in milliseconds."""
        work()
        times = []
        for _ in range(REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return sorted(times)[REPEATS // 2]


def machine_text() -> str:
    """GPU, driver and versions of everything that runs kernels."""
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    parts = [torch.cuda.get_device_name(), f"driver {driver}", f"torch {torch.__version__}"]
    for package in ("comfy-kitchen", "leandit", "cuda-core"):
        try:
            parts.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            parts.append(f"no {package}")
    return ", ".join(parts)
