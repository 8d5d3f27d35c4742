"""Euler sampling of a rectified flow, from noise at sigma 1 to a clean latent at sigma 0."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

VelocityModel = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
StepCallback = Callable[[int, float, Tensor], None]


def sigma_schedule(steps: int) -> Tensor:
    """(steps + 1,) float32, evenly spaced from 1 to 0: the host's "simple" schedule at shift 1."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1: {steps}")
    return torch.linspace(1, 0, steps + 1)


@torch.no_grad()
def sample(
    model: VelocityModel,
    noise: Tensor,
    context: Tensor,
    vector: Tensor,
    steps: int,
    on_step: StepCallback | None = None,
) -> Tensor:
    """Integrate the model's velocity from ``noise`` (B, 16, H, W) to a clean latent of that shape.

    model: anything called as ``model(latent, timestep, context, vector)`` like ``Flux.forward``.
    The model runs in the noise's dtype; the latent between steps stays float32 or wider, and is
    what is returned. ``on_step(index, sigma, latent)`` sees the latent after each step with the
    noise level it was brought to.
    """
    sigmas = sigma_schedule(steps).to(noise.device)
    context, vector = context.to(noise), vector.to(noise)
    latent = noise.to(torch.promote_types(noise.dtype, torch.float32))
    for index, (sigma, following) in enumerate(pairwise(sigmas)):
        timestep = sigma.expand(len(noise))
        velocity = model(latent.to(noise.dtype), timestep, context, vector)
        latent = latent + velocity.to(latent.dtype) * (following - sigma)
        if on_step is not None:
            on_step(index, float(following), latent)
    return latent
