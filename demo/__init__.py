"""The demo model: a tiny Flux-shaped DiT trained on scikit-learn's handwritten digits."""
