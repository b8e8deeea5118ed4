"""Decoding: the last queries over all keys."""
