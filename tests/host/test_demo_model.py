"""The shipped demo model is a Flux to a real ComfyUI, and draws the same digits there."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from leandit.demo import flux as module
from leandit.demo.classifier import load_classifier, read_digits
from leandit.demo.digits import from_host, label_context, label_vector, to_image, to_latent
from leandit.demo.flux import load_flux
from leandit.demo.sampler import sample

FOLDER = Path(module.__file__).parent
FILE = FOLDER / "digits_flux.safetensors"

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference")]


def load_in_host(**model_options: Any) -> Any:
    """The patcher ComfyUI makes of the shipped file."""
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(FILE), model_options=model_options)


def sample_in_host(patcher: Any, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What a KSampler node does with euler, simple, 20 steps and cfg 1, (B, 16, 8, 8)."""
    import comfy.sample

    positive = [[label_context(labels), {"pooled_output": label_vector(labels)}]]
    return comfy.sample.sample(
        patcher,
        noise,
        steps=20,
        cfg=1.0,
        sampler_name="euler",
        scheduler="simple",
        positive=positive,
        negative=positive,
        latent_image=torch.zeros_like(noise),
        disable_pbar=True,
        seed=0,
    )


def numbered_noise(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise (10 * count, 16, 8, 8) and as many labels."""
    labels = torch.arange(10).repeat(count)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(labels), 16, 8, 8, generator=generator), labels


def test_the_host_detects_flux_and_every_tensor_finds_its_place(
    comfyui: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import comfy.model_base
    import comfy.supported_models

    with caplog.at_level(logging.INFO):
        patcher = load_in_host(dtype=torch.float32)
    assert isinstance(patcher.model, comfy.model_base.Flux)
    assert isinstance(patcher.model.model_config, comfy.supported_models.FluxSchnell)
    complaints = ("missing", "unexpected", "left over")
    assert [text for text in caplog.messages if any(word in text for word in complaints)] == []
    placed = patcher.model.diffusion_model.state_dict()
    assert len(placed) == len(load_flux(FILE).state_dict())


def test_the_hosts_forward_is_as_exact_as_ours(comfyui: Path) -> None:
    noise, labels = numbered_noise(1, seed=2)
    context, vector = label_context(labels), label_vector(labels)
    timestep = torch.linspace(1.0, 0.1, len(labels))
    exact = load_flux(FILE, torch.float64)(
        noise.double(), timestep, context.double(), vector.double()
    )
    ours = load_flux(FILE)(noise, timestep, context, vector)
    host = load_in_host(dtype=torch.float32).model.diffusion_model(
        noise, timestep, context=context, y=vector
    )
    our_error, host_error = (ours - exact).norm().item(), (host - exact).norm().item()
    assert our_error < 1e-5 * exact.norm().item()
    assert our_error <= 2 * host_error
    assert host_error <= 2 * our_error


def test_the_hosts_sampler_ends_where_ours_does(comfyui: Path) -> None:
    noise, labels = numbered_noise(1, seed=6)
    ours = sample(load_flux(FILE), noise, label_context(labels), label_vector(labels), 20)
    host = from_host(sample_in_host(load_in_host(dtype=torch.float32), noise, labels))
    assert ((host - ours).norm() / ours.norm()).item() < 1e-3


@pytest.mark.parametrize(
    "model_options",
    [
        pytest.param({}, id="in the dtype the host picks"),
        pytest.param({"dtype": torch.float32}, id="in float32"),
        pytest.param({"dtype": torch.bfloat16}, id="in bfloat16"),
    ],
)
def test_digits_drawn_by_the_host_are_read_as_their_label(
    comfyui: Path, model_options: dict[str, torch.dtype]
) -> None:
    noise, labels = numbered_noise(10, seed=7)
    images = to_image(from_host(sample_in_host(load_in_host(**model_options), noise, labels)))
    classifier = load_classifier(FOLDER / "digits_classifier.safetensors")
    assert (read_digits(classifier, images) == labels).float().mean().item() >= 0.95


def test_the_host_keeps_an_encoded_digit(comfyui: Path) -> None:
    latent = to_latent(torch.rand(2, 8, 8, generator=torch.Generator().manual_seed(0)))
    model = load_in_host(dtype=torch.float32).model
    assert torch.allclose(from_host(model.process_latent_out(latent)), latent, atol=1e-6)
