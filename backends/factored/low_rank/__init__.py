"""Low-rank and mixing mechanisms."""
