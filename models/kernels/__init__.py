"""Fused operations for accelerators: losses and grouped products, each with kernels in Triton."""
