"""The node that loads a quantized file of any known format."""

from __future__ import annotations

from typing import Any

from .result import model_result


class LeanDiTLoadModel:
    """Load Quantized Model."""

    CATEGORY = "LeanDiT"
    DESCRIPTION = (
        "Loads a diffusion model file whatever tool quantized it (ComfyUI's formats, INT8-Fast, "
        "bitsandbytes, optimum-quanto, SDNQ, LightX2V, torchao, compressed-tensors, diffusers "
        "names), in the numbers the file holds, or says in words why not. Never noise."
    )
    FUNCTION = "load"
    RETURN_TYPES = ("MODEL", "STRING")
    RETURN_NAMES = ("model", "report")
    OUTPUT_TOOLTIPS = (
        "The loaded model. Use it like any MODEL; LoRAs may follow.",
        "Who wrote the file, in which format, what it is held as, and what was ignored, as text.",
    )
    SEARCH_ALIASES = ("int8", "int4", "nf4", "bnb", "quanto", "sdnq", "convrot", "load quantized")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model_name": (
                    _names(),
                    {
                        "tooltip": "A file in models/diffusion_models, quantized or not. For a "
                        "sharded model choose any shard; the index beside it is used."
                    },
                ),
                "weights": (
                    ["as_stored", "native"],
                    {
                        "default": "as_stored",
                        "tooltip": "as_stored: keep the file's numbers, nothing is lost; formats "
                        "ComfyUI lacks are decoded in every call, at 16-bit speed. native: convert "
                        "those to int8_convrot or w4a8_convrot; the report states the error in dB.",
                    },
                ),
                "legacy_rotation": (
                    ["auto", "none", "regular_256", "sylvester_128"],
                    {
                        "default": "auto",
                        "tooltip": "Only for int8 files that do not record whether they are "
                        "rotated. auto: tell it from the numbers, refuse if unclear. none: LightX2V "
                        "and most tools. sylvester_128: ComfyUI-INT8-Fast of April 2026.",
                    },
                ),
            }
        }

    def load(self, model_name: str, weights: str, legacy_rotation: str) -> dict[str, Any]:
        from ..host.load import load_model  # ComfyUI is imported only when a node runs
        from ..host.model_files import model_path

        return model_result(*load_model(model_path(model_name), weights, legacy_rotation))


def _names() -> list[str]:
    """ComfyUI's list; empty where there is no ComfyUI."""
    try:
        from ..host.model_files import model_names
    except ImportError:
        return []
    return model_names()
