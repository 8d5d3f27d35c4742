"""Files with diffusers' names, given in the names ComfyUI's models have."""
