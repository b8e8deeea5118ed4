"""What is computed, in plain data: orders of positions, tiles, lists of edges."""
