"""Lists of single edges."""
