"""What is known about single model families, as data.

A rule decides a layer before the architecture-agnostic rule of `towers` does. image_models are the
values of ComfyUI's `unet_config["image_model"]` of the models it builds for the family.

Sources: the keep lists of convert_to_quant (constants.py) and ComfyUI-INT8-Fast
(int8_unet_loader.py), the published MiniMax H3 INT8 file, SGLang's notes on it, and parameter
counts from the architectures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import SettingsError

GENERAL_PRESETS = ("auto", "none")


@dataclass(frozen=True)
class Rule:
    """Keep or quantize the layers a glob matches; blocks limits it to towers of that length."""

    pattern: str
    action: Literal["keep", "quantize"]
    reason: str
    blocks: int | None = None


@dataclass(frozen=True)
class Family:
    """A model family and its rules; the first rule that matches decides."""

    name: str
    image_models: tuple[str, ...]
    rules: tuple[Rule, ...]


FAMILIES: tuple[Family, ...] = (
    Family(
        "flux",
        ("flux",),
        (
            Rule(
                "double_blocks.*_mod.lin",
                "keep",
                "modulation: one row per image, so no speed to win; its error moves every token",
            ),
            Rule(
                "single_blocks.*.modulation.lin",
                "keep",
                "modulation: one row per image, so no speed to win; its error moves every token",
            ),
        ),
    ),
    Family(
        "flux2",
        ("flux2",),
        (
            Rule(
                "*_stream_modulation*.lin",
                "keep",
                "one modulation shared by all blocks: its error enters 56 times",
            ),
        ),
    ),
    Family(
        "wan",
        ("wan2.1",),
        (
            Rule(
                "time_projection.*",
                "keep",
                "makes the modulation of all blocks; kept by every published Wan converter",
            ),
            Rule(
                "*face_adapter.*",
                "keep",
                "Wan Animate's face adapter: sensitive and small, kept by convert_to_quant",
            ),
            Rule(
                "*audio_injector.*",
                "keep",
                "Wan S2V's audio injector: sensitive and small, kept by convert_to_quant",
            ),
        ),
    ),
    Family(
        "qwen_image",
        ("qwen_image",),
        (
            Rule(
                "transformer_blocks.0.*_mod.1",
                "keep",
                "modulation of the first block: sensitive, kept by convert_to_quant",
            ),
            Rule(
                "transformer_blocks.*_mod.1",
                "quantize",
                "modulation is 6.8 of the 20 billion weights; 16-bit it alone fills half a card",
            ),
        ),
    ),
    Family(
        "z_image",
        ("lumina2", "zimage_pixel"),
        (
            Rule(
                "*_refiner.*",
                "keep",
                "two small refiners before the main blocks, kept by every published converter",
            ),
            Rule(
                "layers.*.adaLN_modulation.*",
                "keep",
                "modulation: K is 256 and one row per image, so there is nothing to win",
            ),
        ),
    ),
    Family(
        "hunyuan_video",
        ("hunyuan_video",),
        (
            Rule(
                "txt_in.*",
                "keep",
                "the text refiner: runs once a step on a few hundred tokens",
            ),
            Rule(
                "*_mod.lin",
                "keep",
                "modulation: one row per video, so no speed to win; its error moves every token",
            ),
        ),
    ),
    Family(
        "krea2",
        ("krea2",),
        (
            Rule(
                "txtfusion.*",
                "keep",
                "fuses the text layers: 4 small blocks beside 28 large ones",
            ),
            Rule(
                "tproj.*",
                "keep",
                "makes the modulation shared by all blocks",
            ),
        ),
    ),
    Family(
        "minimax_h3",
        ("minimax_h3",),
        (
            Rule(
                "token_refiner.*",
                "keep",
                "the text refiner: runs once per prompt, not once per step",
            ),
            Rule(
                "blocks.*.adaln_proj.linear",
                "quantize",
                "adaLN is 13 of the 32 billion weights (K=2688, so group 64); "
                "the published INT8 file quantizes it the same way",
            ),
        ),
    ),
    Family(
        "ltxv",
        ("ltxv", "ltxav"),
        (
            Rule("*to_gate_logits", "keep", "attention gates: one output per head"),
            *(
                Rule(
                    f"transformer_blocks.{index}.*",
                    "keep",
                    "first or last two blocks of LTX-2: most sensitive, kept by convert_to_quant",
                    blocks=48,
                )
                for index in (0, 1, 46, 47)
            ),
        ),
    ),
    Family(
        "chroma",
        ("chroma", "chroma_radiance"),
        (
            Rule(
                "distilled_guidance_layer.*",
                "keep",
                "makes the modulation of all blocks; kept by every published converter",
            ),
            Rule("nerf_*", "keep", "Chroma Radiance's pixel head: runs per pixel on tiny K"),
        ),
    ),
)


def preset_names() -> tuple[str, ...]:
    """Every valid value of the preset setting."""
    return GENERAL_PRESETS + tuple(family.name for family in FAMILIES)


def family_of(image_model: str | None) -> Family | None:
    """The family of ComfyUI's `unet_config["image_model"]`, or None if it is not in the table."""
    return next((family for family in FAMILIES if image_model in family.image_models), None)


def family_named(name: str) -> Family:
    """The family called `name`.

    Raises:
        SettingsError: if there is none; the message lists the valid presets.
    """
    for family in FAMILIES:
        if family.name == name:
            return family
    raise SettingsError(f"unknown preset {name!r}; valid presets: {', '.join(preset_names())}")
