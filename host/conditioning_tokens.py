"""Which tokens of a model's sequence are text, references or audio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Ranges = tuple[tuple[int, int], ...]

TEXT_FIRST = ("flux", "flux2", "qwen_image")
"""ComfyUI's names of models whose joint attention has the text before the picture, without saying so
to the override: as many tokens as the conditioning is long."""


def conditioning_tokens(model: Any, context: Any, arguments: Mapping[str, Any]) -> Ranges:
    """Ranges of conditioning tokens, from what a model call is given; () where nothing is known.

    Args:
        model: ComfyUI's BaseModel. context: the text conditioning (B, N, K) of the call.
        arguments: the call's other arguments.
    """
    payload = arguments.get("minimax_payload")
    if isinstance(payload, Mapping):
        return _before_the_video(getattr(payload.get("layout"), "segments", None))
    config = getattr(getattr(model, "model_config", None), "unet_config", None) or {}
    length = context.shape[1] if getattr(context, "ndim", 0) == 3 else 0
    if config.get("image_model") in TEXT_FIRST and length:
        return ((0, length),)
    return ()


def _before_the_video(segments: Sequence[Any] | None) -> Ranges:
    """MiniMax H3's layout: (kind, rows) in order, in newer versions (start, stop, kind); its video
    comes last, after text, references and audio."""
    position = start = 0
    for segment in segments or ():
        if isinstance(segment[0], str):
            kind, first = segment[0], position
            position += segment[1]
        else:
            first, position, kind = segment
        if kind == "video":
            start = first
    return ((0, start),) if start else ()


def named_by_the_options(transformer_options: Mapping[str, Any]) -> Ranges:
    """What a model says of itself while it runs: the picture begins at `img_slice`."""
    part = transformer_options.get("img_slice")
    if isinstance(part, (list, tuple)) and part and isinstance(part[0], int) and part[0] > 0:
        return ((0, part[0]),)
    return ()
