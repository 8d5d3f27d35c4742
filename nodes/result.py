"""The return value of a node that gives a MODEL and a report."""

from __future__ import annotations

from typing import Any

from ..quant.report import Report


def model_result(model: Any, report: Report) -> dict[str, Any]:
    """Outputs (MODEL, STRING), and the report in the ui output as text and as JSON.

    ComfyUI joins ui values as lists, so each is a list of one.
    """
    ui = {"leandit": [report.as_json()], "text": [report.text]}
    return {"ui": ui, "result": (model, report.text)}
