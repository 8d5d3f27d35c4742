"""The offload node's inputs as one checked value."""

from __future__ import annotations

from typing import Any

import pytest
from leandit.quant.errors import SettingsError
from leandit.quant.offload_settings import OffloadSettings, offload_settings_from


def test_the_defaults_leave_everything_to_comfyui() -> None:
    assert offload_settings_from() == OffloadSettings("auto", None, 1, 0.0, False)


def test_numbers_may_come_as_text_or_as_numbers() -> None:
    made: Any = offload_settings_from
    assert made("on", " 12 ", "3", 1.5, "bake") == OffloadSettings("on", 12, 3, 1.5, True)
    assert made(resident=0, prefetch=4).resident == 0
    assert made(prefetch=4).slots == 5
    assert made(resident="").resident is None


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"mode": "fast"}, "unknown mode 'fast'; valid: auto, on, off, report"),
        ({"prefetch": "5"}, "unknown prefetch '5'; valid: auto, 1, 2, 3, 4"),
        ({"lora": "keep"}, "unknown lora 'keep'; valid: as_is, bake"),
        ({"resident": "half"}, "resident must be auto or a number of blocks, 0 to 10000"),
        ({"resident": "-1"}, "got '-1'"),
        ({"resident": "10001"}, "got '10001'"),
        ({"resident": "\u0664"}, "resident must be"),
        ({"keep_free_gb": -0.1}, "keep_free_gb must be 0 or more, got -0.1"),
        ({"keep_free_gb": float("nan")}, "got nan"),
        ({"keep_free_gb": float("inf")}, "got inf"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else next(iter(value)),
)
def test_what_is_wrong_is_named_with_what_is_right(inputs: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words.replace("(", r"\(")):
        offload_settings_from(**inputs)
    assert offload_settings_from(resident="10000").resident == 10_000
