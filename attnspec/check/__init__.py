"""Claims, lints and repairs."""
