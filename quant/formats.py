"""The formats a weight can be quantized to. Names put the weight first: w4a8 is 4-bit weights."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import SettingsError

ROTATION_GROUPS = (256, 64, 16)
"""Rotation groups in order of preference; a larger group spreads an outlier over more columns."""


INT8_LAYOUT = "TensorWiseINT8Layout"
"""comfy-kitchen's layout of int8 weights."""

DISPATCHED_INT8_LAYOUT = "LeanDiTInt8Layout"
"""The layout of `int8_layout` over the same bytes."""


@dataclass(frozen=True)
class Format:
    """One number format.

    native_format is the name ComfyUI stores in `comfy_quant`; layout is the comfy-kitchen class
    that runs it; k_multiple is what K must be divisible by besides the rotation group;
    sqnr_floor_db is the signal-to-noise ratio a Gaussian weight must keep.
    """

    name: str
    weight_bits: int
    activation_bits: int
    rotated: bool
    native_format: str
    layout: str
    k_multiple: int
    sqnr_floor_db: float
    experimental: bool
    summary: str


FORMATS: dict[str, Format] = {
    spec.name: spec
    for spec in (
        Format(
            name="int8_convrot",
            weight_bits=8,
            activation_bits=8,
            rotated=True,
            native_format="int8_tensorwise",
            layout=INT8_LAYOUT,
            k_multiple=1,
            sqnr_floor_db=39.0,
            experimental=False,
            summary="8-bit weights and activations, rotated: half the size, closest to the original",
        ),
        Format(
            name="int8",
            weight_bits=8,
            activation_bits=8,
            rotated=False,
            native_format="int8_tensorwise",
            layout=INT8_LAYOUT,
            k_multiple=1,
            sqnr_floor_db=38.0,
            experimental=False,
            summary="8-bit weights and activations without rotation: any K, worse with outliers",
        ),
        Format(
            name="w4a8_convrot",
            weight_bits=4,
            activation_bits=8,
            rotated=True,
            native_format="asym_w4a8_int8",
            layout="AsymW4A8Int8Layout",
            k_multiple=16,
            sqnr_floor_db=21.5,
            experimental=False,
            summary="4-bit weights, 8-bit activations, rotated: about 0.28 of the size",
        ),
        Format(
            name="w4a4_convrot",
            weight_bits=4,
            activation_bits=4,
            rotated=True,
            native_format="convrot_w4a4",
            layout="TensorCoreConvRotW4A4Layout",
            k_multiple=64,
            sqnr_floor_db=15.0,
            experimental=True,
            summary="experimental: 4-bit weights and activations; visibly changes the picture",
        ),
    )
}


def format_named(name: str) -> Format:
    """The format called `name`.

    Raises:
        SettingsError: if there is none; the message lists the valid names.
    """
    if name not in FORMATS:
        raise SettingsError(f"unknown format {name!r}; valid formats: {', '.join(FORMATS)}")
    return FORMATS[name]
