"""Attention backends behind one contract: tensors (B, H, N, D), and a reason for every refusal."""
