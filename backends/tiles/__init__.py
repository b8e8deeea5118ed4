"""Tiles of queries and keys in their natural order."""
