"""A rule that turns one name, or several that ComfyUI holds as one, into another."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """target is made of sources, stacked along dim 0 in their order.

    Names are of modules, so that weight, bias and scales follow; `*` is a block number. A name
    that ends in `!` is a tensor's whole name. change: "" none, "swap" the halves along dim 0,
    "flatten" to one dimension.
    """

    target: str
    sources: tuple[str, ...]
    change: str = ""


@dataclass(frozen=True)
class Family:
    """The rules of a model family, and the names by which its diffusers files are recognised.

    without names tensors that only relatives have, whose files are not of this family.
    """

    name: str
    signs: tuple[str, ...]
    rules: tuple[Rule, ...]
    without: tuple[str, ...] = ()

    def recognises(self, names: frozenset[str]) -> bool:
        """Whether a file with these tensors, without prefix, is of this family."""
        return names.issuperset(self.signs) and not names.intersection(self.without)


@dataclass(frozen=True)
class Place:
    """Where a module or tensor goes: part `index` of `count` of `target`."""

    target: str
    index: int
    count: int
    change: str


def rules(text: str) -> tuple[Rule, ...]:
    """Rules from lines `source -> target`, `source -> target (swap)` or `a + b + c -> target`.

    `{x,y}` in a line stands for the line with x and the line with y, on both sides.
    """
    made = []
    for line in filter(None, map(str.strip, text.strip().splitlines())):
        for plain in _expand(line):
            left, _, right = plain.partition(" -> ")
            target, _, change = right.partition(" (")
            sources = tuple(source.strip() for source in left.split(" + "))
            made.append(Rule(target.strip(), sources, change.rstrip(")")))
    return tuple(made)


def _expand(line: str) -> Iterable[str]:
    choice = re.search(r"\{([^}]*)\}", line)
    if choice is None:
        yield line
        return
    count = len(choice.group(1).split(","))
    for index in range(count):
        yield re.sub(r"\{([^}]*)\}", lambda found: found.group(1).split(",")[index], line)  # noqa: B023


class Renamer:
    """Places names by a family's rules."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self._patterns = [
            (re.compile(re.escape(source).replace(r"\*", r"(\d+)") + r"\Z"), rule, index)
            for rule in family.rules
            for index, source in enumerate(rule.sources)
        ]

    def place(self, name: str) -> Place | None:
        """Where a module goes, or a tensor if `name` ends in `!`; None if no rule knows it."""
        for pattern, rule, index in self._patterns:
            found = pattern.match(name)
            if found is not None:
                target = rule.target
                for number in found.groups():
                    target = target.replace("*", number, 1)
                return Place(target.removesuffix("!"), index, len(rule.sources), rule.change)
        return None
