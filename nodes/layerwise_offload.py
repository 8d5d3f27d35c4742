"""The node that streams what does not fit on the card."""

from __future__ import annotations

from typing import Any

from ..quant.errors import SettingsError
from ..quant.offload_settings import LORAS, MODES, PREFETCHES, offload_settings_from
from .result import model_result

MOST_FREE_GB = 1024.0


class LeanDiTLayerwiseOffload:
    """Layerwise Offload."""

    CATEGORY = "LeanDiT"
    DESCRIPTION = (
        "For models that do not fit on the card: copies the blocks that ComfyUI leaves in main memory "
        "ahead of their use, while others are computed, and says what that costs. Keeps out where "
        "ComfyUI streams by itself. The picture is the same bit for bit; the input MODEL stays "
        "unchanged."
    )
    FUNCTION = "offload"
    RETURN_TYPES = ("MODEL", "STRING")
    RETURN_NAMES = ("model", "report")
    OUTPUT_TOOLTIPS = (
        "The model that streams. LoRAs may follow.",
        "Who manages the model's memory and what will stream, as text. After each run the node shows "
        "what was measured.",
    )
    SEARCH_ALIASES = ("offload", "low vram", "stream", "memory", "prefetch", "vram")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": (
                    "MODEL",
                    {"tooltip": "Any diffusion model, quantized or not. It stays unchanged."},
                ),
                "mode": (
                    list(MODES),
                    {
                        "default": "auto",
                        "tooltip": "auto: measures a few steps without and with streaming, and "
                        "switches itself off if it saves less than 2 % of a step. on: streams from "
                        "the first step. report: measures and changes nothing. off: the model as it is.",
                    },
                ),
                "resident": (
                    "STRING",
                    {
                        "default": "auto",
                        "tooltip": "Blocks that stay on the card. auto: what ComfyUI keeps there. A "
                        "number from 0: so many, evenly spaced, fewer if they do not fit.",
                    },
                ),
                "prefetch": (
                    list(PREFETCHES),
                    {
                        "default": "auto",
                        "tooltip": "Blocks copied ahead, 1 to 4. Each takes the memory of one more "
                        "block. auto: 1, which is enough unless previews or a slow disk hold up the "
                        "processor.",
                    },
                ),
                "keep_free_gb": (
                    "FLOAT",
                    {
                        "default": 0.0,
                        "min": 0.0,
                        "max": MOST_FREE_GB,
                        "step": 0.1,
                        "tooltip": "Memory of the card, in GiB, to leave to other programs, 0 to 1024. "
                        "Works under dynamic VRAM, too.",
                    },
                ),
                "lora": (
                    list(LORAS),
                    {
                        "default": "as_is",
                        "tooltip": "as_is: ComfyUI applies LoRAs to streamed weights in every step. "
                        "bake: merges them once, in a copy of those weights in main memory; faster "
                        "steps for more memory.",
                    },
                ),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, resident: Any = "auto") -> bool | str:
        """A wrong number is answered before anything is loaded."""
        if isinstance(resident, list):  # connected: the value is known later
            return True
        try:
            offload_settings_from(resident=str(resident))
        except SettingsError as error:
            return str(error)
        return True

    def offload(
        self,
        model: Any,
        mode: str,
        resident: str,
        prefetch: str,
        keep_free_gb: float,
        lora: str,
        unique_id: str | None = None,
    ) -> dict[str, Any]:
        settings = offload_settings_from(mode, resident, prefetch, keep_free_gb, lora)
        # ComfyUI is imported only when a node runs.
        from ..host.offload import layerwise_offload
        from ..host.progress import show_text

        return model_result(*layerwise_offload(model, settings, show_text(unique_id)))
