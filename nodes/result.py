"""The return value of a node that gives a report, alone or beside a MODEL."""

from __future__ import annotations

from typing import Any

from ..quant.report import Report


def report_result(report: Report, *before: Any) -> dict[str, Any]:
    """Outputs (*before, STRING), and the report in the ui output as text and as JSON.

    ComfyUI joins ui values as lists, so each is a list of one.
    """
    ui = {"leandit": [report.as_json()], "text": [report.text]}
    return {"ui": ui, "result": (*before, report.text)}


def model_result(model: Any, report: Report) -> dict[str, Any]:
    """`report_result` with outputs (MODEL, STRING)."""
    return report_result(report, model)
