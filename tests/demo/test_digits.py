"""The map between digits and latents, and the conditioning made from labels."""

import pytest
import torch
from leandit.demo.digits import (
    channel_direction,
    from_host,
    label_context,
    label_vector,
    to_image,
    to_latent,
)


@pytest.fixture
def images() -> torch.Tensor:
    """(6, 8, 8) float32 in [0, 1]."""
    return torch.rand(6, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        pytest.param(torch.float64, 1e-15, id="exact in float64"),
        pytest.param(torch.float32, 2e-7, id="to the last bits in float32"),
        pytest.param(torch.bfloat16, 8e-3, id="to bfloat16's own rounding in bfloat16"),
    ],
)
def test_an_image_survives_the_latent(
    images: torch.Tensor, dtype: torch.dtype, tolerance: float
) -> None:
    images = images.to(dtype)
    latent = to_latent(images)
    assert latent.shape == (6, 16, 8, 8)
    assert latent.dtype == dtype
    assert (to_image(latent) - images).abs().max().item() <= tolerance


def test_every_channel_carries_the_pixel_at_half_size(images: torch.Tensor) -> None:
    direction = channel_direction()
    assert direction.abs().tolist() == [0.5] * 16
    assert to_latent(torch.ones(1, 8, 8))[0, :, 3, 5].tolist() == direction.tolist()
    assert to_latent(torch.zeros(1, 8, 8))[0, :, 0, 0].tolist() == (-direction).tolist()


def test_noise_across_the_direction_does_not_reach_the_image(images: torch.Tensor) -> None:
    across = torch.zeros(16)
    across[0], across[1] = 1.0, -1.0
    assert torch.dot(across, channel_direction()) == 0
    moved = to_latent(images) + across[:, None, None]
    assert torch.allclose(to_image(moved), images, atol=1e-6)


def test_the_hosts_latent_scale_is_undone() -> None:
    latent = torch.linspace(-3, 3, 7)
    assert torch.allclose(from_host(latent / 0.3611 + 0.1159), latent, atol=1e-6)


@pytest.mark.parametrize(
    ("condition", "shape"),
    [
        pytest.param(label_context, (10, 4, 256), id="four context rows per label"),
        pytest.param(label_vector, (10, 256), id="one vector row per label"),
    ],
)
def test_conditioning_rows_are_orthogonal_with_unit_mean_square(condition, shape) -> None:
    out = condition(torch.arange(10))
    assert out.shape == shape
    assert out.dtype == torch.float32
    rows = out.flatten(0, -2)
    assert torch.allclose(rows @ rows.T / 256, torch.eye(len(rows)), atol=1e-6)


def test_conditioning_follows_the_label_alone() -> None:
    assert torch.equal(label_context(torch.tensor([7, 3]))[1], label_context(torch.arange(10))[3])
    assert torch.equal(label_vector(torch.tensor([7, 3]))[0], label_vector(torch.arange(10))[7])
