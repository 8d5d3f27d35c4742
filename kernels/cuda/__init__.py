"""CUDA kernels of our own, compiled on the user's machine by NVIDIA's runtime compiler."""
