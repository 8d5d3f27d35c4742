"""Keeping something in a cache folder: whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def keep_whole(path: Path, content: bytes) -> None:
    """Write a file under a temporary name and then give it its own.

    A folder that cannot be written only costs the next session the time to make the content again.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(
            dir=path.parent, prefix=f".{path.name}.", suffix=".part"
        )
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
