"""Layer 1: number formats, the plan (which layer becomes what, and why) and error metrics."""
