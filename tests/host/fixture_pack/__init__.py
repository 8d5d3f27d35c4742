"""Nodes that only the host tests use: conditioning for models whose text encoders are too large."""

from __future__ import annotations

import torch


class FixtureConditioning:
    """A context and a pooled vector of the sizes a test names."""

    CATEGORY = "fixture"
    FUNCTION = "make"
    RETURN_TYPES = ("CONDITIONING",)

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "tokens": ("INT", {"default": 4, "min": 1, "max": 64}),
                "width": ("INT", {"default": 64, "min": 1, "max": 4096}),
                "pooled": ("INT", {"default": 32, "min": 0, "max": 4096}),
                "seed": ("INT", {"default": 0, "min": 0, "max": 1000}),
            }
        }

    def make(self, tokens, width, pooled, seed):
        generator = torch.Generator().manual_seed(seed)
        context = torch.randn(1, tokens, width, generator=generator)
        options = {}
        if pooled:
            options["pooled_output"] = torch.randn(1, pooled, generator=generator)
        return ([[context, options]],)


NODE_CLASS_MAPPINGS = {"FixtureConditioning": FixtureConditioning}
