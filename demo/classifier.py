"""A small convolutional reader of 8x8 digits, the judge of what the demo model draws."""

from os import PathLike

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from .digits import CLASSES, SIDE


class DigitClassifier(nn.Module):
    """(B, 8, 8) images in [0, 1] -> (B, 10) float32 logits."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(64 * (SIDE // 4) ** 2, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.dropout(self.features(images[:, None]).flatten(1)))


def load_classifier(path: str | PathLike[str]) -> DigitClassifier:
    """Read a classifier from a safetensors file, float32 on the CPU, in eval mode."""
    model = DigitClassifier()
    model.load_state_dict(load_file(path))
    return model.eval().requires_grad_(False)


@torch.no_grad()
def read_digits(classifier: nn.Module, images: Tensor) -> Tensor:
    """(B, 8, 8) images of any float dtype, clamped to [0, 1] -> (B,) int64 labels."""
    return classifier(images.float().clamp(0, 1)).argmax(dim=1)
