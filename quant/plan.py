"""The plan: for every Linear of a model, the format and rotation group, or kept and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from . import towers
from .errors import NothingSelectedError
from .families import Family, family_named
from .formats import ROTATION_GROUPS, Format
from .patterns import unmatched
from .settings import QuantSettings

SIZE_READ_IN_BLOCKS = ("*transformer_blocks.0.attn2.to_k",)
"""Layers inside blocks from whose width ComfyUI reads a model's size (LTX, SD). Outside of blocks
it may be any. Source: `.shape[1]` in ComfyUI's model_detection.py."""

SIZE_READ_REASON = (
    "ComfyUI reads the model's size from this weight's shape; stored in 4 bits it has another"
)


@dataclass(frozen=True)
class Layer:
    """What the plan needs to know of one Linear.

    name is relative to the diffusion model; n, k are out_features, in_features; nbytes is the
    size of its stored weight; packed says in words why the weight is not a plain float matrix
    ("already int8_tensorwise"), or None; barred says why it must not be replaced although it is
    one (a LoRA that changes its shape), or None; dtype is that of the weight as it is held.
    """

    name: str
    n: int
    k: int
    nbytes: int
    packed: str | None = None
    barred: str | None = None
    dtype: str = ""


@dataclass(frozen=True)
class Quantize:
    """A layer that will be quantized; group_size None means not rotated."""

    layer: Layer
    format: Format
    group_size: int | None
    reason: str


@dataclass(frozen=True)
class Keep:
    """A layer left as it is."""

    layer: Layer
    reason: str


Decision = Quantize | Keep


@dataclass(frozen=True)
class Plan:
    """Decisions in the model's order, and the notes the report must show."""

    decisions: tuple[Decision, ...]
    family: str | None
    notes: tuple[str, ...]

    @property
    def selected(self) -> tuple[Quantize, ...]:
        """The layers that will be quantized."""
        return tuple(d for d in self.decisions if isinstance(d, Quantize))

    def with_note(self, note: str) -> Plan:
        """The same plan with one more note."""
        return replace(self, notes=(*self.notes, note))

    @property
    def kept(self) -> tuple[Keep, ...]:
        """The layers left as they are."""
        return tuple(d for d in self.decisions if isinstance(d, Keep))


def make_plan(layers: Sequence[Layer], settings: QuantSettings, family: Family | None) -> Plan:
    """Decide every layer.

    Order of precedence: what cannot be quantized, exclude, include, the family's rules, the
    architecture-agnostic rule. preset "none" drops the last two; a family name replaces the
    family that was recognised.

    Args:
        layers: every Linear of the model.
        settings: the user's wishes.
        family: the recognised family, or None.

    Raises:
        NothingSelectedError: if no layer is selected, unless the layers these settings ask for
            are quantized already; the message counts the layers by reason.
    """
    recognised = family
    if settings.preset not in ("auto", "none"):
        family = family_named(settings.preset)
    positions = towers.locate(layer.name for layer in layers)
    decisions = tuple(_decide(layer, positions[layer.name], settings, family) for layer in layers)
    plan = Plan(decisions, family.name if family else None, _notes(layers, settings))
    if recognised is not None and family is not recognised:
        plan = plan.with_note(
            f"preset {settings.preset!r} is used, but the model is recognised as {recognised.name!r}"
        )
    quantized_already = (
        _decide(replace(layer, packed=None), positions[layer.name], settings, family)
        for layer in layers
        if layer.packed
    )
    if not plan.selected and not any(isinstance(d, Quantize) for d in quantized_already):
        raise NothingSelectedError(_nothing_selected(plan))
    return plan


def quantized_before_note(count: int, was: str) -> str:
    """What a report says of layers that were quantized once already.

    Args:
        was: their format until now.
    """
    return (
        f"{count} layers were quantized before ({was}); they are decoded and quantized anew, which "
        "adds its error to theirs"
    )


