"""ComfyUI's progress bar and its Cancel button."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
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


def show_text(node: str | None) -> Callable[[str], None] | None:
    """A function that shows text in a node while and after a run, where this ComfyUI can."""
    # Asked for where ComfyUI has loaded it; importing it here would start a server's parts.
    server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    if node is None or server is None or not hasattr(server, "send_progress_text"):
        return None

    def show(text: str) -> None:
        server.send_progress_text(text, node, server.client_id)

    return show
