"""One file per backend of the INT8 linear."""
