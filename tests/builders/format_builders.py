"""Small quantized layers as their writers store them, made by hand in float64.

Every builder takes a float64 weight (N, K) and gives the layer's tensors by the part of their name
after the layer's, and the float64 weight they stand for. Nothing here uses the package.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

Parts = dict[str, torch.Tensor]


def hadamard(group: int, kind: str = "regular") -> torch.Tensor:
    """Entry by entry: in base 4, a sign for every digit pair that adds to 3; or by common bits."""

    def sign(i: int, j: int) -> int:
        if kind == "sylvester":
            return -1 if (i & j).bit_count() % 2 else 1
        value = 1
        while i or j or group == 0:
            i, a = divmod(i, 4)
            j, b = divmod(j, 4)
            value = -value if a + b == 3 else value
        return value

    rows = [[sign(i, j) for j in range(group)] for i in range(group)]
    return torch.tensor(rows, dtype=torch.float64) / group**0.5


def turn(weight: torch.Tensor, group: int | None, kind: str = "regular") -> torch.Tensor:
    if group is None:
        return weight
    n, k = weight.shape
    return (weight.reshape(n, k // group, group) @ hadamard(group, kind)).reshape(n, k)


def marker(config: object) -> torch.Tensor:
    text = config if isinstance(config, str) else json.dumps(config)
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def symmetric(
    weight: torch.Tensor, top: float, dims: tuple[int, ...], scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and the scale as it is stored."""
    scale = (weight.abs().amax(dims, keepdim=True) / top).clamp(min=1e-12).to(scale_dtype)
    return (weight / scale.double()).round(), scale


