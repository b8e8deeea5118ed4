"""Claims, lints and hints."""
