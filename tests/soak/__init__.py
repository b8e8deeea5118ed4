"""Differential testing: random specs, their meaning written anew, and the package held against it.

Two halves. `tree.py`, `terms.py`, `generator.py`, `drawn.py`, `scalars.py`, `meaning.py`,
`dense.py` and `truth.py` write specs and say what they mean, without the package; the others ask
the package.
"""
