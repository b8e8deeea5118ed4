"""Timing a spec beside others, and measuring the rates of a machine."""
