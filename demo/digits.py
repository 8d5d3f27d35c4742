"""How a digit becomes a latent, and a label becomes conditioning. Pure functions, no state.

The map lifts each pixel along one fixed direction of the latent's 16 channels, so an 8x8 image is
an 8x8 latent and projecting back onto the direction recovers the image exactly.
"""

import math

import torch
from torch import Tensor

CLASSES = 10
SIDE = 8
CHANNELS = 16
CONTEXT_TOKENS = 4
CONTEXT_DIM = 256
VECTOR_DIM = 256
GAIN = 0.5

# ComfyUI hands Flux latents to its VAE as latent / scale + shift.
_HOST_SCALE = 0.3611
_HOST_SHIFT = 0.1159


def channel_direction() -> Tensor:
    """(16,) float32 of magnitude GAIN each, signs in six alternating runs (fixed, closed form)."""
    wave = torch.cos(torch.pi * 3 * (torch.arange(CHANNELS) + 0.5) / CHANNELS)
    return GAIN * torch.sign(wave)


def to_latent(images: Tensor) -> Tensor:
    """(B, 8, 8) images in [0, 1] -> (B, 16, 8, 8) latents, pixels centred to [-1, 1] first."""
    direction = channel_direction().to(images)
    return (2 * images - 1)[:, None] * direction[:, None, None]


def to_image(latent: Tensor) -> Tensor:
    """(B, 16, 8, 8) latents -> (B, 8, 8) images, not clamped; the inverse of :func:`to_latent`."""
    direction = channel_direction().to(latent)
    centred = torch.einsum("bchw,c->bhw", latent, direction) / direction.square().sum()
    return (centred + 1) / 2


def from_host(latent: Tensor) -> Tensor:
    """Undo the scale and shift ComfyUI gives a sampled Flux latent, any shape."""
    return (latent - _HOST_SHIFT) * _HOST_SCALE


def label_context(labels: Tensor) -> Tensor:
    """(B,) int labels -> (B, 4, 256) float32: four rows per label, all 40 rows orthogonal."""
    token = torch.arange(CONTEXT_TOKENS, device=labels.device)
    return _cosine_rows(labels[:, None] * CONTEXT_TOKENS + token, CONTEXT_DIM)


def label_vector(labels: Tensor) -> Tensor:
    """(B,) int labels -> (B, 256) float32: one row per label, all 10 rows orthogonal."""
    return _cosine_rows(labels, VECTOR_DIM)


def _cosine_rows(index: Tensor, width: int) -> Tensor:
    """Rows 1 + index of the type-2 cosine transform, unit mean square: (...) -> (..., width)."""
    place = (torch.arange(width, device=index.device, dtype=torch.float64) + 0.5) / width
    frequency = (index + 1).to(torch.float64)[..., None]
    return (math.sqrt(2.0) * torch.cos(math.pi * frequency * place)).float()
