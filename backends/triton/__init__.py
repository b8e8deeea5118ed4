"""Tile lists in Triton kernels: every step of a graph in its own order, on the GPU; and sums of
features in chunks."""
