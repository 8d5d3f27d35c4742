"""The regular-Hadamard rotation."""

from __future__ import annotations

import pytest
import torch
from leandit.kernels.hadamard import is_rotation_group, regular_hadamard, rotate

H4 = [[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]


def test_the_smallest_rotation_is_h4_halved() -> None:
    assert torch.equal(regular_hadamard(4), torch.tensor(H4, dtype=torch.float32) / 2)


@pytest.mark.parametrize("group", [4, 16, 64, 256, 1024])
def test_the_rotation_is_symmetric_and_its_own_inverse_for_group(group: int) -> None:
    matrix = regular_hadamard(group, torch.float64)
    assert torch.equal(matrix, matrix.T)
    assert torch.equal(matrix @ matrix, torch.eye(group, dtype=torch.float64))
    assert torch.equal(matrix.sum(0), torch.ones(group, dtype=torch.float64))


@pytest.mark.parametrize("group", [0, 1, 2, 8, 32, 100, 128, 512, -16])
def test_no_rotation_exists_for_group(group: int) -> None:
    assert not is_rotation_group(group)
    with pytest.raises(ValueError, match=f"{group} is not a power of 4"):
        regular_hadamard(group)


@pytest.mark.parametrize("group", [16, 64, 256])
@pytest.mark.parametrize("shape", [(1, 256), (3, 5, 512), (0, 256)], ids=["row", "3-D", "empty"])
def test_rotating_equals_the_naive_product_in_float64(group: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    matrix = regular_hadamard(group, torch.float64)
    expected = torch.empty(shape, dtype=torch.float64)
    for start in range(0, shape[-1], group):
        expected[..., start : start + group] = x[..., start : start + group].double() @ matrix
    assert torch.allclose(rotate(x, group).double(), expected, atol=1e-5, rtol=0)
    assert rotate(x, group).shape == x.shape


@pytest.mark.parametrize("group", [16, 64, 256])
@pytest.mark.parametrize("rows", [1, 3, 64, 1000])
def test_rotating_a_weight_gives_the_bits_of_comfy_kitchen(group: int, rows: int) -> None:
    from comfy_kitchen.backends.eager.quantization import rotate_int8_convrot_weight

    weight = torch.randn(rows, 768, generator=torch.Generator().manual_seed(rows))
    assert torch.equal(rotate(weight, group), rotate_int8_convrot_weight(weight, group))


def test_rotating_twice_gives_the_input_back() -> None:
    x = torch.randn(7, 512, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.allclose(rotate(rotate(x, 256), 256), x, atol=1e-13, rtol=0)


def test_a_group_that_does_not_divide_k_is_an_error() -> None:
    with pytest.raises(ValueError, match="rotation group 64 does not divide K=100"):
        rotate(torch.zeros(2, 100), 64)
