"""Which int8 layers run through the dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import SettingsError
from .patterns import Pattern, parse_patterns, unmatched
from .plan import Keep, Layer

INT8 = "int8_tensorwise"


@dataclass(frozen=True)
class LinearFilters:
    """min_in_features, max_out_features: limits of K and N, None for no upper limit; include: if
    given, only layers that match; exclude: never those."""

    min_in_features: int = 0
    max_out_features: int | None = None
    include: tuple[Pattern, ...] = ()
    exclude: tuple[Pattern, ...] = ()


@dataclass(frozen=True)
class LinearPlan:
    """The layers to route, those left as they are with the reason, and notes for the report."""

    routed: tuple[Layer, ...]
    kept: tuple[Keep, ...]
    notes: tuple[str, ...]


def filters_from(
    min_in_features: int = 0, max_out_features: int = 0, include: str = "", exclude: str = ""
) -> LinearFilters:
    """Check the plain values a node or a prompt gives; max_out_features 0 means no limit.

    Raises:
        SettingsError: for a negative number or a malformed pattern.
    """
    if min_in_features < 0 or max_out_features < 0:
        raise SettingsError(
            f"min_in_features and max_out_features must not be negative, got {min_in_features} "
            f"and {max_out_features}"
        )
    return LinearFilters(
        min_in_features,
        max_out_features or None,
        parse_patterns(include, "include"),
        parse_patterns(exclude, "exclude"),
    )


def plan_linears(layers: Sequence[Layer], filters: LinearFilters) -> LinearPlan:
    """Decide every layer.

    Args:
        layers: every Linear; an int8 one has `INT8` in its `packed`.
    """
    decided = [(layer, _why_kept(layer, filters)) for layer in layers]
    names = tuple(layer.name for layer in layers)
    notes = tuple(
        f"{setting} pattern {text!r} matches no layer"
        for setting in ("include", "exclude")
        for text in unmatched(getattr(filters, setting), names)
    )
    return LinearPlan(
        routed=tuple(layer for layer, reason in decided if reason is None),
        kept=tuple(Keep(layer, reason) for layer, reason in decided if reason is not None),
        notes=notes,
    )


def _why_kept(layer: Layer, filters: LinearFilters) -> str | None:
    if layer.packed is None or INT8 not in layer.packed:
        return "not an int8 layer"
    for pattern in filters.exclude:
        if pattern.matches(layer.name):
            return f"excluded by {pattern.text!r}"
    if filters.include and not any(p.matches(layer.name) for p in filters.include):
        return "not included"
    if layer.k < filters.min_in_features:
        return f"K={layer.k} is below min_in_features {filters.min_in_features}"
    if filters.max_out_features is not None and layer.n > filters.max_out_features:
        return f"N={layer.n} is above max_out_features {filters.max_out_features}"
    return layer.barred
