"""Layer name patterns, one a line: a glob, or a regular expression after `re:`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from .errors import SettingsError

MODEL_PREFIX = "diffusion_model."
"""Prefix of layer names in a MODEL; patterns may carry it or leave it out."""


@dataclass(frozen=True)
class Pattern:
    """One pattern as the user wrote it, ready to match layer names."""

    text: str
    regex: re.Pattern[str] | None

    def matches(self, name: str) -> bool:
        """A glob must match the whole name (`*` also crosses dots); `re:` may match anywhere."""
        if self.regex is not None:
            return self.regex.search(name) is not None
        return fnmatchcase(name, self.text.removeprefix(MODEL_PREFIX))


def parse_patterns(text: str, setting: str) -> tuple[Pattern, ...]:
    """Read a multi-line setting; blank lines are skipped.

    Args:
        text: the patterns, one a line.
        setting: name of the setting, for the error message.

    Raises:
        SettingsError: for a regular expression that does not compile or an empty `re:`.
    """
    return tuple(_parse(line.strip(), setting) for line in text.splitlines() if line.strip())


def _parse(line: str, setting: str) -> Pattern:
    if not line.startswith("re:"):
        return Pattern(line, None)
    expression = line.removeprefix("re:").strip()
    if not expression:
        raise SettingsError(f"{setting}: {line!r} has no expression after 're:'")
    try:
        return Pattern(line, re.compile(expression))
    except re.error as error:
        where = "" if error.pos is None else f" at position {error.pos}"
        raise SettingsError(
            f"{setting}: {line!r} is not a valid regular expression: {error.msg}{where}"
        ) from error


def unmatched(patterns: Iterable[Pattern], names: Iterable[str]) -> tuple[str, ...]:
    """Texts of the patterns that match none of `names`."""
    names = tuple(names)
    return tuple(p.text for p in patterns if not any(p.matches(name) for name in names))
