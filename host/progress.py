"""ComfyUI's progress bar and its Cancel button."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import comfy.model_management
import comfy.utils

Item = TypeVar("Item")


def interruptible(items: Sequence[Item]) -> Iterator[Item]:
    """Yield the items, moving the running node's progress bar and stopping when cancelled.

    Raises:
        comfy.model_management.InterruptProcessingException: before the next item after Cancel.
    """
    bar = comfy.utils.ProgressBar(len(items))
    for item in items:
        comfy.model_management.throw_exception_if_processing_interrupted()
        yield item
        bar.update(1)
