"""The demo model: its file, its forward and the digits it draws."""

from pathlib import Path

import pytest
import torch
from leandit.demo import flux as module
from leandit.demo.classifier import load_classifier, read_digits
from leandit.demo.digits import label_context, label_vector, to_image
from leandit.demo.flux import Flux, FluxConfig, load_flux, patchify, unpatchify
from leandit.demo.sampler import sample
from safetensors import safe_open
from safetensors.torch import load_file

FOLDER = Path(module.__file__).parent
FILE = FOLDER / "digits_flux.safetensors"

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def model() -> Flux:
    """The shipped weights in float32."""
    return load_flux(FILE)


@pytest.fixture
def inputs() -> Inputs:
    """Two noisy latents with their timesteps, contexts and vectors, float32."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([3, 8])
    latent = torch.randn(2, 16, 8, 8, generator=generator)
    return latent, torch.tensor([0.9, 0.4]), label_context(labels), label_vector(labels)


def distance(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius distance."""
    return ((result - expected).norm() / expected.norm()).item()


def draw(model: Flux, per_class: int, steps: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents (10 * per_class, 16, 8, 8) drawn in the model's dtype, and the labels asked for."""
    labels = torch.arange(10).repeat(per_class)
    noise = torch.randn(len(labels), 16, 8, 8, generator=torch.Generator().manual_seed(seed))
    noise = noise.to(model.img_in.weight.dtype)
    return sample(model, noise, label_context(labels), label_vector(labels), steps), labels


def test_the_shipped_file_is_bfloat16_and_at_most_8_megabytes() -> None:
    assert FILE.stat().st_size <= 8_000_000
    assert {tensor.dtype for tensor in load_file(FILE).values()} == {torch.bfloat16}


def test_the_shipped_file_says_how_it_was_made() -> None:
    with safe_open(FILE, "pt") as file:
        facts = file.metadata()
    assert facts["seed"] == "0"
    assert int(facts["steps"]) > 0
    assert 0 < float(facts["final_loss"]) < 0.1
    assert "load_digits" in facts["dataset"]
    assert "CC BY 4.0" in facts["dataset_license"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param("img_in.weight", (128, 64), id="patches of 2 by 2 by 16 come in"),
        pytest.param("txt_in.weight", (128, 256), id="context is 256 wide"),
        pytest.param("time_in.in_layer.weight", (128, 256), id="time has 256 features"),
        pytest.param("vector_in.in_layer.weight", (128, 256), id="the vector is 256 wide"),
        pytest.param("double_blocks.1.img_attn.qkv.weight", (384, 128), id="two double blocks"),
        pytest.param("double_blocks.0.txt_attn.norm.key_norm.scale", (128,), id="one head of 128"),
        pytest.param("double_blocks.0.img_mod.lin.weight", (768, 128), id="six modulations"),
        pytest.param("double_blocks.0.txt_mlp.2.weight", (128, 512), id="the MLP is 4 times wide"),
        pytest.param("single_blocks.3.linear1.weight", (896, 128), id="four single blocks"),
        pytest.param("single_blocks.0.linear2.weight", (128, 640), id="attention and MLP fused"),
        pytest.param("single_blocks.0.modulation.lin.bias", (384,), id="three modulations"),
        pytest.param("final_layer.adaLN_modulation.1.weight", (256, 128), id="final shift, scale"),
        pytest.param("final_layer.linear.weight", (64, 128), id="patches go out"),
    ],
)
def test_tensors_have_flux_names_and_shapes(name: str, shape: tuple[int, ...]) -> None:
    assert tuple(load_file(FILE)[name].shape) == shape


def test_sizes_are_read_off_the_tensors(model: Flux) -> None:
    assert model.config == FluxConfig(
        hidden_size=128,
        depth=2,
        depth_single_blocks=4,
        latent_channels=16,
        context_in_dim=256,
        vec_in_dim=256,
    )
    other = FluxConfig(256, 1, 3, 4, 32, 8)
    assert FluxConfig.from_tensors(Flux(other).state_dict()) == other
    assert other.num_heads == 2


def test_a_width_that_flux_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 128: 192"):
        FluxConfig(hidden_size=192)


def test_patches_are_row_major_with_the_channel_outermost() -> None:
    latent = torch.arange(2 * 4 * 6.0).reshape(1, 2, 4, 6)
    patches = patchify(latent)
    assert patches.shape == (1, 6, 8)
    assert patches[0, 1].tolist() == [2, 3, 8, 9, 26, 27, 32, 33]
    assert torch.equal(unpatchify(patches, 4, 6), latent)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        pytest.param(torch.float32, 1e-5, id="float32 to its rounding"),
        pytest.param(torch.bfloat16, 1.5e-2, id="bfloat16 to a percent or so"),
    ],
)
def test_the_forward_agrees_with_float64(
    inputs: Inputs, dtype: torch.dtype, tolerance: float
) -> None:
    latent, timestep, context, vector = inputs
    exact = load_flux(FILE, torch.float64)(
        latent.double(), timestep, context.double(), vector.double()
    )
    model = load_flux(FILE, dtype)
    result = model(latent.to(dtype), timestep, context.to(dtype), vector.to(dtype))
    assert result.dtype == dtype
    assert result.shape == latent.shape
    assert distance(result.double(), exact) < tolerance


def test_items_of_a_batch_do_not_touch_each_other(model: Flux, inputs: Inputs) -> None:
    together = model(*inputs)
    alone = torch.cat([model(*(tensor[i : i + 1] for tensor in inputs)) for i in range(2)])
    assert torch.allclose(together, alone, atol=1e-5)


def test_text_tokens_have_no_order_and_image_tokens_do(model: Flux, inputs: Inputs) -> None:
    latent, timestep, context, vector = inputs
    straight = model(latent, timestep, context, vector)
    assert torch.allclose(model(latent, timestep, context.flip(1), vector), straight, atol=1e-5)
    mirrored = model(latent.flip(-1), timestep, context, vector).flip(-1)
    assert distance(mirrored, straight) > 0.01


def test_zero_gates_start_at_a_zero_velocity(inputs: Inputs) -> None:
    model = Flux(FluxConfig())
    model.zero_gates()
    assert model(*inputs).abs().max() == 0


def test_one_seed_draws_the_same_digits_twice(model: Flux) -> None:
    assert torch.equal(draw(model, 1, 4, seed=9)[0], draw(model, 1, 4, seed=9)[0])


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="in float32"),
        pytest.param(torch.bfloat16, id="in bfloat16"),
    ],
)
def test_drawn_digits_are_read_as_their_label(dtype: torch.dtype) -> None:
    classifier = load_classifier(FOLDER / "digits_classifier.safetensors")
    latent, labels = draw(load_flux(FILE, dtype), per_class=20, steps=20, seed=1)
    read = read_digits(classifier, to_image(latent))
    assert (read == labels).float().mean().item() >= 0.95


def test_a_bfloat16_run_ends_close_to_the_float32_run(model: Flux) -> None:
    exact, _ = draw(model, per_class=2, steps=20, seed=4)
    rounded, _ = draw(load_flux(FILE, torch.bfloat16), per_class=2, steps=20, seed=4)
    assert distance(to_image(rounded), to_image(exact)) < 0.01
