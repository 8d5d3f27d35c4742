"""Errors a user's settings or weights can cause. The message says what, where and what to do."""

from __future__ import annotations


class QuantError(ValueError):
    """Base of everything this package refuses to quantize."""


class SettingsError(QuantError):
    """A format, group size, preset or pattern that does not exist or cannot be read."""


class WeightError(QuantError):
    """A weight that cannot be quantized, such as one that holds NaN."""


class NothingSelectedError(QuantError):
    """The plan selects no layer at all."""
