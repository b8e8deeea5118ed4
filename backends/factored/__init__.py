"""Mechanisms: sums of features, low rank, and graphs beside them."""
