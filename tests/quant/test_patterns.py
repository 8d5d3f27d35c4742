"""Layer name patterns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from leandit.quant.errors import SettingsError
from leandit.quant.patterns import parse_patterns, unmatched


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("blocks.*.q", "blocks.0.attn.q", True),
        ("blocks.*.q", "blocks.0.attn.qk", False),
        ("diffusion_model.blocks.*", "blocks.0.q", True),
        ("attn", "blocks.0.attn.q", False),
        ("re:attn", "blocks.0.attn.q", True),
        ("re:^attn", "blocks.0.attn.q", False),
        ("blocks.[0-3].*", "blocks.2.q", True),
        ("BLOCKS.*", "blocks.2.q", False),
    ],
)
def test_pattern(text: str, name: str, expected: bool) -> None:
    (pattern,) = parse_patterns(text, "include")
    assert pattern.matches(name) == expected


def test_one_pattern_a_line_and_blank_lines_are_skipped() -> None:
    assert [p.text for p in parse_patterns("\n a* \n\n re:b\n", "include")] == ["a*", "re:b"]


@given(st.text(max_size=40))
def test_any_text_gives_patterns_or_a_settings_error(text: str) -> None:
    try:
        patterns = parse_patterns(text, "include")
    except SettingsError as error:
        assert "include" in str(error)
    else:
        for pattern in patterns:
            assert pattern.matches("blocks.0.q") in (True, False)


def test_unmatched_patterns_are_named() -> None:
    patterns = parse_patterns("a*\nz*", "include")
    assert unmatched(patterns, ["abc"]) == ("z*",)
