"""The building blocks of the Flux forward, with the parameter names of Flux checkpoints.

Tokens are (B, N, hidden), ``cond`` is (B, hidden), ``rotation`` is flux_position.rotation_table's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .flux_position import rotate

MLP_RATIO = 4
LAYER_NORM_EPS = 1e-6
# The value torch.nn.RMSNorm falls back to for float32, which is what the host uses.
RMS_NORM_EPS = torch.finfo(torch.float32).eps


class Modulated(nn.Module):
    """Projects ``cond`` to ``count`` vectors (B, 1, hidden): shift, scale, gate per branch."""

    def __init__(self, hidden: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.lin = nn.Linear(hidden, count * hidden)

    def forward(self, cond: Tensor) -> tuple[Tensor, ...]:
        return self.lin(F.silu(cond)).unsqueeze(1).chunk(self.count, dim=-1)


class HeadNorm(nn.Module):
    """RMS normalisation over the last axis with a learned scale."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.scale.shape, self.scale, RMS_NORM_EPS)


class QueryKeyNorm(nn.Module):
    """Splits fused (B, N, 3 * hidden) into heads (B, heads, N, D), normalising query and key."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.query_norm = HeadNorm(head_dim)
        self.key_norm = HeadNorm(head_dim)

    def forward(self, qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        return self.query_norm(query), self.key_norm(key), value


class StreamAttention(nn.Module):
    """The projections of one stream; the attention itself runs over both streams together."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.norm = QueryKeyNorm(hidden // heads)
        self.proj = nn.Linear(hidden, hidden)


class DoubleBlock(nn.Module):
    """Image and text streams with weights of their own, meeting in one joint attention."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.img_mod = Modulated(hidden, 6)
        self.img_attn = StreamAttention(hidden, heads)
        self.img_mlp = _mlp(hidden)
        self.txt_mod = Modulated(hidden, 6)
        self.txt_attn = StreamAttention(hidden, heads)
        self.txt_mlp = _mlp(hidden)

    def forward(
        self, img: Tensor, txt: Tensor, cond: Tensor, rotation: Tensor
    ) -> tuple[Tensor, Tensor]:
        img_mod, txt_mod = self.img_mod(cond), self.txt_mod(cond)
        img_heads = self.img_attn.norm(self.img_attn.qkv(_adapt(img, *img_mod[:2])), self.heads)
        txt_heads = self.txt_attn.norm(self.txt_attn.qkv(_adapt(txt, *txt_mod[:2])), self.heads)
        query, key, value = (torch.cat(pair, 2) for pair in zip(txt_heads, img_heads, strict=True))
        attended = _attend(query, key, value, rotation)
        txt_out, img_out = attended.tensor_split([txt.shape[1]], dim=1)
        img = img + self.img_attn.proj(img_out) * img_mod[2]
        txt = txt + self.txt_attn.proj(txt_out) * txt_mod[2]
        img = img + self.img_mlp(_adapt(img, *img_mod[3:5])) * img_mod[5]
        txt = txt + self.txt_mlp(_adapt(txt, *txt_mod[3:5])) * txt_mod[5]
        return img, txt


class SingleBlock(nn.Module):
    """Attention and MLP side by side on the joined stream, fused into two linear layers."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.widths = (3 * hidden, MLP_RATIO * hidden)
        self.modulation = Modulated(hidden, 3)
        self.linear1 = nn.Linear(hidden, sum(self.widths))
        self.norm = QueryKeyNorm(hidden // heads)
        self.linear2 = nn.Linear(hidden + MLP_RATIO * hidden, hidden)

    def forward(self, tokens: Tensor, cond: Tensor, rotation: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(cond)
        qkv, mlp = self.linear1(_adapt(tokens, shift, scale)).split(self.widths, dim=-1)
        query, key, value = self.norm(qkv, self.heads)
        attended = _attend(query, key, value, rotation)
        both = torch.cat((attended, F.gelu(mlp, approximate="tanh")), dim=-1)
        return tokens + self.linear2(both) * gate


class FinalLayer(nn.Module):
    """Modulated projection of image tokens to patches: (B, N, hidden) -> (B, N, out_dim)."""

    def __init__(self, hidden: int, out_dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, out_dim)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 2 * hidden))

    def forward(self, tokens: Tensor, cond: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(cond).unsqueeze(1).chunk(2, dim=-1)
        return self.linear(_adapt(tokens, shift, scale))


def _mlp(hidden: int) -> nn.Sequential:
    """Linear, tanh-GELU, linear."""
    wide = MLP_RATIO * hidden
    return nn.Sequential(nn.Linear(hidden, wide), nn.GELU("tanh"), nn.Linear(wide, hidden))


def _adapt(tokens: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Layer norm without weights of its own, then the conditioning's scale and shift."""
    normed = F.layer_norm(tokens, tokens.shape[-1:], eps=LAYER_NORM_EPS)
    return normed * (1 + scale) + shift


def _attend(query: Tensor, key: Tensor, value: Tensor, rotation: Tensor) -> Tensor:
    """Rotary attention over (B, heads, N, D) -> (B, N, heads * D)."""
    out = F.scaled_dot_product_attention(rotate(query, rotation), rotate(key, rotation), value)
    return out.transpose(1, 2).flatten(2)
