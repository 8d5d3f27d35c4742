"""What attention did in one sampling run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class AttentionLog:
    """Counts of a run. calls: by backend and reason; steps, layers: those in which a backend ran;
    quality: what the check found, by backend and shape; dropped: backends given up, and why;
    replaced: whether another node's attention runs in place of the selector."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    steps: dict[str, set[int]] = field(default_factory=dict)
    layers: dict[str, set[int]] = field(default_factory=dict)
    shapes: Counter[str] = field(default_factory=Counter)
    quality: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    layers_named: bool = True
    replaced: bool = False

    def count(
        self, backend: str, reason: str, shape: str, step: int | None, layer: int | None
    ) -> None:
        """One more call."""
        self.calls[backend, reason] += 1
        self.shapes[shape] += 1
        if step is not None:
            self.steps.setdefault(backend, set()).add(step)
        if layer is not None:
            self.layers.setdefault(backend, set()).add(layer)

    def as_json(self) -> dict[str, Any]:
        """The public form."""
        return {
            "calls": [
                {"backend": backend, "reason": reason, "count": count}
                for (backend, reason), count in self.calls.most_common()
            ],
            "steps": {name: sorted(steps) for name, steps in self.steps.items()},
            "layers": {name: sorted(layers) for name, layers in self.layers.items()},
            "quality": dict(self.quality),
            "dropped": dict(self.dropped),
        }

    def text(self) -> str:
        """A few lines for people."""
        if not self.calls and self.replaced:
            return "attention: 0 calls seen. Another node has set its own attention after this one"
        if not self.calls:
            return (
                "attention: 0 calls seen. This model does not ask for ComfyUI's attention in a way "
                "that can be chosen, so the node does nothing for it"
            )
        lines = [f"attention: {sum(self.calls.values())} calls"]
        for (backend, reason), count in self.calls.most_common():
            lines.append(f"  {count} x {backend}" + (f" ({reason})" if reason else ""))
        for backend, steps in self.steps.items():
            layers = self.layers.get(backend)
            where = f", layers {as_ranges(layers)}" if layers else ""
            lines.append(f"  {backend}: steps {as_ranges(steps)}{where}")
        lines += [f"  {what}: {found}" for what, found in self.quality.items()]
        lines += [f"  {name} given up: {why}" for name, why in self.dropped.items()]
        if not self.layers_named:
            lines.append("  the model does not number its layers: they are counted in each call")
        return "\n".join(lines)


def as_ranges(numbers: set[int]) -> str:
    """`{0, 1, 2, 5}` as `0-2, 5`."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
