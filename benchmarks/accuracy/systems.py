"""The systems that are compared: one attention each, at sizes that fit sequences of n positions."""

from __future__ import annotations

from collections.abc import Mapping

SYSTEMS: Mapping[str, str] = {
    "softmax": "attend full",
    "window": "attend window(radius = 8)",
    "Longformer": "attend window(radius = 8) | global(first(2))",
    "BigBird": "attend block(size = 8, before = 1, after = 1) | global(first(8) | last(8))"
    " | random_blocks(size = 8, blocks = 1, seed = 0)",
    "Sparse Transformer": "attend strided(stride = 8)",
    "linear": "attend linear()",
    "FAVOR+": "attend favor(features = 64, seed = 0)",
    "RFA": "attend rfa(features = 64, seed = 0)",
    "Taylor": "attend taylor(order = 1)",
    "Taylor, second order": "attend taylor(order = 2)",
    "Linformer": "attend linformer(rank = 16, max_length = {n})",
    "Nyströmformer": "attend nystrom(landmarks = 16)",
    "FNet": "attend fourier()",
    "Synthesizer": "attend synthesizer(kind = random, max_length = {n})",
    "window + linear": "attend window(radius = 8) + linear()",
}
"""What stands in the braces of each attention; `{n}` is the length of the sequences."""


def text(name: str, n: int) -> str:
    """The spec of a system for sequences of n tokens."""
    return f"attention trained {{ {SYSTEMS[name].replace('{n}', str(n))} }}"
