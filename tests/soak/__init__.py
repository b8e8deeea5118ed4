"""Differential testing: random specs, and the package held against the oracle.

`terms.py` and `generator.py` write specs and `shrink.py` makes them small, without the package;
what is asked are the views, and the text itself.
"""
