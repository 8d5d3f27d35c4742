"""The training is a function of its seed."""

import torch
from leandit.demo.train import train_classifier, train_flux


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Stand-ins for the data set: (30, 8, 8) noise in [0, 1] and their labels."""
    images = torch.rand(30, 8, 8, generator=torch.Generator().manual_seed(0))
    return images, torch.arange(10).repeat(3)


def test_one_seed_trains_the_same_model_twice() -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append(train_flux(*digits(), steps=3))
    (one, loss), (other, same_loss) = runs
    assert loss == same_loss
    assert all(
        torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items()
    )


def test_one_seed_trains_the_same_judge_twice() -> None:
    heads = []
    for _ in range(2):
        torch.manual_seed(5)
        heads.append(train_classifier(*digits(), steps=3).head.weight)
    assert torch.equal(*heads)
