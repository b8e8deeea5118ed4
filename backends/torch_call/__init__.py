"""Torch's own attention, as one would call it by hand."""
