"""Pairs counted exactly."""
