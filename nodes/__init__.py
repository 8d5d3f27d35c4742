"""Layer 4: node classes. They translate inputs and outputs; importing them needs no ComfyUI."""

from __future__ import annotations

from .attention import LeanDiTAttention
from .layerwise_offload import LeanDiTLayerwiseOffload
from .load_model import LeanDiTLoadModel
from .quantize_model import LeanDiTQuantizeModel
from .row_split_linear import LeanDiTRowSplitLinear
from .save_model import LeanDiTSaveModel

NODE_CLASS_MAPPINGS: dict[str, type] = {
    "LeanDiTAttention": LeanDiTAttention,
    "LeanDiTLayerwiseOffload": LeanDiTLayerwiseOffload,
    "LeanDiTLoadModel": LeanDiTLoadModel,
    "LeanDiTQuantizeModel": LeanDiTQuantizeModel,
    "LeanDiTRowSplitLinear": LeanDiTRowSplitLinear,
    "LeanDiTSaveModel": LeanDiTSaveModel,
}

NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {
    "LeanDiTAttention": "Attention Selector",
    "LeanDiTLayerwiseOffload": "Layerwise Offload",
    "LeanDiTLoadModel": "Load Quantized Model",
    "LeanDiTQuantizeModel": "Quantize Model, INT8/INT4 ConvRot",
    "LeanDiTRowSplitLinear": "Row-Split Linear",
    "LeanDiTSaveModel": "Save Quantized Model",
}
