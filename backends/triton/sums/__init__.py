"""Mechanisms whose weights are products of features, chunk by chunk in Triton kernels."""
