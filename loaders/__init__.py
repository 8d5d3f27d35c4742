"""Layer 2: files."""
