"""Weights kept in the bytes another tool stored, for formats ComfyUI has no layout for."""
