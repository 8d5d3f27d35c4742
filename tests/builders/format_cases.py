"""Every loadable format by a name that reads as a sentence, and files that hold it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from format_builders import (
    Parts,
    blockwise,
    bnb,
    grouped_int8,
    int4_rows,
    int8,
    llm_int8,
    packed_words,
    quanto_int4,
    quanto_int8,
    sdnq,
    sdnq_side,
    torchao,
    w4a8,
)
from safetensors.torch import save_file


@dataclass(frozen=True)
class Case:
    """A format: its builder, and what its file needs besides the layers' tensors."""

    build: Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]
    loads_as: str
    side: dict[str, Any] = field(default_factory=dict)
    header: Callable[[list[str]], dict[str, str]] = lambda layers: {}
    extra: Callable[[], Parts] = lambda: {}
    legacy_rotation: str = "auto"
    error: float = 0.02
    """Relative distance of the stored weight from the original that the format may have."""


def in_header(prefix: str, config: dict[str, Any]) -> Callable[[list[str]], dict[str, str]]:
    """A header that lists the layers under another prefix than their tensors have."""

    def header(layers: list[str]) -> dict[str, str]:
        content = {"format_version": "1.0", "layers": {prefix + name: config for name in layers}}
        return {"_quantization_metadata": json.dumps(content)}

    return header


def unsloth_header(layers: list[str]) -> dict[str, str]:
    return {
        "activation_rotation": "convrot_hadamard_v1",
        "activation_rotation_group": "256",
        "activation_rotation_fqns": json.dumps(layers),
    }


PLAIN = {"format": "int8_tensorwise"}
CONVROT = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
NATIVE = "int8_tensorwise"
CT_SIDE = {"config.json": {"quantization_config": {"quant_method": "compressed-tensors"}}}
F16 = 0.25  # what 4 bits may lose of these weights, a tenth of which are three times as large

