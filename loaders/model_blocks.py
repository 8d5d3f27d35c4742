"""The blocks of a model in a file, and what they weigh in each format: from its header alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from ..quant import towers
from ..quant.families import family_of
from ..quant.plan import Layer, Quantize, make_plan
from ..quant.settings import QuantSettings
from .architecture import image_model_of
from .contents import Contents, contents
from .describe import WEIGHT, describe_layers
from .errors import CheckpointError
from .reader import Checkpoint, open_checkpoint
from .survey import survey
from .writer import weight_specs


@dataclass(frozen=True)
class ModelBlocks:
    """blocks: bytes of each repeated block as it would be stored; outside: bytes of everything else;
    parameters: weights of Linears in the blocks; width: the model's inner width; family: if known."""

    blocks: tuple[int, ...]
    outside: int
    parameters: int
    width: int
    family: str | None


@dataclass(frozen=True)
class ModelFile:
    """A file whose blocks have been found."""

    checkpoint: Checkpoint
    contents: Contents
    layers: tuple[Layer, ...]
    family: str | None

    def blocks(self, settings: QuantSettings | None) -> ModelBlocks:
        """The blocks with these settings, or as they are in the file."""
        selected: dict[str, Quantize] = {}
        if settings is not None:
            plan = make_plan(self.layers, settings, family_of(self.family))
            selected = {decision.layer.name: decision for decision in plan.selected}
        sizes: dict[str, int] = {}
        for item in self.contents.plain:
            name = item.name.removesuffix(WEIGHT)
            sizes[item.name] = item.nbytes
            if item.name.endswith(WEIGHT) and name in selected:
                sizes[item.name] = _quantized_bytes(selected[name])
        for item in self.contents.layers:
            sizes[f"{item.name}{WEIGHT}"] = item.nbytes
            if item.name in selected:
                sizes[f"{item.name}{WEIGHT}"] = _quantized_bytes(selected[item.name])
        return self._group(sizes)

    def _group(self, sizes: dict[str, int]) -> ModelBlocks:
        positions = towers.locate(layer.name for layer in self.layers)
        main = {p.tower for p in positions.values() if p.tower is not None and p.helper is None}
        blocks: dict[str, int] = defaultdict(int)
        outside = 0
        for name, nbytes in sizes.items():
            block = _block_of(name, main)
            if block is None:
                outside += nbytes
            else:
                blocks[block] += nbytes
        inside = [layer for layer in self.layers if _block_of(layer.name, main) is not None]
        widths = Counter(layer.k for layer in inside)
        return ModelBlocks(
            blocks=tuple(blocks.values()),
            outside=outside,
            parameters=sum(layer.n * layer.k for layer in inside),
            width=widths.most_common(1)[0][0] if widths else 0,
            family=self.family,
        )


def read_model_file(path: Path) -> ModelFile:
    """Find a file's blocks; only headers and small tensors are read.

    Raises:
        CheckpointError: if the file is damaged or has no repeated blocks.
    """
    found = survey(open_checkpoint(path), "none")
    found.require_loadable()
    items = contents(found)
    layers = tuple(describe_layers(items))
    names = [*(item.name for item in items.plain), *(f"{i.name}{WEIGHT}" for i in items.layers)]
    positions = towers.locate(layer.name for layer in layers)
    if not any(position.tower for position in positions.values()):
        raise CheckpointError(path, "has no repeated blocks", "it is no diffusion transformer")
    return ModelFile(found.checkpoint, items, layers, image_model_of(names))


def _quantized_bytes(decision: Quantize) -> int:
    layer = decision.layer
    return sum(spec.nbytes for spec in weight_specs("", decision.format, layer.n, layer.k))


def _block_of(name: str, towers_found: Set[str]) -> str | None:
    """`double_blocks.3` for any tensor in it; None outside of the main blocks."""
    parts = name.split(".")
    for index in range(1, len(parts)):
        if parts[index].isdigit() and ".".join(parts[:index]) in towers_found:
            return ".".join(parts[: index + 1])
    return None
