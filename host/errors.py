"""Errors about a MODEL or its place in the graph."""

from __future__ import annotations


class HostError(RuntimeError):
    """The MODEL cannot be used as asked; the message says why and what to change."""
