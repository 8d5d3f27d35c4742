"""The dispatcher that a process uses for given settings, with every backend there is."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from .backend import Backend
from .backends.cpu import CpuBackend
from .backends.cuda import CudaBackend
from .backends.dequantize import DequantizeBackend
from .backends.kitchen import KitchenBackend, selected_config
from .backends.reference import ReferenceBackend
from .cache_folder import cache_folder
from .cuda_clock import CudaClock, machine_text
from .dispatch import Dispatcher, LinearSettings
from .tuner import Tuner

BACKEND_NAMES = ("cpu", "comfy-kitchen", "leandit-cuda", "reference", "dequantize")
"""In order of preference; on a GPU, mode auto measures those that can run."""


@cache
def dispatcher_for(settings: LinearSettings) -> Dispatcher:
    """One per settings and process, so that what was measured or failed is remembered."""
    folder = cache_folder()
    tuner = None
    if settings.split.mode == "auto" and torch.cuda.is_available():
        tuner = Tuner(CudaClock(), machine_text(), folder / "linear_tuning.json")
    return Dispatcher(settings, backends(folder), selected_config(), tuner)


def backends(folder: Path | None) -> list[Backend]:
    """Every backend, in order of preference.

    Args:
        folder: where compiled kernels are kept; None keeps none.
    """
    return [
        CpuBackend(),
        KitchenBackend(),
        CudaBackend(folder),
        ReferenceBackend(),
        DequantizeBackend(),
    ]
