"""`leandit doctor`: what this machine can run, and why not."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from .. import doctor


def add_doctor(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the command line's parsers."""
    check = commands.add_parser("doctor", help="say what this machine can run, and why not")
    check.set_defaults(run=run_doctor)
    return check


def run_doctor(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print the findings, and give the JSON form."""
    findings = doctor.examine()
    for finding in findings:
        mark, style = ("ok", "green") if finding.ok else ("--", "yellow")
        remedy = f" ({finding.remedy})" if finding.remedy else ""
        console.print(f"{mark}  ", style=style, end="")
        line = f"{finding.subject}: {finding.text}{remedy}"
        console.print(line)
    return doctor.as_json(findings)