def int8(
    scale_shape: str = "[N,1]",
    group: int | None = None,
    kind: str = "regular",
    config: object = None,
    names: tuple[str, str] = ("weight", "weight_scale"),
    dtype: torch.dtype = torch.float32,
) -> Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]:
    def build(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        dims = (0, 1) if scale_shape in ("[]", "[1]") else (1,)
        codes, scale = symmetric(turn(weight, group, kind), 127, dims, dtype)
        shaped = {"[N,1]": (-1, 1), "[N]": (-1,), "[1]": (1,), "[]": ()}[scale_shape]
        parts = {names[0]: codes.to(torch.int8), names[1]: scale.reshape(shaped)}
        if config is not None:
            parts["comfy_quant"] = marker(config)
        return parts, turn(codes * scale.double(), group, kind)

    return build


def blockwise(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    n, k = weight.shape
    rows, columns = -(-n // 128), -(-k // 128)
    codes, stored = torch.zeros(n, k), torch.zeros(rows, columns)
    value = torch.zeros_like(weight)
    for i in range(rows):
        for j in range(columns):
            area = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            code, scale = symmetric(weight[area], 127, (0, 1), torch.float32)
            codes[area], stored[i, j] = code.float(), scale.item()
            value[area] = code * scale.double()
    config = {"format": "int8_blockwise", "params": {"group_size": 128}}
    parts = {"weight": codes.to(torch.int8), "weight_scale": stored, "comfy_quant": marker(config)}
    return parts, value


def nibbles(codes: torch.Tensor, high_first: bool = False) -> torch.Tensor:
    """Codes 0..15 two to a byte along the last axis."""
    values = codes.to(torch.int64)
    first, second = values[..., 0::2], values[..., 1::2]
    return (first * 16 + second if high_first else first + second * 16).to(torch.uint8)


def int4_rows(config: dict[str, Any], column: bool) -> Callable[[torch.Tensor], Any]:
    def build(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        group = config.get("convrot_groupsize")
        codes, scale = symmetric(turn(weight, group), 7, (1,), torch.float32)
        packed = nibbles(codes % 16).view(torch.int8)
        stored = scale if column else scale.reshape(-1)
        parts = {"weight": packed, "weight_scale": stored, "comfy_quant": marker(config)}
        return parts, turn(codes * scale.double(), group)

    return build


LEVELS = torch.tensor([-0.98, -0.7, -0.5, -0.35, -0.25, -0.16, -0.08, -0.01])
TABLE = torch.cat((LEVELS, -LEVELS.flip(0)))


def w4a8(kind: str) -> Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]:
    """kind: codebook, plain, corrected or six_bit. The levels are rounded to int8 before scaling."""

    def build(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        n, k = weight.shape
        groups = turn(weight, 256).reshape(n, k // 16, 16)
        correction = groups.mean(-1, keepdim=True).float() if kind == "corrected" else None
        if correction is not None:
            groups = groups - correction.double()
        top = {"codebook": 1.0, "plain": 7, "corrected": 7, "six_bit": 31}[kind]
        per_group = groups.abs().amax(-1, keepdim=True) / top
        channel = (per_group.amax(1, keepdim=True) * top / 127).float()
        relative = (per_group / channel.double()).to(torch.float8_e4m3fn)
        fine = groups / (relative.double() * channel.double()).clamp(min=1e-12)
        if kind == "codebook":
            codes = (fine.unsqueeze(-1) - TABLE.double()).abs().argmin(-1)
            levels = TABLE.double()[codes]
        else:
            middle = 32 if kind == "six_bit" else 8
            codes = fine.round().clamp(1 - middle, middle - 1).long() + middle
            levels = (codes - middle).double()
        integers = (levels * relative.double()).float().round().clamp(-127, 127).double()
        value = integers * channel.double()
        if correction is not None:
            value = value + correction.double()
        flat = codes.reshape(n, k)
        packed = nibbles(flat % 16)
        if kind == "six_bit":
            top_bits = (flat // 16).reshape(n, k // 4, 4)
            fields = sum(top_bits[..., i] << (2 * i) for i in range(4))
            packed = torch.cat((packed, fields.to(torch.uint8)), 1)
        config = {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 256}
        parts = {
            "weight": packed.view(torch.int8),
            "weight_s_rel": relative.squeeze(-1),
            "weight_s_channel": channel.reshape(n),
            "comfy_quant": marker(config),
        }
        if kind == "codebook":
            parts["weight_codebook"] = TABLE
        if correction is not None:
            parts["weight_correction"] = correction.squeeze(-1).t().contiguous()
        return parts, turn(value.reshape(n, k), 256)

    return build


NF4 = [-1, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1]
FP4 = [0, 0.0052083333, 0.66666667, 1, 0.33333333, 0.5, 0.16666667, 0.25]
FP4 += [-value for value in FP4]


def bnb(kind: str, nested: bool) -> Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]:
    def build(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        table = torch.tensor(NF4 if kind == "nf4" else FP4)
        flat = weight.flatten()
        padded = torch.cat((flat, flat.new_zeros(-flat.numel() % 64))).reshape(-1, 64)
        absmax = padded.abs().amax(1).float()
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16"}
        state["shape"] = list(weight.shape)
        parts: Parts = {}
        if nested:
            offset = absmax.double().mean().item()
            inner = torch.linspace(-1, 1, 256)
            centered = absmax.double() - offset
            filled = torch.cat((centered, centered.new_zeros(-centered.numel() % 256)))
            largest = filled.reshape(-1, 256).abs().amax(1).float()
            spread = largest.double().repeat_interleave(256)[: absmax.numel()]
            index = ((centered / spread).unsqueeze(1) - inner.double()).abs().argmin(1)
            scale = inner.double()[index] * spread + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            parts["weight.nested_absmax"] = largest
            parts["weight.nested_quant_map"] = inner
            parts["weight.absmax"] = index.to(torch.uint8)
        else:
            scale = absmax.double()
            parts["weight.absmax"] = absmax
        fine = padded / scale.unsqueeze(1).clamp(min=1e-12)
        codes = (fine.unsqueeze(-1) - table.double()).abs().argmin(-1)
        value = (table.double()[codes] * scale.unsqueeze(1)).flatten()[: flat.numel()]
        stored = codes.flatten()[: flat.numel() + flat.numel() % 2]
        parts["weight"] = nibbles(stored, high_first=True).reshape(-1, 1)
        parts["weight.quant_map"] = table
        parts[f"weight.quant_state.bitsandbytes__{kind}"] = marker(state)
        return parts, value.reshape(weight.shape)

    return build


def llm_int8(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    absmax = weight.abs().amax(1).float()
    codes = (weight * 127 / absmax.double().unsqueeze(1)).round()
    scale = (absmax * torch.tensor(1 / 127, dtype=torch.float32)).double().unsqueeze(1)
    parts = {"weight": codes.to(torch.int8), "SCB": absmax}
    return parts | {"weight_format": torch.tensor(0, dtype=torch.uint8)}, codes * scale


def quanto_int8(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    names = ("weight._data", "weight._scale")
    parts, value = int8(names=names, dtype=torch.bfloat16)(weight)
    ones = {"input_scale": torch.ones(()), "output_scale": torch.ones(())}
    return parts | ones, value


def quanto_int4(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """One group a row of the packed matrix; its upper half in the low nibbles."""
    n, k = weight.shape
    group = next((g for g in (128, 96, 64, 32) if k > 128 and k % g == 0), k)
    rows = weight.reshape(-1, group)
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    scale = ((high - low) / 15).float()
    shift = (-low).float()
    codes = ((rows + shift.double()) / scale.double()).round().clamp(0, 15).long()
    count = codes.shape[0]
    half = (count + 1) // 2
    filled = torch.cat((codes, codes.new_zeros(2 * half - count, group)))
    parts = {
        "weight._data._data": (filled[:half] + 16 * filled[half:]).to(torch.uint8),
        "weight._scale": scale,
        "weight._shift": shift,
        "input_scale": torch.ones(()),
        "output_scale": torch.ones(()),
    }
    return parts, (codes * scale.double() - shift.double()).reshape(n, k)


def sdnq(
    bits: int, unsigned: bool, groups: int = 1, rank: int = 0, kind: str = "", turned: bool = False
) -> Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]:
    """kind: the rotation's matrix, "" for none; turned: stored transposed."""

    def build(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        n, k = weight.shape
        group = 256
        while k % group:
            group //= 2
        matrix = "sylvester" if group in (8, 32, 128, 512) else kind
        rotated = turn(weight, group, matrix) if kind else weight
        low_rank = torch.zeros_like(weight)
        parts: Parts = {}
        if rank:
            u, s, v = torch.linalg.svd(rotated, full_matrices=False)
            up, down = (u[:, :rank] * s[:rank]).bfloat16(), v[:rank].bfloat16()
            low_rank = up.double() @ down.double()
            parts["svd_up"] = up.t().contiguous() if turned else up.contiguous()
            parts["svd_down"] = down.t().contiguous() if turned else down.contiguous()
        rest = (rotated - low_rank).reshape(n, groups, k // groups)
        low, high = rest.amin(-1, keepdim=True), rest.amax(-1, keepdim=True)
        zero = low.float() if unsigned else torch.zeros(n, groups, 1)
        top = 2**bits - 1 if unsigned else 2 ** (bits - 1) - 1
        span = high - low if unsigned else torch.maximum(high, -low)
        scale = (span / top).float()
        codes = ((rest - zero.double()) / scale.double()).round().clamp(-top - 1, top)
        codes = codes.clamp(min=0) if unsigned else codes
        value = (codes * scale.double() + zero.double()).reshape(n, k) + low_rank
        shape = (n, groups, 1) if groups > 1 else (n, 1)
        parts["scale"] = scale.reshape(shape)
        if unsigned:
            parts["zero_point"] = zero.reshape(shape)
        if bits == 4:
            parts["weight"] = nibbles((codes if unsigned else codes + 8).flatten())
        else:
            stored = codes.to(torch.uint8 if unsigned else torch.int8)
            parts["weight"] = stored if groups > 1 else stored.reshape(n, k)
        if turned and bits == 8 and groups == 1:
            for name in ("weight", "scale", "zero_point"):
                if name in parts:
                    parts[name] = parts[name].t().contiguous()
        return parts, turn(value, group, matrix) if kind else value

    return build


def sdnq_side(dtype: str, version: str = "0.2.8", **settings: Any) -> dict[str, Any]:
    config = {"quant_method": "sdnq", "sdnq_version": version, "weights_dtype": dtype} | settings
    return {"quantization_config.json": config}


def grouped_int8(zero: bool) -> Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]:
    def build(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        n, k = weight.shape
        groups = weight.reshape(n, 2, k // 2)
        scale = (groups.abs().amax(-1, keepdim=True) / 100).bfloat16()
        point = torch.full_like(scale, 5 if zero else 0).to(torch.int8)
        codes = ((groups / scale.double()).round() + point).clamp(-128, 127)
        parts = {"weight": codes.to(torch.int8).reshape(n, k), "weight_scale": scale.squeeze(-1)}
        if zero:
            parts["weight_zero_point"] = point.squeeze(-1)
        return parts, ((codes - point) * scale.double()).reshape(n, k)

    return build


def packed_words(zero: bool) -> Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]:
    """compressed-tensors' 4-bit: eight codes an int32, the first in the lowest bits, 8 added."""

    def build(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        n, k = weight.shape
        groups = weight.reshape(n, k // 32, 32)
        scale = (groups.abs().amax(-1, keepdim=True) / 6).bfloat16()
        point = torch.arange(n * k // 32).reshape(n, k // 32, 1) % 3 - 1 if zero else torch.zeros(1)
        codes = ((groups / scale.double()).round() + point).clamp(-8, 7)
        value = ((codes - point) * scale.double()).reshape(n, k)

        def words(codes: torch.Tensor) -> torch.Tensor:
            bytes_ = nibbles(codes + 8)
            return bytes_.contiguous().view(torch.int32)

        parts = {
            "weight_packed": words(codes.reshape(n, k)),
            "weight_scale": scale.squeeze(-1),
            "weight_shape": torch.tensor([n, k]),
        }
        if zero:
            columns = point.squeeze(-1).t()
            filled = torch.cat((columns, columns.new_zeros(columns.shape[0], -n % 8)), 1)
            parts["weight_zero_point"] = words(filled).t().contiguous()
        return parts, value

    return build


def torchao(group: int | None = None) -> Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]:
    def build(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        codes, scale = symmetric(turn(weight, group), 127.5, (1,), torch.float32)
        codes = codes.clamp(-128, 127)
        parts = {
            "_weight_qdata": codes.to(torch.int8),
            "_weight_scale": scale,
            "_weight_zero_point": torch.zeros(weight.shape[0], 1, dtype=torch.int8),
        }
        return parts, turn(codes * scale.double(), group)

    return build
