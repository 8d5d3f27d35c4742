"""`leandit cache`: the quantized weights kept on the disk, their limit, and clearing them."""

from __future__ import annotations

import argparse
from datetime import datetime, timezone
from typing import Any

from rich.console import Console

from ..kernels.cache_folder import cache_folder
from ..loaders.weight_cache import CACHE_NAME, GB, Entry, WeightCache
from ..quant.errors import SettingsError
from .tables import megabytes, table


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
        SettingsError: for a limit that is not above 0.
        CacheError: if the folder cannot be used.
    """
    cache = WeightCache(cache_folder() / CACHE_NAME)
    data: dict[str, Any] = {"folder": str(cache.folder)}
    if options.limit is not None:
        if not 0 < options.limit < 1e9:
            raise SettingsError(f"--limit must be above 0 GB, got {options.limit}")
        cache.set_limit(int(options.limit * GB))
    if options.clear:
        data["removed_bytes"], data["kept_in_use_bytes"] = cache.clear()
        console.print(f"removed {megabytes(data['removed_bytes'])}")
    entries = cache.entries()
    console.print(
        f"{cache.folder}: {len(entries)} models, {cache.nbytes / GB:.2f} of {cache.limit / GB:g} GB"
    )
    if entries:
        rows = table(("model", "format", "size", "last used", "in use"), left=("model", "format"))
        for entry in entries:
            rows.add_row(*_cells(entry))
        console.print(rows)
    return data | {
        "limit_bytes": cache.limit,
        "bytes": cache.nbytes,
        "entries": [_json(entry) for entry in entries],
    }


def _cells(entry: Entry) -> tuple[str, ...]:
    used = datetime.fromtimestamp(entry.used).strftime("%Y-%m-%d %H:%M")
    about = entry.about
    return (
        str(about.get("model", "")),
        str(about.get("format", "")),
        megabytes(entry.nbytes),
        used,
        "yes" if entry.in_use else "",
    )


def _json(entry: Entry) -> dict[str, Any]:
    return {
        "key": entry.key,
        "bytes": entry.nbytes,
        "last_used": datetime.fromtimestamp(entry.used, timezone.utc).isoformat(),
        "in_use": entry.in_use,
        "model": entry.about.get("model"),
        "format": entry.about.get("format"),
    }
