"""The node that chooses attention kernels."""

from __future__ import annotations

from typing import Any

from ..kernels.attention.names import DENSE, SPARSE, dense_name, sparse_name
from ..kernels.attention.schedule import Schedule, parse_layers, parse_tau_profile
from ..kernels.attention.select import AttentionSettings
from ..quant.errors import SettingsError
from .result import model_result

MOST_TOKENS = 1 << 20
CHECKS = ("fallback", "report", "off")


class LeanDiTAttention:
    """Attention Selector."""

    CATEGORY = "LeanDiT"
    DESCRIPTION = (
        "Chooses the attention kernel of a model: dense first, then sparse if you like, by step and "
        "layer. Says what really ran, checks the result against torch's attention, and drops a kernel "
        "that is broken instead of giving a black picture. Other models are not affected."
    )
    FUNCTION = "select"
    RETURN_TYPES = ("MODEL", "STRING")
    RETURN_NAMES = ("model", "report")
    OUTPUT_TOOLTIPS = (
        "The model with its attention chosen. Works with LoRAs and quantized models.",
        "What was set, and which kernels cannot run here and why. What ran stands in the log after "
        "each run, and in the node.",
    )
    SEARCH_ALIASES = ("attention", "sage", "flash attention", "sol attention", "sparse", "sparge")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "The model. It stays unchanged."}),
                "dense": (
                    list(DENSE),
                    {
                        "default": "auto",
                        "tooltip": "Attention to all tokens. auto: flash attention where it is "
                        "installed and fits, else as before. keep: as before. sdpa: torch's. fa: "
                        "FlashAttention 2-4. sage_attn, sage3, kitchen_int8: faster, in 8 or 4 bit.",
                    },
                ),
                "sparse": (
                    list(SPARSE),
                    {
                        "default": "none",
                        "tooltip": "Attention to the blocks of tokens that matter, for long videos, "
                        "after the dense part. none: dense all the way. sol_attn: the rest counts as "
                        "averages (heads of 128 only). sparge: the rest is left out.",
                    },
                ),
                "start_percent": (
                    "FLOAT",
                    {
                        "default": 0.2,
                        "min": 0.0,
                        "max": 1.0,
                        "step": 0.01,
                        "tooltip": "Part of the sampling, 0 to 1, before which attention is dense.",
                    },
                ),
                "end_percent": (
                    "FLOAT",
                    {
                        "default": 1.0,
                        "min": 0.0,
                        "max": 1.0,
                        "step": 0.01,
                        "tooltip": "Part of the sampling, 0 to 1, after which attention is dense again.",
                    },
                ),
                "dense_steps": (
                    "INT",
                    {
                        "default": -1,
                        "min": -1,
                        "max": 10_000,
                        "tooltip": "First steps of each run that are dense, 0 to 10000, beside "
                        "start_percent. -1: by start_percent alone.",
                    },
                ),
                "dense_layers": (
                    "STRING",
                    {
                        "default": "0,1",
                        "tooltip": "Layers that are always dense: indices and ranges, from the end "
                        "with a minus, such as 0,1,-1 or 0-3,-2--1. Empty: none.",
                    },
                ),
                "min_tokens": (
                    "INT",
                    {
                        "default": 12_288,
                        "min": 0,
                        "max": MOST_TOKENS,
                        "tooltip": "Attention over fewer tokens than this, 0 to 1048576, is dense: "
                        "there sparse is slower.",
                    },
                ),
                "tau": (
                    "FLOAT",
                    {
                        "default": 1.3,
                        "min": -10.0,
                        "max": 10.0,
                        "step": 0.05,
                        "tooltip": "sol_attn: threshold in deviations, -10 to 10. Higher is sparser, "
                        "faster and less exact: about 16 % of the blocks are exact at 1, 10 % at 1.3, "
                        "2 % at 2.",
                    },
                ),
                "sink_tokens": (
                    "INT",
                    {
                        "default": -1,
                        "min": -1,
                        "max": MOST_TOKENS,
                        "tooltip": "First tokens (text, references) that all others see exactly, 0 "
                        "to 1048576. -1: as many as the model says.",
                    },
                ),
                "on_unsupported": (
                    ["fallback", "error"],
                    {
                        "default": "fallback",
                        "tooltip": "Where the chosen kernel cannot run. fallback: another one runs, "
                        "and the report says why. error: stop, with the reason.",
                    },
                ),
                "check_quality": (
                    list(CHECKS),
                    {
                        "default": "fallback",
                        "tooltip": "Compare the first use of each kernel and shape with torch's "
                        "attention, on a slice. fallback: drop a kernel whose result is broken. "
                        "report: only say so. off: do not compare.",
                    },
                ),
            },
            "optional": {
                "tau_profile": (
                    "STRING",
                    {
                        "default": "",
                        "multiline": True,
                        "placeholder": "tau by layer, e.g. 39-42=0.9",
                        "tooltip": "sol_attn: other values of tau for some layers, one a line, such "
                        "as 39-42=0.9 or -1=0.5. Empty: tau everywhere.",
                    },
                ),
                "keep": (
                    "FLOAT",
                    {
                        "default": 0.5,
                        "min": 0.01,
                        "max": 1.0,
                        "step": 0.01,
                        "tooltip": "sparge: share of the blocks that are kept, 0.01 to 1.",
                    },
                ),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, dense: Any = None, sparse: Any = None) -> bool | str:
        """Lets API prompts use the names people and other tools write, such as FA3 or sage.

        An input that comes from another node is None here; it is checked when the node runs.
        """
        try:
            if dense is not None:
                dense_name(str(dense))
            if sparse is not None:
                sparse_name(str(sparse))
        except ValueError as error:
            return str(error)
        return True

    def select(
        self,
        model: Any,
        dense: str,
        sparse: str,
        start_percent: float,
        end_percent: float,
        dense_steps: int,
        dense_layers: str,
        min_tokens: int,
        tau: float,
        sink_tokens: int,
        on_unsupported: str,
        check_quality: str,
        tau_profile: str = "",
        keep: float = 0.5,
        unique_id: str | None = None,
    ) -> dict[str, Any]:
        if on_unsupported not in ("fallback", "error") or check_quality not in CHECKS:
            raise SettingsError(
                f"unknown on_unsupported {on_unsupported!r} or check_quality {check_quality!r}; "
                f"valid: fallback, error; {', '.join(CHECKS)}"
            )
        try:
            settings = AttentionSettings(
                dense=dense_name(dense),
                sparse=sparse_name(sparse),
                schedule=Schedule(
                    start_percent, end_percent, dense_steps, parse_layers(dense_layers), min_tokens
                ),
                tau=parse_tau_profile(tau, tau_profile),
                sink_tokens=sink_tokens,
                keep=keep,
                strict=on_unsupported == "error",
                check=check_quality,
            )
        except ValueError as error:
            raise SettingsError(str(error)) from error
        # ComfyUI is imported only when a node runs.
        from ..host.attention import attention_report, select_attention
        from ..host.progress import show_text

        chosen = select_attention(model, settings, show_text(unique_id))
        return model_result(chosen, attention_report(chosen, settings))
