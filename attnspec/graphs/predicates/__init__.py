"""Predicates of `where` taken apart: ranges, residues, periods, bounds of distances."""
