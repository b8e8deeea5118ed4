"""What editors ask of a text that is being written."""
