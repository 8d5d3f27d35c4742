"""The report as JSON and as text."""

from __future__ import annotations

import json
import math

from leandit.kernels.backends.kitchen import Route
from leandit.quant.plan import Layer, make_plan
from leandit.quant.report import LayerResult, quantize_report
from leandit.quant.settings import settings_from


def make_report(ratios: list[float]):
    model = [Layer(f"blocks.{i}.q", 64, 256, 32768) for i in range(len(ratios))]
    model.append(Layer("final.linear", 64, 256, 32768))
    settings = settings_from()
    plan = make_plan(model, settings, None)
    results = {f"blocks.{i}.q": LayerResult(16640, ratio) for i, ratio in enumerate(ratios)}
    route = Route("eager", {"cuda": "CUDA not available"})
    return quantize_report(
        "LeanDiTQuantizeModel",
        plan,
        results,
        settings,
        (4_000_000_000, 2_100_000_000),
        route,
        "cpu",
        3,
        1.26,
    )


def test_the_json_has_the_public_keys_and_no_infinity() -> None:
    report = make_report([41.234, math.inf, 39.0, 42, 43, 44, 45]).as_json()
    assert set(report) == {"node", "summary", "layers", "notes"}
    text = json.dumps(report, allow_nan=False)
    assert json.loads(text) == report
    assert report["summary"]["worst_sqnr_db"] == 39.0
    assert [w["name"] for w in report["summary"]["worst_layers"]][:2] == [
        "blocks.2.q",
        "blocks.0.q",
    ]
    assert len(report["summary"]["worst_layers"]) == 5
    assert report["layers"][0] == {
        "name": "blocks.0.q",
        "format": "int8_convrot",
        "group_size": 256,
        "shape": [64, 256],
        "bytes_before": 32768,
        "bytes": 16640,
        "sqnr_db": 41.23,
        "reason": "one of 7 repeated blocks",
    }
    assert report["layers"][-1]["format"] is None


def test_the_text_says_what_was_done_what_not_and_why() -> None:
    text = make_report([41.2, 39.0]).text
    assert "quantized 2 of 3 layers to int8_convrot, preset auto, in 1.3 s on cpu" in text
    assert "model: 4.00 GB -> 2.10 GB (52 %)" in text
    assert "largest layer runs on: comfy-kitchen eager (not cuda: CUDA not available)" in text
    assert "LoRAs merged into 3 weights" in text
    assert "39.0 dB  blocks.1.q" in text
    assert "1 x outside the repeated blocks" in text
