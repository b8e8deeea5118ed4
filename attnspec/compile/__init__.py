"""From a program to a module, in this process or as text."""
