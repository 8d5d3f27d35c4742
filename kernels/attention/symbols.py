"""Finding functions of optional packages, once, with the reason where there is none."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Symbol:
    """A function, or why it cannot be had."""

    function: Callable[..., Any] | None
    reason: str = ""

    def require(self) -> Callable[..., Any]:
        """The function.

        Raises:
            RuntimeError: with the reason, if there is none.
        """
        if self.function is None:
            raise RuntimeError(self.reason)
        return self.function


@cache
def find(module: str, name: str, install: str) -> Symbol:
    """A function of a package; importing may run its code.

    Args:
        install: how to get it, for the reason.
    """
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        return Symbol(None, f"{module} cannot be imported ({error}); {install}")
    except Exception as error:  # some packages raise anything where the card or driver is missing
        return Symbol(None, f"{module} fails to import ({type(error).__name__}: {error})")
    if found is None:
        return Symbol(None, f"{module} has no {name}; {install}")
    return Symbol(found)
