"""What dense attention is estimated to cost, which every other way is measured against."""

from __future__ import annotations

from attnspec.target import Work

PAIR = 2.5e-9
"""Seconds per pair: scores, softmax and sum of values of one head of size 64, on two CPU cores."""

START = 6e-5
"""Seconds per call."""


def dense_seconds(work: Work) -> float:
    """Seconds of one head of size 64, forward."""
    return START + PAIR * work.n_q * work.n_k
