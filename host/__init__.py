"""Layer 3: the only code that imports ComfyUI."""
