"""The user's wishes for a quantization, checked once and then passed as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import SettingsError
from .families import GENERAL_PRESETS, family_named
from .formats import ROTATION_GROUPS, Format, format_named
from .patterns import Pattern, parse_patterns

CACHES = ("auto", "memory", "disk")
"""Where quantized weights may be held."""


@dataclass(frozen=True)
class QuantSettings:
    """Checked settings; make them with `settings_from`.

    group_size None means auto: the largest group that divides K, per layer.
    preset is "auto", "none" or a family name.
    """

    format: Format
    group_size: int | None
    preset: str
    include: tuple[Pattern, ...]
    exclude: tuple[Pattern, ...]


def settings_from(
    format: str = "int8_convrot",
    group_size: str = "auto",
    preset: str = "auto",
    include: str = "",
    exclude: str = "",
) -> QuantSettings:
    """Check the plain strings a node, a prompt or the command line gives.

    Raises:
        SettingsError: for an unknown format, group size or preset, or a malformed pattern.
    """
    if preset not in GENERAL_PRESETS:
        family_named(preset)
    return QuantSettings(
        format=format_named(format),
        group_size=_group(str(group_size)),
        preset=preset,
        include=parse_patterns(include, "include"),
        exclude=parse_patterns(exclude, "exclude"),
    )


def _group(value: str) -> int | None:
    if value == "auto":
        return None
    if value not in {str(group) for group in ROTATION_GROUPS}:
        choices = ", ".join(("auto", *map(str, ROTATION_GROUPS)))
        raise SettingsError(f"unknown group_size {value!r}; valid sizes: {choices}")
    return int(value)
