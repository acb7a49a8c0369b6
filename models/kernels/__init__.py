"""Fused operations for accelerators: each is one kernel in Triton, and a reference in plain PyTorch for every device."""
