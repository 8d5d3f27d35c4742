"""The INT8 linear as a torch operator, so that torch.compile takes it whole and without recompiling.

Its settings travel as text, since operators take only plain values.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from typing import Any

import torch

from .dispatch import LinearSettings
from .linear_dispatch import dispatcher_for
from .row_split import RowSplit

NAMESPACE, NAME = "leandit", "int8_linear"


def to_text(settings: LinearSettings) -> str:
    """The settings as JSON with sorted keys."""
    return json.dumps(dataclasses.asdict(settings), sort_keys=True)


@cache
def from_text(text: str) -> LinearSettings:
    """The inverse of `to_text`."""
    # Another version of this package in the process may know more settings: those are left out.
    content = _known(LinearSettings, json.loads(text))
    return LinearSettings(**{**content, "split": RowSplit(**_known(RowSplit, content["split"]))})


def _known(kind: Any, content: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in content.items() if name in names}


def int8_linear_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    group_size: int,
    settings: str,
) -> torch.Tensor:
    """`kernels.int8.int8_linear` by the dispatcher of the settings; group_size 0 means not rotated."""
    dispatcher = dispatcher_for(from_text(settings))
    return dispatcher.linear(x, weight, weight_scale, bias, group_size or None)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    group_size: int,
    settings: str,
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@cache
def registered() -> object:
    """The operator `torch.ops.leandit.int8_linear`, registered when first asked for.

    A second copy of this package in the process, as when ComfyUI loads the folder that is also
    installed, finds the first one's operator, which does the same.
    """
    if not hasattr(getattr(torch.ops, NAMESPACE), NAME):
        made = torch.library.custom_op(f"{NAMESPACE}::{NAME}", mutates_args=())(int8_linear_op)
        made.register_fake(_fake)
    return getattr(getattr(torch.ops, NAMESPACE), NAME)
