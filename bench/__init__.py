"""Layer 4: measuring this machine, for `leandit bench` and the scripts in benchmarks/."""
