"""`leandit cache`: the quantized weights kept on the disk, their limit, and clearing them."""

from __future__ import annotations

import argparse
from datetime import datetime, timezone
from typing import Any

from rich.console import Console

from ..kernels.cache_folder import cache_folder
from ..loaders.weight_cache import CACHE_NAME, GB, Entry, WeightCache
from ..quant.errors import SettingsError
from ..quant.report import size_text
from .tables import table


def add_cache(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the command line's parsers."""
    keep = commands.add_parser(
        "cache", help="show or clear the quantized weights kept on the disk, or set their limit"
    )
    keep.add_argument("--clear", action="store_true", help="remove all that is not in use")
    keep.add_argument("--limit", type=float, metavar="GB", help="most gigabytes to keep")
    keep.set_defaults(run=run_cache)
    return keep


def run_cache(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Do what is asked, print what is there, and give the JSON form.

    Raises:
        SettingsError: for a limit that is no number above 0.
        CacheError: if the folder cannot be used.
    """
    cache = WeightCache(cache_folder() / CACHE_NAME)
    data: dict[str, Any] = {"folder": str(cache.folder)}
    removed = None
    if options.limit is not None:
        if not 0 < options.limit < 1e9:
            raise SettingsError(f"--limit must be a number of GB above 0, got {options.limit}")
        removed = cache.set_limit(int(options.limit * GB))
    if options.clear:
        removed, data["kept_in_use_bytes"] = cache.clear()
    if removed is not None:
        data["removed_bytes"] = removed
        console.print(f"removed {size_text(removed)}{_kept(cache, options.clear)}")
    entries = cache.entries()
    count = "1 entry" if len(entries) == 1 else f"{len(entries)} entries"
    console.print(
        f"{cache.folder}: {count}, {size_text(cache.nbytes)} of at most {size_text(cache.limit)}"
    )
    if entries:
        columns = ("file", "model", "format", "size", "last used", "in use", "key")
        rows = table(columns, left=("file", "model", "format", "key"))
        for entry in entries:
            rows.add_row(*_cells(entry))
        console.print(rows)
    return data | {
        "limit_bytes": cache.limit,
        "bytes": cache.nbytes,
        "entries": [_json(entry) for entry in entries],
    }


def _kept(cache: WeightCache, cleared: bool) -> str:
    """What stays although it was to go, and why."""
    above = cache.nbytes - (0 if cleared else cache.limit)
    if above <= 0:
        return ""
    return (
        f"; {size_text(above)} stay, a running ComfyUI uses them: stop it, or have it free its models "
        "(POST /free), and ask again"
    )


def _cells(entry: Entry) -> tuple[str, ...]:
    used = datetime.fromtimestamp(entry.used).strftime("%Y-%m-%d %H:%M")
    about = entry.about
    return (
        str(about.get("file") or "?"),
        str(about.get("model", "")),
        str(about.get("format", "")),
        size_text(entry.nbytes),
        used,
        "yes" if entry.in_use else "",
        entry.key[:8],
    )


def _json(entry: Entry) -> dict[str, Any]:
    return {
        "key": entry.key,
        "bytes": entry.nbytes,
        "last_used": datetime.fromtimestamp(entry.used, timezone.utc).isoformat(),
        "in_use": entry.in_use,
        "file": entry.about.get("file"),
        "model": entry.about.get("model"),
        "format": entry.about.get("format"),
    }
