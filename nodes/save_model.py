"""The node that saves a quantized MODEL as a native file."""

from __future__ import annotations

from typing import Any

from .result import report_result


class LeanDiTSaveModel:
    """Save Quantized Model."""

    CATEGORY = "LeanDiT"
    DESCRIPTION = (
        "Saves the diffusion model in ComfyUI's own quantized format, LoRAs merged, into the output "
        "folder. The file is read back and compared before it gets its name; a ComfyUI without "
        "this package loads it."
    )
    FUNCTION = "save"
    OUTPUT_NODE = True
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("report",)
    OUTPUT_TOOLTIPS = ("Where the file is, its size, and what merging LoRAs cost, as text.",)
    SEARCH_ALIASES = ("save int8", "save quantized", "export")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "The model to save. It stays unchanged."}),
                "filename_prefix": (
                    "STRING",
                    {
                        "default": "diffusion_models/leandit",
                        "tooltip": "Name of the file in the output folder, without .safetensors; "
                        "may begin with subfolders. No number is added.",
                    },
                ),
                "overwrite": (
                    "BOOLEAN",
                    {
                        "default": False,
                        "tooltip": "Off: stop if the file exists. On: replace it once the new file "
                        "is complete and checked.",
                    },
                ),
            }
        }

    def save(self, model: Any, filename_prefix: str, overwrite: bool) -> dict[str, Any]:
        from ..host.model_files import output_path  # ComfyUI is imported only when a node runs
        from ..host.save import save_model

        return report_result(save_model(model, output_path(filename_prefix), overwrite))
