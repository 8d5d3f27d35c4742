"""The regular-Hadamard rotation of ConvRot.

H4 = [[1,1,1,-1],[1,1,-1,1],[1,-1,1,1],[-1,1,1,1]], composed by Kronecker products and divided by
sqrt(G): orthogonal, symmetric, its own inverse. The Sylvester-Hadamard matrix of QuaRot is a
different matrix; weights rotated with one are noise under the other.
Source: ConvRot (arXiv 2512.03673) and comfy-kitchen's eager backend.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def is_rotation_group(group_size: int) -> bool:
    """True for the sizes a regular Hadamard matrix exists for here: 4, 16, 64, 256, 1024, ..."""
    return (
        group_size >= 4
        and group_size & (group_size - 1) == 0
        and (group_size.bit_length() - 1) % 2 == 0
    )


def regular_hadamard(
    group_size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The (G, G) rotation: `kron(H4, kron(H4, ...)) / sqrt(G)`. Its entries are exact powers of two.

    Raises:
        ValueError: if `group_size` is not a power of 4.
    """
    if not is_rotation_group(group_size):
        raise ValueError(
            f"rotation group {group_size} is not a power of 4; "
            "the regular Hadamard matrix exists for 4, 16, 64, 256, 1024"
        )
    h4 = torch.ones(4, 4, dtype=dtype, device=device) - 2 * torch.eye(
        4, dtype=dtype, device=device
    ).flip(0)
    matrix = h4
    while matrix.shape[0] < group_size:
        matrix = torch.kron(matrix, h4)
    return matrix / group_size**0.5


def sylvester_hadamard(
    group_size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The (G, G) matrix of QuaRot: `kron(H2, kron(H2, ...)) / sqrt(G)`, H2 = [[1,1],[1,-1]].

    Only for reading files that were rotated with it; nothing here writes it.

    Raises:
        ValueError: if `group_size` is not a power of 2.
    """
    if group_size < 2 or group_size & (group_size - 1):
        raise ValueError(f"Sylvester's Hadamard matrix has no size {group_size}, only powers of 2")
    h2 = torch.tensor([[1, 1], [1, -1]], dtype=dtype, device=device)
    matrix = h2
    while matrix.shape[0] < group_size:
        matrix = torch.kron(matrix, h2)
    return matrix / group_size**0.5


def rotate(
    x: torch.Tensor, group_size: int, hadamard: Callable[..., torch.Tensor] = regular_hadamard
) -> torch.Tensor:
    """Rotate every contiguous group of G columns, in the dtype of `x`.

    Equals `(x.unflatten(-1, (K // G, G)) @ H.T).flatten(-2)` for x of shape (..., K). Applying it
    twice gives `x` back up to rounding.

    The product is written with `H.T` although H is symmetric: BLAS libraries round small products
    differently for a transposed operand, and the codes must equal those of comfy-kitchen.

    Args:
        hadamard: makes the matrix; `regular_hadamard` except for files of other tools.

    Raises:
        ValueError: if G does not divide K or the matrix has no size G.
    """
    k = x.shape[-1]
    if k % group_size:
        raise ValueError(f"rotation group {group_size} does not divide K={k}")
    matrix = hadamard(group_size, x.dtype, x.device)
    groups = x.reshape(-1, k // group_size, group_size)
    return torch.matmul(groups, matrix.T).reshape(x.shape)


def rotate_in_steps(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """`rotate` of a float32 tensor by radix-4 steps: G log4(G) additions in place of G * G products.

    One step over each pair of index bits, from the lowest up: `out[i] = (a + b) + (c + d) - 2 *
    x[3 - i]`. Every CUDA kernel of this package adds in this order, so it gives their bits; `rotate`
    itself differs in the last bit.

    Args:
        x: (..., K) float32.

    Raises:
        ValueError: if G does not divide K or is not a power of 4.
    """
    k = x.shape[-1]
    if k % group_size or not is_rotation_group(group_size):
        raise ValueError(f"rotation group {group_size} is no power of 4 or does not divide K={k}")
    stride = 1
    flat = x.reshape(-1)
    while stride < group_size:
        parts = flat.view(-1, 4, stride)
        a, b, c, d = parts.unbind(1)
        total = (a + b) + (c + d)
        flat = (total.unsqueeze(1) - 2 * parts.flip(1)).reshape(-1)
        stride *= 4
    return (flat * group_size**-0.5).view(x.shape)
