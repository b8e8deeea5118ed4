"""Data-dependent graphs: from queries, keys and inputs to the pairs that are read."""
