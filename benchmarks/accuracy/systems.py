"""The systems that are compared: one attention each, at sizes that fit sequences of n positions."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt

from benchmarks.accuracy.training import Size

SYSTEMS: Mapping[str, str] = {
    "softmax": "attend full",
    "window": "attend window(radius = {eighth})",
    "Longformer": "attend window(radius = {eighth}) | global(first(2))",
    "BigBird": "attend block(size = {eighth}, before = 1, after = 1)"
    " | global(first({eighth}) | last({eighth}))"
    " | random_blocks(size = {eighth}, blocks = 1, seed = 0)",
    "Sparse Transformer": "attend strided(stride = {root})",
    "linear": "attend linear()",
    "FAVOR+": "attend favor(features = 32, seed = 0)",
    "RFA": "attend rfa(features = 32, floor = 0.135, seed = 0)",
    "Taylor": "attend taylor(order = 1)",
    "Taylor, second order": "attend taylor(order = 2)",
    "Linformer": "attend linformer(rank = {quarter}, max_length = {n})",
    "Nyströmformer": "attend nystrom(landmarks = {quarter})",
    "FNet": "attend fourier()",
    "Synthesizer": "attend synthesizer(kind = random, max_length = {n})",
    "window + linear": "attend window(radius = {eighth}) + linear()",
    "window + FAVOR+": "attend window(radius = {eighth}) + favor(features = 32, seed = 0)",
    "each token alone": "attend window(radius = 0)",
}
"""What stands in the braces of each attention, in terms of the length n of the sequences, an eighth
and a quarter of it, and its root."""


def text(name: str, n: int) -> str:
    """The spec of a system for sequences of n tokens."""
    return spelled(SYSTEMS[name], n)


def spelled(body: str, n: int, layers: int = Size.layers) -> str:
    """A spec of what stands in `SYSTEMS`, or might, for sequences of n tokens."""
    body = body.format(n=n, eighth=max(1, n // 8), quarter=max(1, n // 4), root=max(1, isqrt(n)))
    return f"attention trained {{ layers {layers} {body} }}"
