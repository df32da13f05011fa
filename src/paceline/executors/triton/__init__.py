"""Kernels for GPUs, in Triton: paged attention and products with 4-bit weights."""
