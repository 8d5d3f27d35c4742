"""Layer 0: numbers in, numbers out. torch (and comfy-kitchen, a kernel library) only.

Letters used in every docstring: M rows (tokens), K in_features, N out_features, G rotation group.
"""