def rotation_group(k: int, settings: QuantSettings) -> tuple[int | None, str | None]:
    """The rotation group for K columns and None, or None and why there is none."""
    if settings.group_size is not None:
        if k % settings.group_size:
            return None, f"group {settings.group_size} does not divide K={k}"
        return settings.group_size, None
    for group in ROTATION_GROUPS:
        if k % group == 0:
            return group, None
    groups = ", ".join(map(str, ROTATION_GROUPS))
    return None, f"no rotation group of {groups} divides K={k}"


def _decide(
    layer: Layer, position: towers.Position, settings: QuantSettings, family: Family | None
) -> Decision:
    unable = layer.packed or layer.barred
    if unable is not None:
        return Keep(layer, unable)
    keep, reason = _wanted(layer.name, position, settings, family)
    if keep:
        return Keep(layer, reason)
    group = None
    if settings.format.rotated:
        group, problem = rotation_group(layer.k, settings)
        if problem is not None:
            return Keep(layer, problem)
    if settings.format.weight_bits < 8 and gives_the_models_size(
        layer.name, position.tower is not None
    ):
        return Keep(layer, SIZE_READ_REASON)
    if layer.k % settings.format.k_multiple:
        multiple = settings.format.k_multiple
        problem = f"{settings.format.name} needs K divisible by {multiple}, K={layer.k}"
        return Keep(layer, problem)
    return Quantize(layer, settings.format, group, reason)


def gives_the_models_size(name: str, in_blocks: bool) -> bool:
    """Whether ComfyUI reads the model's size from this layer's stored shape.

    Args:
        in_blocks: whether the layer is in one of the model's repeated blocks.
    """
    return not in_blocks or any(fnmatchcase(name, p) for p in SIZE_READ_IN_BLOCKS)


def _wanted(
    name: str, position: towers.Position, settings: QuantSettings, family: Family | None
) -> tuple[bool, str]:
    """Whether to keep the layer, and why."""
    for pattern in settings.exclude:
        if pattern.matches(name):
            return True, f"excluded by {pattern.text!r}"
    for pattern in settings.include:
        if pattern.matches(name):
            return False, f"included by {pattern.text!r}"
    if settings.preset == "none":
        return False, "preset none takes every layer"
    for rule in family.rules if family else ():
        fits = rule.blocks is None or rule.blocks == position.blocks
        if fits and fnmatchcase(name, rule.pattern):
            return rule.action == "keep", rule.reason
    keep = towers.why_keep(position)
    if keep is not None:
        return True, keep
    return False, f"one of {position.blocks} repeated blocks"


def _notes(layers: Sequence[Layer], settings: QuantSettings) -> tuple[str, ...]:
    names = tuple(layer.name for layer in layers)
    notes = []
    for setting in ("include", "exclude"):
        for text in unmatched(getattr(settings, setting), names):
            example = names[len(names) // 2] if names else "none"
            notes.append(
                f"{setting} pattern {text!r} matches no layer (a layer here is called {example!r})"
            )
    if settings.format.experimental:
        notes.append(
            f"{settings.format.name} is experimental: "
            f"its {settings.format.activation_bits}-bit activations cost visible quality"
        )
    return tuple(notes)


def _nothing_selected(plan: Plan) -> str:
    if not plan.decisions:
        return "the model has no Linear layers, so there is nothing to quantize"
    counts: dict[str, list[str]] = {}
    for decision in plan.kept:
        counts.setdefault(decision.reason, []).append(decision.layer.name)
    reasons = "; ".join(
        f"{len(names)} x {reason} (such as {names[0]!r})" for reason, names in counts.items()
    )
    notes = "".join(f"; {note}" for note in plan.notes)
    if any(reason.startswith("excluded by") for reason in counts):
        remedy = "Make the exclude patterns narrower or remove them; exclude wins over include"
    else:
        remedy = "Use preset 'none' or an include pattern to choose layers yourself"
    return f"no layer is selected: {reasons}{notes}. {remedy}"