CASES: dict[str, Case] = {
    **{
        f"int8_tensorwise with scale {shape}": Case(int8(shape, config=PLAIN), NATIVE, error=0.06)
        for shape in ("[]", "[1]", "[N]", "[N,1]")
    },
    **{
        f"int8 ConvRot in groups of {group}": Case(
            int8(group=group, config=CONVROT | {"convrot_groupsize": group}), NATIVE
        )
        for group in (256, 64, 16)
    },
    "int8 ConvRot labelled in groups of 128": Case(
        int8(group=128, kind="sylvester", config=CONVROT | {"convrot_groupsize": 128}), "stored"
    ),
    "int8 labelled in the header with another prefix": Case(
        int8(group=256), NATIVE, header=in_header("model.diffusion_model.", CONVROT)
    ),
    "int8 with nested params": Case(
        int8(
            group=64,
            config={
                "format": "int8_tensorwise",
                "params": {"convrot": True, "convrot_groupsize": 64},
            },
        ),
        NATIVE,
    ),
    "int8 with doubled braces": Case(
        int8(group=256, config="{" + json.dumps(CONVROT) + "}"), NATIVE
    ),
    "int8_rowwise": Case(int8(config={"format": "int8_rowwise"}), NATIVE),
    "INT8-Fast without format": Case(
        int8(group=256, config={"convrot": True, "convrot_groupsize": 256, "per_row": True}), NATIVE
    ),
    "INT8-Fast without format, not rotated": Case(
        int8(config={"convrot": False, "per_row": True}), NATIVE
    ),
    "INT8-Fast of April, Sylvester 128": Case(int8(group=128, kind="sylvester"), "stored"),
    "int8_blockwise": Case(blockwise, "stored"),
    "convrot_w4a4": Case(
        int4_rows({"format": "convrot_w4a4", "convrot_groupsize": 256}, False),
        "convrot_w4a4",
        error=F16,
    ),
    "convrot_w4a4 for int8 activations": Case(
        int4_rows(
            {"format": "convrot_w4a4", "convrot_groupsize": 64, "linear_dtype": "int8"}, False
        ),
        "convrot_w4a4",
        error=F16,
    ),
    "int4_tensorwise": Case(int4_rows({"format": "int4_tensorwise"}, True), "stored", error=0.4),
    "asym_w4a8_int8": Case(w4a8("codebook"), "asym_w4a8_int8", error=F16),
    "asym_w4a8_int8 without codebook": Case(w4a8("plain"), "asym_w4a8_int8", error=F16),
    "asym_w4a8_int8 with correction": Case(w4a8("corrected"), "asym_w4a8_int8", error=F16),
    "asym_w4a8_int8 with 6 bits": Case(w4a8("six_bit"), "asym_w4a8_int8", error=0.05),
    **{
        f"bitsandbytes {kind}{', double-quantized' if nested else ''}": Case(
            bnb(kind, nested), "stored", error=F16
        )
        for kind in ("nf4", "fp4")
        for nested in (False, True)
    },
    "bitsandbytes LLM.int8": Case(llm_int8, NATIVE),
    "LightX2V": Case(int8(dtype=torch.bfloat16), NATIVE),
    "LightX2V in ComfyUI mode": Case(
        int8("[]", names=("weight", "scale_weight")),
        NATIVE,
        extra=lambda: {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)},
        error=0.06,
    ),
    "optimum-quanto int8": Case(quanto_int8, NATIVE),
    "optimum-quanto int4": Case(quanto_int4, "stored", error=F16),
    "SDNQ int8": Case(sdnq(8, False), NATIVE, sdnq_side("int8")),
    "SDNQ int8, transposed": Case(sdnq(8, False, turned=True), NATIVE, sdnq_side("int8")),
    "SDNQ int8 in groups": Case(sdnq(8, False, 4), "stored", sdnq_side("int8")),
    "SDNQ uint8": Case(sdnq(8, True), "stored", sdnq_side("uint8")),
    "SDNQ uint8, transposed": Case(sdnq(8, True, turned=True), "stored", sdnq_side("uint8")),
    "SDNQ int4 in groups": Case(sdnq(4, False, 4), "stored", sdnq_side("int4"), error=F16),
    "SDNQ uint4": Case(sdnq(4, True, 4), "stored", sdnq_side("uint4"), error=F16),
    "SDNQ uint4 with SVD": Case(sdnq(4, True, 4, rank=8), "stored", sdnq_side("uint4"), error=F16),
    "SDNQ uint4 with SVD and rotation, transposed": Case(
        sdnq(4, True, 4, rank=8, kind="regular", turned=True),
        "stored",
        sdnq_side("uint4", use_hadamard=True, hadamard_group_size=256),
        error=F16,
    ),
    "SDNQ int8 with rotation": Case(
        sdnq(8, False, kind="regular"), NATIVE, sdnq_side("int8", use_hadamard=True)
    ),
    "SDNQ 0.1.9 int8 with rotation": Case(
        sdnq(8, False, kind="sylvester"),
        "stored",
        sdnq_side("int8", "0.1.9", use_hadamard=True),
    ),
    "compressed-tensors int8": Case(int8(dtype=torch.bfloat16), NATIVE, CT_SIDE),
    "compressed-tensors int8 in groups": Case(grouped_int8(False), "stored", CT_SIDE),
    "compressed-tensors int8 with zero points": Case(grouped_int8(True), "stored", CT_SIDE),
    "compressed-tensors int4": Case(packed_words(False), "stored", error=F16),
    "compressed-tensors int4 with zero points": Case(packed_words(True), "stored", error=0.3),
    "torchao int8": Case(torchao(), NATIVE),
    "unsloth int8, rotated": Case(torchao(256), NATIVE, header=unsloth_header),
}


def write_case(
    name: str, folder: Path, weights: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor]
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A file of a case in a folder of its own, and the float64 weights its layers stand for.

    Args:
        weights: by layer name, to be quantized. plain: other tensors by their full names.
    """
    case = CASES[name]
    tensors = dict(plain) | case.extra()
    references = {}
    for layer, weight in weights.items():
        parts, references[layer] = case.build(weight.double())
        tensors |= {f"{layer}.{part}": value.contiguous().clone() for part, value in parts.items()}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    save_file(tensors, path, case.header(list(weights)) or None)
    for file, content in case.side.items():
        (folder / file).write_text(json.dumps(content))
    return path, references
