"""Euler sampling, on velocity fields whose answer is known."""

import pytest
import torch
from leandit.demo.sampler import sample, sigma_schedule

CONTEXT = torch.zeros(2, 4, 256)
VECTOR = torch.zeros(2, 256)


@pytest.fixture
def noise() -> torch.Tensor:
    """(2, 16, 8, 8) float32."""
    return torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("steps", "sigmas"),
    [
        pytest.param(1, [1.0, 0.0], id="one step goes straight to clean"),
        pytest.param(4, [1.0, 0.75, 0.5, 0.25, 0.0], id="four steps are quarters"),
    ],
)
def test_the_schedule_is_even(steps: int, sigmas: list[float]) -> None:
    assert sigma_schedule(steps).tolist() == sigmas


def test_no_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1: 0"):
        sigma_schedule(0)


@pytest.mark.parametrize("steps", [1, 3, 20], ids=["in 1 step", "in 3 steps", "in 20 steps"])
def test_a_straight_flow_is_followed_to_its_clean_end(noise: torch.Tensor, steps: int) -> None:
    clean = torch.full_like(noise, 0.25)
    out = sample(lambda *_: noise - clean, noise, CONTEXT, VECTOR, steps)
    assert torch.allclose(out, clean, atol=1e-6)


def test_two_steps_of_decay_give_the_hand_computed_value() -> None:
    # v = x from x = 1: 1 -> 1 - 0.5 * 1 -> 0.5 - 0.5 * 0.5.
    out = sample(lambda latent, *_: latent, torch.ones(2, 16, 2, 2), CONTEXT, VECTOR, 2)
    assert torch.equal(out, torch.full((2, 16, 2, 2), 0.25))


def test_the_model_sees_sigma_and_its_conditioning(noise: torch.Tensor) -> None:
    seen = []

    def model(latent, timestep, context, vector):
        seen.append((timestep.tolist(), context.shape, vector.shape, context.dtype))
        return torch.zeros_like(latent)

    sample(model, noise.bfloat16(), CONTEXT, VECTOR, 2)
    shapes = (CONTEXT.shape, VECTOR.shape, torch.bfloat16)
    assert seen == [([1.0, 1.0], *shapes), ([0.5, 0.5], *shapes)]


def test_the_callback_sees_every_step(noise: torch.Tensor) -> None:
    calls = []
    out = sample(
        lambda latent, *_: latent,
        noise,
        CONTEXT,
        VECTOR,
        2,
        on_step=lambda index, sigma, latent: calls.append((index, sigma, latent)),
    )
    assert [call[:2] for call in calls] == [(0, 0.5), (1, 0.0)]
    assert torch.equal(calls[0][2], noise * 0.5)
    assert torch.equal(calls[1][2], out)


def test_the_latent_stays_float32_around_a_bfloat16_model(noise: torch.Tensor) -> None:
    out = sample(lambda latent, *_: latent, noise.bfloat16(), CONTEXT, VECTOR, 4)
    assert out.dtype == torch.float32
