"""Keep pytest from importing the checkout root as a package.

The root holds the `__init__.py` ComfyUI loads. pytest 8 and newer would import it without a parent
package, under the name of whatever folder the checkout is in, and every relative import would fail.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent


class RootIsAPlainFolder:
    """Collects the checkout root as a folder. A hook in this file would not be asked about it."""

    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Dir | None:
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RootIsAPlainFolder(), "root-is-a-plain-folder")
    # The models are tiny: on a busy machine, threads waiting for each other cost 30 times more.
    torch.set_num_threads(1)
    # No timing decides a test: neither a deadline nor how fast a busy machine makes up inputs.
    settings.register_profile(
        "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any machine")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line that says whether the tests on a real ComfyUI ran."""
    counts = {
        outcome: sum("host" in report.keywords for report in terminalreporter.getreports(outcome))
        for outcome in ("passed", "failed", "skipped")
    }
    if not any(counts.values()):
        line = "host tests: none selected"
    elif counts["passed"] + counts["failed"] == 0:
        line = "host tests: did not run, no ComfyUI found"
    else:
        line = f"host tests: ran, {counts['passed']} passed and {counts['failed']} failed"
    terminalreporter.write_line(line)
