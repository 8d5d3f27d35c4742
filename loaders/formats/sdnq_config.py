"""SDNQ's quantization_config.json: the only place where its scheme is recorded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from ...kernels.hadamard import is_rotation_group
from ...quant.stored.scheme import Rotation
from .layer import FileFacts, LayerTensors
from .marker import bare

FIRST_REGULAR = (0, 2, 0)
"""First version that uses the regular Hadamard matrix where it exists; 0.1.9 had Sylvester's only."""

MIN_GROUP = 4


def config_of(file: FileFacts) -> Mapping[str, Any] | None:
    """SDNQ's settings beside the file, or None."""
    for content in (
        file.side.get("quantization_config.json", {}),
        file.side.get("config.json", {}).get("quantization_config", {}),
    ):
        if isinstance(content, Mapping) and content.get("quant_method") == "sdnq":
            return content
    return None


def of_layer(config: Mapping[str, Any], layer: str) -> dict[str, Any]:
    """The settings of one layer, with what the file-wide tables change for it."""
    settings = dict(config)
    by_pattern = config.get("modules_quant_config")
    if isinstance(by_pattern, Mapping):
        for pattern, changes in by_pattern.items():
            if isinstance(changes, Mapping) and _matches(pattern, layer):
                settings |= changes
    by_dtype = config.get("modules_dtype_dict")
    if isinstance(by_dtype, Mapping):
        for dtype, patterns in by_dtype.items():
            if isinstance(patterns, list) and any(_matches(p, layer) for p in patterns):
                settings["weights_dtype"] = dtype
    return settings


def _matches(pattern: object, layer: str) -> bool:
    """SDNQ's patterns: a whole name, one part of the path, a beginning after a dot, or a glob."""
    name = f"{bare(layer)}.weight"
    if not isinstance(pattern, str):
        return False
    if pattern.startswith("."):
        return name.startswith(pattern[1:])
    if "*" in pattern:
        return fnmatchcase(name, pattern)
    return pattern == name or pattern in name.split(".")


def rotation_of(
    layer: LayerTensors, settings: Mapping[str, Any] | None, choice: str, k: int
) -> tuple[Rotation | None, str]:
    """The rotation of a layer, and a note on where that is known from.

    Args:
        settings: of this layer, None where there is no config. choice: the file's
            `legacy_rotation`, used only then.

    Raises:
        LayerFault: if it cannot be known.
    """
    if settings is None:
        if choice == "none":
            return None, "rotation not recorded, taken as none"
        if choice in ("regular_256", "sylvester_128"):
            kind, limit = choice.split("_")
            return _fitting(int(limit), k, kind), f"rotation not recorded, taken as {choice}"
        raise layer.fault(
            "is SDNQ's, and without its quantization_config.json nothing says whether it is rotated",
            "put quantization_config.json beside the file, or set legacy_rotation",
        )
    if not settings.get("use_hadamard"):
        return None, ""
    version = _version(settings.get("sdnq_version"))
    limit = settings.get("hadamard_group_size", 256)
    if not isinstance(limit, int) or limit < MIN_GROUP:
        raise layer.fault(f"its hadamard_group_size is {limit!r}, expected a power of 2")
    if version is None:
        raise layer.fault(
            f"its sdnq_version is {settings.get('sdnq_version')!r}, which does not tell the rotation"
        )
    kind = "regular" if version >= FIRST_REGULAR else "sylvester"
    return _fitting(limit, k, kind), ""


def _version(text: object) -> tuple[int, ...] | None:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text) if isinstance(text, str) else None
    return None if found is None else tuple(int(part) for part in found.groups())


def _fitting(limit: int, k: int, kind: str) -> Rotation | None:
    """The group SDNQ takes: the power of 2 above K or the limit, halved until it divides K."""
    group = 1 << (min(k, limit) - 1).bit_length()
    while group >= MIN_GROUP and k % group:
        group //= 2
    if group < MIN_GROUP:
        return None
    if kind == "regular" and not is_rotation_group(group):
        kind = "sylvester"
    return Rotation(kind, group)
