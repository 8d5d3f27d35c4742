"""The judge of the demo's digits."""

from pathlib import Path

import pytest
import torch
from leandit.demo import classifier as module
from leandit.demo.classifier import load_classifier, read_digits
from safetensors import safe_open

FILE = Path(module.__file__).with_name("digits_classifier.safetensors")


@pytest.fixture(scope="module")
def classifier() -> module.DigitClassifier:
    """The shipped judge."""
    return load_classifier(FILE)


def test_the_shipped_file_is_small_and_says_where_it_comes_from() -> None:
    assert FILE.stat().st_size < 300_000
    with safe_open(FILE, "pt") as file:
        facts = file.metadata()
    assert facts["seed"] == "0"
    assert "CC BY 4.0" in facts["dataset_license"]
    assert float(facts["held_out_accuracy"]) >= 0.97


def test_held_out_digits_are_read_right(classifier: module.DigitClassifier) -> None:
    pytest.importorskip("sklearn")
    from leandit.demo.train import load_split

    _, _, images, labels = load_split(seed=0)
    right = (read_digits(classifier, images) == labels).float().mean().item()
    assert len(labels) == 360
    assert right >= 0.97


def test_values_outside_the_range_are_clamped(classifier: module.DigitClassifier) -> None:
    images = torch.rand(20, 8, 8, generator=torch.Generator().manual_seed(0)).round()
    stretched = (images - 0.5) * 6 + 0.5
    assert torch.equal(read_digits(classifier, stretched), read_digits(classifier, images))
    assert read_digits(classifier, images.bfloat16()).dtype == torch.int64
