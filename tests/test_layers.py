"""The import rules of the layers, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "kernels": set(),
    "quant": {"kernels"},
    "loaders": {"kernels", "quant"},
    "host": {"kernels", "quant", "loaders"},
    "nodes": {"kernels", "quant", "loaders", "host"},
    "demo": {"kernels", "quant", "loaders"},
    "doctor": {"kernels"},
    "bench": {"kernels", "quant"},
    "commands": {"kernels", "quant", "loaders", "demo", "doctor", "bench"},
    "cli": {"commands", "quant", "loaders"},
    "__main__": {"cli"},
    "__init__": {"nodes"},
}
"""Which of our packages each may import, besides itself."""

COMFYUI = {
    "comfy",
    "comfy_api",
    "comfy_extras",
    "comfy_execution",
    "folder_paths",
    "nodes",
    "server",
    "execution",
}


def sources() -> list[Path]:
    files = [*ROOT.glob("*.py")]
    for package in ("kernels", "quant", "loaders", "host", "nodes", "demo", "bench", "commands"):
        files += (ROOT / package).rglob("*.py")
    return [file for file in files if file.name != "conftest.py"]


def imports(file: Path) -> list[tuple[int, str, bool]]:
    """(level, module, at top) of every import in a file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    top = set(map(id, tree.body))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module] if module else [alias.name for alias in node.names]
            found += [(node.level, name, id(node) in top) for name in names]
        elif isinstance(node, ast.Import):
            found += [(0, alias.name, id(node) in top) for alias in node.names]
    return found


def layer_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def target_layer(file: Path, level: int, module: str) -> str:
    """Which of our layers a relative import reaches."""
    parts = list(file.relative_to(ROOT).parent.parts)
    base = parts[: len(parts) - (level - 1)]
    return [*base, *module.split(".")][0]


@pytest.mark.parametrize("file", sources(), ids=lambda file: str(file.relative_to(ROOT)))
def test_a_module_imports_only_lower_layers(file: Path) -> None:
    layer = layer_of(file)
    for level, module, _top in imports(file):
        if level == 0:
            assert module.split(".")[0] != "leandit", f"{file}: absolute import of {module}"
            if layer != "host":
                assert module.split(".")[0] not in COMFYUI, f"{file}: imports {module}"
        else:
            target = target_layer(file, level, module)
            assert target == layer or target in MAY_IMPORT[layer], f"{file}: imports {target}"


def test_nodes_import_host_only_inside_the_method_that_runs() -> None:
    for file in (ROOT / "nodes").rglob("*.py"):
        for level, module, top in imports(file):
            if level and target_layer(file, level, module) == "host":
                assert not top, f"{file} imports host at the top"


@pytest.mark.parametrize("file", sources(), ids=lambda file: str(file.relative_to(ROOT)))
def test_a_module_stays_under_400_lines(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 400
