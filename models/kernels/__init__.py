"""Fused operations for accelerators: losses, grouped products and sinks, each with kernels in Triton."""
