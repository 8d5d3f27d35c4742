"""Train the demo model and its judge from a seed: ``python -m leandit.demo.train --out DIR``."""

import argparse
import logging
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from .classifier import DigitClassifier, load_classifier, read_digits
from .digits import CHANNELS, CLASSES, SIDE, label_context, label_vector, to_image, to_latent
from .flux import Flux, FluxConfig, load_flux
from .sampler import sample

FLUX_FILE = "digits_flux.safetensors"
CLASSIFIER_FILE = "digits_classifier.safetensors"
HELD_OUT = 360
BATCH = 64
PEAK_RATE = 4e-3
MAX_GRADIENT = 1.0
DATASET = {
    "dataset": "scikit-learn load_digits: UCI Optical Recognition of Handwritten Digits",
    "dataset_license": "CC BY 4.0, E. Alpaydin and C. Kaynak, doi.org/10.24432/C50P49",
}

log = logging.getLogger(__name__)


def load_split(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shuffled digits: train images (N, 8, 8) in [0, 1] and labels (N,), then the held-out ones."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    order = torch.randperm(len(raw.target), generator=torch.Generator().manual_seed(seed))
    images = torch.from_numpy(raw.images).float()[order] / 16
    labels = torch.from_numpy(raw.target).long()[order]
    return images[HELD_OUT:], labels[HELD_OUT:], images[:HELD_OUT], labels[:HELD_OUT]


def train_classifier(images: Tensor, labels: Tensor, steps: int) -> DigitClassifier:
    """Fit the judge on images moved by up to one pixel and slightly noised."""
    model = DigitClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = OneCycleLR(optimizer, max_lr=PEAK_RATE, total_steps=steps)
    for _ in range(steps):
        pick = torch.randint(len(images), (BATCH,))
        row, column = torch.randint(3, (2,)).tolist()
        padded = F.pad(images[pick], (1, 1, 1, 1))
        moved = padded[:, row : row + SIDE, column : column + SIDE]
        noised = (moved + 0.1 * torch.randn_like(moved)).clamp(0, 1)
        _step(optimizer, schedule, F.cross_entropy(model(noised), labels[pick]))
    return model.eval().requires_grad_(False)


def train_flux(images: Tensor, labels: Tensor, steps: int) -> tuple[Flux, float]:
    """Fit the velocity field; returns the model and the mean loss of its last tenth."""
    model = Flux(FluxConfig(latent_channels=CHANNELS))
    model.zero_gates()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01, betas=(0.9, 0.99))
    schedule = OneCycleLR(optimizer, max_lr=PEAK_RATE, total_steps=steps, pct_start=0.1)
    latents, contexts, vectors = to_latent(images), label_context(labels), label_vector(labels)
    losses: list[float] = []
    for step in range(1, steps + 1):
        pick = torch.randint(len(latents), (BATCH,))
        clean, noise = latents[pick], torch.randn(BATCH, *latents.shape[1:])
        # The shape of a digit is settled at middle to high noise, so train there most.
        sigma = torch.sigmoid(torch.randn(BATCH) + 0.5)
        mix = sigma[:, None, None, None]
        noisy = (1 - mix) * clean + mix * noise
        velocity = model(noisy, sigma, contexts[pick], vectors[pick])
        losses.append(_step(optimizer, schedule, F.mse_loss(velocity, noise - clean)))
        if step % 100 == 0:
            log.info("step %d: loss %.4f", step, sum(losses[-100:]) / 100)
    last = losses[-max(1, steps // 10) :]
    return model.eval().requires_grad_(False), sum(last) / len(last)


def measure(flux: nn.Module, judge: nn.Module, per_class: int, steps: int, seed: int) -> float:
    """Fraction of generated digits that the judge reads as the label they were asked to be."""
    labels = torch.arange(CLASSES).repeat(per_class)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(labels), CHANNELS, SIDE, SIDE, generator=generator)
    dtype = next(flux.parameters()).dtype
    latent = sample(flux, noise.to(dtype), label_context(labels), label_vector(labels), steps)
    return (read_digits(judge, to_image(latent)) == labels).float().mean().item()


def main(arguments: list[str] | None = None) -> None:
    """Train, save both files with their metadata and log the measured figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3000, help="training steps of the model")
    parser.add_argument("--classifier-steps", type=int, default=1500)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options.out.mkdir(parents=True, exist_ok=True)
    # The order of float sums depends on the thread count.
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    images, labels, held_images, held_labels = load_split(options.seed)

    judge = train_classifier(images, labels, options.classifier_steps)
    accuracy = (read_digits(judge, held_images) == held_labels).float().mean().item()
    log.info("classifier: held-out accuracy %.4f", accuracy)
    facts = DATASET | {"seed": str(options.seed), "torch": torch.__version__}
    measured = {"steps": str(options.classifier_steps), "held_out_accuracy": f"{accuracy:.4f}"}
    save_file(judge.state_dict(), options.out / CLASSIFIER_FILE, metadata=facts | measured)

    flux, loss = train_flux(images, labels, options.steps)
    tensors = {name: value.to(torch.bfloat16) for name, value in flux.state_dict().items()}
    measured = {"steps": str(options.steps), "final_loss": f"{loss:.4f}"}
    save_file(tensors, options.out / FLUX_FILE, metadata=facts | measured)

    judge = load_classifier(options.out / CLASSIFIER_FILE)
    for dtype in (torch.float32, torch.bfloat16):
        shipped = load_flux(options.out / FLUX_FILE, dtype)
        read = measure(shipped, judge, per_class=50, steps=20, seed=options.seed + 1)
        log.info("%s: %.4f of 500 digits read as their label in 20 steps", dtype, read)


def _step(optimizer: torch.optim.Optimizer, schedule: OneCycleLR, loss: Tensor) -> float:
    """One optimizer update, returning the loss as a number."""
    optimizer.zero_grad()
    loss.backward()
    for group in optimizer.param_groups:
        nn.utils.clip_grad_norm_(group["params"], MAX_GRADIENT)
    optimizer.step()
    schedule.step()
    return loss.item()


if __name__ == "__main__":
    main()
