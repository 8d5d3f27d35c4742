"""What a user may ask of streaming."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import SettingsError

AUTO = "auto"
MODES = (AUTO, "on", "off", "report")
PREFETCHES = (AUTO, "1", "2", "3", "4")
LORAS = ("as_is", "bake")
MOST_BLOCKS = 10_000


@dataclass(frozen=True)
class OffloadSettings:
    """mode: one of MODES. resident: blocks that stay on the card, None for what ComfyUI decides.
    prefetch: blocks copied ahead. keep_free_gb: GiB of the card left to others. bake: whether LoRAs are
    merged into the weights before."""

    mode: str = AUTO
    resident: int | None = None
    prefetch: int = 1
    keep_free_gb: float = 0.0
    bake: bool = False

    @property
    def slots(self) -> int:
        """Buffers on the card: one is computed on while the others are filled."""
        return self.prefetch + 1


def offload_settings_from(
    mode: str = AUTO,
    resident: str = AUTO,
    prefetch: str = AUTO,
    keep_free_gb: float = 0.0,
    lora: str = "as_is",
) -> OffloadSettings:
    """Settings from the inputs of the node.

    Raises:
        SettingsError: naming the value, and what is valid.
    """
    for name, value, valid in (
        ("mode", mode, MODES),
        ("prefetch", str(prefetch), PREFETCHES),
        ("lora", lora, LORAS),
    ):
        if value not in valid:
            raise SettingsError(f"unknown {name} {value!r}; valid: {', '.join(valid)}")
    if not 0 <= keep_free_gb < float("inf"):
        raise SettingsError(f"keep_free_gb must be 0 or more, got {keep_free_gb}")
    return OffloadSettings(
        mode,
        _resident(str(resident)),
        1 if str(prefetch) == AUTO else int(prefetch),
        float(keep_free_gb),
        lora == "bake",
    )


def _resident(text: str) -> int | None:
    text = text.strip()
    if text in ("", AUTO):
        return None
    if not text.isascii() or not text.isdigit() or int(text) > MOST_BLOCKS:
        raise SettingsError(
            f"resident must be auto or a number of blocks, 0 to {MOST_BLOCKS}, got {text!r}"
        )
    return int(text)
