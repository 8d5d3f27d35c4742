"""What the row-split node did, and what will run on this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..kernels.backend import LinearRequest, NoBackendError
from ..kernels.dispatch import Dispatcher
from .linear_plan import LinearPlan
from .report import Report

ROWS = (4096, 32_768)
"""Tokens the report looks at: a 1024 x 1024 image, and a few seconds of video."""


def linear_report(
    node: str,
    plan: LinearPlan,
    dispatcher: Dispatcher,
    device: str,
    dtype: Any,
    groups: dict[str, int | None],
) -> Report:
    """The report of a routed model.

    Args:
        device, dtype: what the linears will run on. groups: rotation group of each routed layer.
    """
    shapes = Counter((layer.n, layer.k, groups[layer.name]) for layer in plan.routed)
    rows = [
        _row(dispatcher, LinearRequest(device, dtype, m, n, k, group), count)
        for (n, k, group), count in shapes.most_common()
        for m in ROWS
    ]
    reasons = Counter(keep.reason for keep in plan.kept)
    refusals = _refusals(dispatcher, device, dtype, shapes)
    split = dispatcher.settings.split
    summary = {
        "mode": split.mode,
        "max_rows": split.max_rows,
        "min_out_features": split.min_out_features,
        "backend": dispatcher.settings.backend,
        "layers_routed": len(plan.routed),
        "layers_kept": len(plan.kept),
        "kept_reasons": dict(reasons),
        "shapes": rows,
        "refusals": refusals,
    }
    lines = [f"{len(plan.routed)} int8 layers run through the dispatcher, mode {split.mode}"]
    lines += [
        f"  {row['layers']} x N={row['n']} K={row['k']}, M={row['m']}: {row['backend']}, "
        f"{row['rows_per_call']} rows a call"
        for row in rows
    ]
    lines += [f"not used, {name}: {reason}" for name, reason in refusals.items()]
    lines += [f"kept {count} x {reason}" for reason, count in reasons.items()]
    lines += [f"note: {note}" for note in plan.notes]
    layers = tuple({"name": layer.name, "shape": [layer.n, layer.k]} for layer in plan.routed)
    return Report(node, summary, layers, plan.notes, "\n".join(lines))


def _row(dispatcher: Dispatcher, request: LinearRequest, count: int) -> dict[str, Any]:
    row: dict[str, Any] = {"layers": count, "m": request.m, "n": request.n, "k": request.k}
    try:
        candidate = dispatcher.decide(request).candidate
    except NoBackendError:
        return {**row, "backend": "none can run it", "rows_per_call": 0}
    return {
        **row,
        "backend": candidate.backend.name,
        "rows_per_call": min(candidate.rows, request.m),
    }


def _refusals(
    dispatcher: Dispatcher, device: str, dtype: Any, shapes: Iterable[tuple[int, int, int | None]]
) -> dict[str, str]:
    found: dict[str, str] = {}
    for n, k, group in shapes:
        request = LinearRequest(device, dtype, ROWS[0], n, k, group)
        found |= dispatcher.candidates(request)[1]
    return found
