"""How long work takes on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def timed(work: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """The result of one call of `work`, and its milliseconds with all that it has queued."""
    _wait(device)
    started = time.perf_counter()
    result = work()
    _wait(device)
    return result, (time.perf_counter() - started) * 1e3


def best_milliseconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The shortest of some calls."""
    return min(timed(work, device)[1] for _ in range(rounds))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
