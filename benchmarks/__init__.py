"""What is measured, against what, and how: README.md."""
