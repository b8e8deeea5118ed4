"""Masks that people have, as specs: mask functions, configurations, arrays of booleans."""
