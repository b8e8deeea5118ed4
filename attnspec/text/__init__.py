"""Text with places in it, what is wrong with it, and the catalogue of messages."""
