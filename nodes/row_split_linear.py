"""The node that chooses how int8 linears run."""

from __future__ import annotations

from typing import Any

from ..kernels.dispatch import AUTO, LinearSettings
from ..kernels.linear_dispatch import BACKEND_NAMES
from ..kernels.row_split import MODES, RowSplit
from ..quant.errors import SettingsError
from ..quant.linear_plan import filters_from
from .result import model_result

MOST = 1 << 20


class LeanDiTRowSplitLinear:
    """Row-Split Linear."""

    CATEGORY = "LeanDiT"
    DESCRIPTION = (
        "Runs the int8 layers of a model with the fastest kernels of this machine, in row chunks "
        "where that is faster. The result is the same bit for bit, whatever the chunks. Works on "
        "any int8 model, whoever quantized or loaded it. The input MODEL stays unchanged."
    )
    FUNCTION = "route"
    RETURN_TYPES = ("MODEL", "STRING")
    RETURN_NAMES = ("model", "report")
    OUTPUT_TOOLTIPS = (
        "The model whose int8 layers run through the chosen kernels. LoRAs may follow.",
        "What runs each layer shape, in how many rows a call, and what cannot run and why, as text.",
    )
    SEARCH_ALIASES = ("int8", "row split", "linear", "speed", "kernel", "stream-k")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "A model with int8 layers. It stays unchanged."}),
                "mode": (
                    list(MODES),
                    {
                        "default": "auto",
                        "tooltip": "auto: on a GPU, measure each layer shape once (a few "
                        "milliseconds) and keep the fastest kernel and chunk; on a CPU, the fastest "
                        "by rule. fixed: chunks of max_rows. off: leave the model as it is.",
                    },
                ),
                "max_rows": (
                    "INT",
                    {
                        "default": 8192,
                        "min": 1,
                        "max": MOST,
                        "tooltip": "Most rows (tokens) in one call, 1 to 1048576. Used in mode "
                        "fixed, and in auto where the kernel library cannot be asked. 8192 was best "
                        "on an RTX 4090.",
                    },
                ),
                "min_out_features": (
                    "INT",
                    {
                        "default": 8192,
                        "min": 1,
                        "max": MOST,
                        "tooltip": "Layers with fewer outputs than this, 1 to 1048576, are not "
                        "split: they got slower when measured.",
                    },
                ),
                "backend": (
                    [AUTO, *BACKEND_NAMES],
                    {
                        "default": AUTO,
                        "tooltip": "Which kernels. auto: the fastest that can run. A name: that one "
                        "first; if it cannot run, the report says why and the next one does.",
                    },
                ),
            },
            "optional": {
                "min_in_features": (
                    "INT",
                    {
                        "default": 0,
                        "min": 0,
                        "max": MOST,
                        "tooltip": "Leave layers with fewer inputs than this as they are, 0 to "
                        "1048576. 0: none.",
                    },
                ),
                "max_out_features": (
                    "INT",
                    {
                        "default": 0,
                        "min": 0,
                        "max": MOST,
                        "tooltip": "Leave layers with more outputs than this as they are, 0 to "
                        "1048576. 0: no limit.",
                    },
                ),
                "include": (
                    "STRING",
                    {
                        "default": "",
                        "multiline": True,
                        "placeholder": "include: one pattern a line; empty: all",
                        "tooltip": "Only these layers: one pattern a line, such as *mlp* or "
                        "re:blocks\\.[0-3]\\. Empty: every int8 layer.",
                    },
                ),
                "exclude": (
                    "STRING",
                    {
                        "default": "",
                        "multiline": True,
                        "placeholder": "exclude: one pattern a line",
                        "tooltip": "Layers to leave as they are: one pattern a line. Wins over "
                        "include. Empty: none.",
                    },
                ),
                "verbose": (
                    "BOOLEAN",
                    {
                        "default": False,
                        "tooltip": "ComfyUI's log says for every layer shape what runs it. On: also "
                        "what cannot, and why. Off: that only.",
                    },
                ),
            },
        }

    def route(
        self,
        model: Any,
        mode: str,
        max_rows: int,
        min_out_features: int,
        backend: str,
        min_in_features: int = 0,
        max_out_features: int = 0,
        include: str = "",
        exclude: str = "",
        verbose: bool = False,
    ) -> dict[str, Any]:
        try:
            split = RowSplit(mode, max_rows, min_out_features)  # type: ignore[arg-type]  # checked
        except ValueError as error:
            raise SettingsError(str(error)) from error
        filters = filters_from(min_in_features, max_out_features, include, exclude)
        from ..host.row_split import row_split_linear  # ComfyUI is imported only when a node runs

        return model_result(
            *row_split_linear(model, LinearSettings(split, backend, verbose), filters)
        )
