"""ComfyUI's list of diffusion models, and where a name in it lies."""

from __future__ import annotations

from pathlib import Path

import folder_paths

FOLDER = "diffusion_models"


def model_names() -> list[str]:
    """The names a loader node offers."""
    return folder_paths.get_filename_list(FOLDER)


def model_path(name: str) -> Path:
    """The file of a name.

    Raises:
        FileNotFoundError: if ComfyUI has no such file any more.
    """
    return Path(folder_paths.get_full_path_or_raise(FOLDER, name))


def output_path(filename_prefix: str) -> Path:
    """The file in ComfyUI's output folder for a prefix, which may name subfolders and %date% parts.

    Raises:
        Exception: ComfyUI's own, if the prefix leads out of the output folder.
    """
    folder = folder_paths.get_output_directory()
    place, name, *_ = folder_paths.get_save_image_path(filename_prefix, folder)
    return Path(place) / f"{name}.safetensors"
