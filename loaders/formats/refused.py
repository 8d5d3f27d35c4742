"""Formats that are recognised but not run, each with the reason and the remedy."""

from __future__ import annotations

from .layer import FileFacts, LayerTensors, StoredLayer

LABELS = {
    "svdquant_w4a4": "is SVDQuant (Nunchaku), laid out in tiles for its own GPU kernels",
    "awq_w4a16": "is AWQ, which neither ComfyUI nor this package runs",
    "float8_e4m3fn_rowwise": "is convert_to_quant's fp8 with row scales",
    "float8_e4m3fn_blockwise": "is convert_to_quant's fp8 with block scales",
    "float8_e4m3fn_block3d": "is convert_to_quant's fp8 with block scales",
    "hybrid_mxfp8": "is convert_to_quant's hybrid mxfp8",
    "int4_quip": "is ThunderFun's QuIP",
}
REMEDY = "get the model in int8, NF4 or ComfyUI's formats, or in 16 bit and quantize it here"


def detect(layer: LayerTensors, file: FileFacts) -> bool:
    """Anything labelled that no reader took, and the keys of GPTQ, AWQ and Nunchaku."""
    return layer.config is not None or "qweight" in layer.parts


def read(layer: LayerTensors, file: FileFacts) -> StoredLayer:
    """Never returns.

    Raises:
        LayerFault: saying what it is.
    """
    if "qweight" in layer.parts:
        kind = "Nunchaku or AWQ" if "wscales" in layer.parts else "GPTQ or AWQ"
        raise layer.fault(f"is {kind} (qweight), laid out for its own GPU kernels", REMEDY)
    config = layer.config or {}
    name = config.get("format")
    if name is None:
        raise layer.fault(f"is labelled {dict(config)!r}, which names no format", REMEDY)
    known = LABELS.get(str(name), "is labelled with a format this package does not know")
    raise layer.fault(f"{known} ({name!r})", REMEDY)
