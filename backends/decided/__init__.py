"""Graphs that the data decide: from queries, keys and inputs to the pairs that are read."""
