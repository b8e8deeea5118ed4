"""Eigenvalues and the shape of graphs taken both ways."""
