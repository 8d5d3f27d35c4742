"""Error metrics."""

from __future__ import annotations

import math

import pytest
import torch
from leandit.quant.error import psnr_db, sqnr_db
from leandit.quant.formats import FORMATS
from leandit.quant.weight import quantize_weight


def test_psnr_of_a_known_error() -> None:
    image = torch.zeros(4, 4)
    assert psnr_db(image + 0.1, image) == pytest.approx(20.0)
    assert psnr_db(image + 0.1, image, peak=10.0) == pytest.approx(40.0)
    assert psnr_db(image, image) == math.inf


def test_an_exact_weight_has_an_infinite_ratio() -> None:
    weight = torch.zeros(2, 64)
    assert sqnr_db(weight, quantize_weight(weight, FORMATS["int8"], None)) == math.inf
