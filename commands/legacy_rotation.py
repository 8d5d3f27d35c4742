"""The option of commands that read int8 files of unknown rotation."""

from __future__ import annotations

import argparse

from ..loaders.survey import LEGACY_ROTATIONS


def add_legacy_rotation(command: argparse.ArgumentParser) -> None:
    """Add it to a command's parser."""
    command.add_argument(
        "--legacy-rotation",
        choices=LEGACY_ROTATIONS,
        default="auto",
        help="of int8 files that do not record whether they are rotated (default: auto)",
    )
