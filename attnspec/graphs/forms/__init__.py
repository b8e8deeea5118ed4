"""Graphs in normal form, as unions of conjunctions of conditions, and what follows for every n."""
