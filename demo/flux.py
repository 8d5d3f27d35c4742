"""A standalone torch forward of the Flux architecture, small enough for the demo model.

Parameter names are those of Flux checkpoints, so one safetensors file serves both this module and
a host that knows Flux. Every weight matrix sits in a plain ``nn.Linear``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from .flux_blocks import DoubleBlock, FinalLayer, SingleBlock
from .flux_position import grid_positions, rotation_table, timestep_features

PATCH = 2
TIME_FEATURES = 256
AXES_DIM = (16, 56, 56)
HEAD_DIM = sum(AXES_DIM)


@dataclass(frozen=True)
class FluxConfig:
    """Sizes of a Flux model; the rest (patch 2, head dim 128, MLP ratio 4) is fixed by Flux."""

    hidden_size: int = 128
    depth: int = 2
    depth_single_blocks: int = 4
    latent_channels: int = 16
    context_in_dim: int = 256
    vec_in_dim: int = 256

    def __post_init__(self) -> None:
        if self.hidden_size < HEAD_DIM or self.hidden_size % HEAD_DIM:
            raise ValueError(f"hidden_size must be a multiple of {HEAD_DIM}: {self.hidden_size}")

    @property
    def num_heads(self) -> int:
        """Attention heads, each ``HEAD_DIM`` wide."""
        return self.hidden_size // HEAD_DIM

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "FluxConfig":
        """Read the sizes off the shapes of a Flux checkpoint's tensors."""
        hidden, patch_values = tensors["img_in.weight"].shape
        return cls(
            hidden_size=hidden,
            depth=_count_blocks(tensors, "double_blocks."),
            depth_single_blocks=_count_blocks(tensors, "single_blocks."),
            latent_channels=patch_values // PATCH**2,
            context_in_dim=tensors["txt_in.weight"].shape[1],
            vec_in_dim=tensors["vector_in.in_layer.weight"].shape[1],
        )


class TwoLayerEmbedder(nn.Module):
    """Linear, SiLU, linear: (B, in_dim) -> (B, hidden)."""

    def __init__(self, in_dim: int, hidden: int) -> None:
        super().__init__()
        self.in_layer = nn.Linear(in_dim, hidden)
        self.out_layer = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_layer(F.silu(self.in_layer(x)))


class Flux(nn.Module):
    """Predicts the rectified-flow velocity ``noise - clean`` of a noisy latent."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.config = config
        hidden, heads = config.hidden_size, config.num_heads
        patch_values = config.latent_channels * PATCH**2
        self.img_in = nn.Linear(patch_values, hidden)
        self.txt_in = nn.Linear(config.context_in_dim, hidden)
        self.time_in = TwoLayerEmbedder(TIME_FEATURES, hidden)
        self.vector_in = TwoLayerEmbedder(config.vec_in_dim, hidden)
        self.double_blocks = nn.ModuleList(DoubleBlock(hidden, heads) for _ in range(config.depth))
        self.single_blocks = nn.ModuleList(
            SingleBlock(hidden, heads) for _ in range(config.depth_single_blocks)
        )
        self.final_layer = FinalLayer(hidden, patch_values)

    def forward(self, latent: Tensor, timestep: Tensor, context: Tensor, vector: Tensor) -> Tensor:
        """Velocity at one noise level.

        latent: (B, C, H, W), H and W even, in the weights' dtype.
        timestep: (B,) noise level in [0, 1], any float dtype (kept at float32 or wider).
        context: (B, T, context_in_dim), vector: (B, vec_in_dim), in the weights' dtype.
        Returns (B, C, H, W) in the latent's dtype.
        """
        height, width = latent.shape[-2:]
        img = self.img_in(patchify(latent))
        txt = self.txt_in(context)
        features = timestep_features(timestep, TIME_FEATURES).to(latent.dtype)
        cond = self.time_in(features) + self.vector_in(vector)

        positions = grid_positions(txt.shape[1], height // PATCH, width // PATCH, latent.device)
        rotation = rotation_table(positions, AXES_DIM, wide=latent.dtype == torch.float64)
        for block in self.double_blocks:
            img, txt = block(img, txt, cond, rotation)
        tokens = torch.cat((txt, img), dim=1)
        for block in self.single_blocks:
            tokens = block(tokens, cond, rotation)
        patches = self.final_layer(tokens[:, txt.shape[1] :], cond)
        return unpatchify(patches, height, width)

    def zero_gates(self) -> None:
        """Start every block as the identity and the output at zero (the adaLN-zero start)."""
        for name, parameter in self.named_parameters():
            if name.startswith("final_layer.") or ".lin." in name:
                nn.init.zeros_(parameter)


def patchify(latent: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, H/2 * W/2, C * 4), row-major tokens of channel-major patches."""
    return F.pixel_unshuffle(latent, PATCH).flatten(2).transpose(1, 2)


def unpatchify(patches: Tensor, height: int, width: int) -> Tensor:
    """(B, H/2 * W/2, C * 4) -> (B, C, H, W), the inverse of :func:`patchify`."""
    planes = patches.transpose(1, 2).unflatten(2, (height // PATCH, width // PATCH))
    return F.pixel_shuffle(planes, PATCH)


def load_flux(path: str | PathLike[str], dtype: torch.dtype = torch.float32) -> Flux:
    """Build a Flux from a safetensors file on the CPU, weights cast to ``dtype``, in eval mode."""
    tensors = load_file(path)
    with torch.device("meta"):
        model = Flux(FluxConfig.from_tensors(tensors))
    model.load_state_dict({name: t.to(dtype) for name, t in tensors.items()}, assign=True)
    return model.eval().requires_grad_(False)


def _count_blocks(tensors: Mapping[str, Tensor], prefix: str) -> int:
    """Number of distinct block indices after ``prefix``."""
    return len({name.split(".")[1] for name in tensors if name.startswith(prefix)})
