"""The node that quantizes a loaded MODEL."""

from __future__ import annotations

from typing import Any

from ..quant.families import preset_names
from ..quant.formats import FORMATS, ROTATION_GROUPS
from ..quant.report import plain_report
from ..quant.settings import CACHES, settings_from
from .result import model_result


class LeanDiTQuantizeModel:
    """Quantize Model, INT8/INT4 ConvRot."""

    CATEGORY = "LeanDiT"
    DESCRIPTION = (
        "Quantizes a loaded diffusion model to 8 or 4 bits: quantized layers take a half or a "
        "quarter of the memory and run on integer tensor cores. Works on the MODEL as it is in the graph, "
        "with its LoRAs. The input MODEL stays unchanged."
    )
    FUNCTION = "quantize"
    RETURN_TYPES = ("MODEL", "STRING")
    RETURN_NAMES = ("model", "report")
    OUTPUT_TOOLTIPS = (
        "The quantized model. Use it like any MODEL; LoRAs may follow.",
        "What was quantized, what was kept and why, sizes and errors, as text.",
    )
    SEARCH_ALIASES = ("int8", "int4", "convrot", "quantize", "w8a8", "w4a8", "quarot")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "The loaded diffusion model. It stays unchanged."}),
                "format": (
                    list(FORMATS),
                    {
                        "default": "int8_convrot",
                        "tooltip": "Number format of the weights. "
                        + ". ".join(f"{spec.name}: {spec.summary}" for spec in FORMATS.values())
                        + ".",
                    },
                ),
                "group_size": (
                    ["auto", *map(str, ROTATION_GROUPS)],
                    {
                        "default": "auto",
                        "tooltip": "Columns rotated together (16, 64 or 256); larger spreads "
                        "outliers better. auto: the largest that divides each layer's width. "
                        "A fixed size keeps layers it does not divide in 16 bit.",
                    },
                ),
                "preset": (
                    list(preset_names()),
                    {
                        "default": "auto",
                        "tooltip": "Which layers to quantize. auto: the repeated blocks, with what "
                        "is known of the recognised model family; embedders, final layers and "
                        "modulation stay in 16 bit. none: every layer. A family name: its rules.",
                    },
                ),
                "include": (
                    "STRING",
                    {
                        "default": "",
                        "multiline": True,
                        "placeholder": "include: one pattern a line, e.g. *img_mod*",
                        "tooltip": "Layers to quantize although the preset keeps them: one pattern "
                        "a line, such as *img_mod* or re:blocks\\.[0-3]\\. Empty: none.",
                    },
                ),
                "exclude": (
                    "STRING",
                    {
                        "default": "",
                        "multiline": True,
                        "placeholder": "exclude: one pattern a line, e.g. double_blocks.0.*",
                        "tooltip": "Layers to keep in 16 bit: one pattern a line, such as "
                        "double_blocks.0.* or re:mlp. Wins over include. Empty: none.",
                    },
                ),
                "loras": (
                    ["bake", "keep"],
                    {
                        "default": "bake",
                        "tooltip": "LoRAs already on the model. bake: merge them in full precision "
                        "before quantizing (best quality, no cost per step). keep: leave them to "
                        "ComfyUI, which merges them into the quantized weights.",
                    },
                ),
                "device": (
                    ["auto", "gpu", "cpu"],
                    {
                        "default": "auto",
                        "tooltip": "Where to quantize, one layer at a time. auto: the GPU if there "
                        "is one. gpu needs room for about 4 float copies of the largest layer.",
                    },
                ),
                "enabled": (
                    "BOOLEAN",
                    {
                        "default": True,
                        "tooltip": "Off: pass the model through exactly as it came.",
                    },
                ),
            },
            "optional": {
                "cache": (
                    list(CACHES),
                    {
                        "default": "auto",
                        "tooltip": "Where the quantized weights are held. memory: in RAM, made anew "
                        "in every session. disk: in a file (up to 64 GB in all, see leandit cache); the "
                        "next session with the same model, LoRAs and settings reads it instead of "
                        "quantizing. auto: disk where ComfyUI's dynamic VRAM is on, which would "
                        "otherwise hold the weights in RAM twice.",
                    },
                ),
            },
        }

    def quantize(
        self,
        model: Any,
        format: str,
        group_size: str,
        preset: str,
        include: str,
        exclude: str,
        loras: str,
        device: str,
        enabled: bool,
        cache: str = "auto",
    ) -> dict[str, Any]:
        if not enabled:
            report = plain_report("LeanDiTQuantizeModel", "switched off: the model is unchanged")
            return model_result(model, report)
        settings = settings_from(format, group_size, preset, include, exclude)
        from ..host.quantize import quantize_model  # ComfyUI is imported only when a node runs

        return model_result(*quantize_model(model, settings, loras, device, cache))
