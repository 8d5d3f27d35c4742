"""Where a real ComfyUI is: COMFYUI_PATH, the parent custom_nodes, or ~/ComfyUI. Prints the path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MISSING = "no ComfyUI found (COMFYUI_PATH, the parent custom_nodes, or ~/ComfyUI)"


def find_comfyui() -> Path | None:
    """The ComfyUI folder, or None. A COMFYUI_PATH that is set decides alone."""
    named = os.environ.get("COMFYUI_PATH")
    if named is not None:
        return Path(named) if is_comfyui(Path(named)) else None
    places = [Path.home() / "ComfyUI"]
    if ROOT.parent.name == "custom_nodes":
        places.insert(0, ROOT.parent.parent)
    return next((place for place in places if is_comfyui(place)), None)


def is_comfyui(folder: Path) -> bool:
    return (folder / "comfy" / "model_patcher.py").is_file() and (folder / "main.py").is_file()


if __name__ == "__main__":
    found = find_comfyui()
    if found is None:
        sys.exit(1)
    sys.stdout.write(str(found))
