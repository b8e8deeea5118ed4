"""Random specs for the planner to choose for: compositions whose sizes suit thousands of tokens.

Seeded, so that a row names its case. What is correct is tested on smaller ones, in tests/.
"""

from __future__ import annotations

import random

LEAVES = (
    "window(radius = {width})",
    "window(before = {width}, after = 0)",
    "dilated(radius = {far}, step = {step})",
    "residue(step = {stride})",
    "strided(stride = {stride})",
    "fixed(stride = {stride}, cells = {few})",
    "block(size = {block}, before = {few}, after = 1)",
    "summary(stride = {stride}, cells = {few})",
    "global(first({some}))",
    "global(first({few}) | every({stride}))",
    "columns(every({stride}))",
    "powers(base = 2)",
    "random(keys = {some}, seed = {seed})",
    "random_blocks(size = {block}, blocks = {few}, seed = {seed})",
    "expander(degree = {some}, seed = {seed})",
    "where((q * {few} + k * 3) % {stride} == 0)",
)


def random_text(seed: int) -> str:
    """One attention, causal or not, of one to four patterns."""
    source = random.Random(seed)
    causal = "causal " if source.random() < 0.4 else ""
    return f"attention drawn {{ {causal}attend {_graph(source, 2)} }}"


def _graph(source: random.Random, depth: int) -> str:
    kind = source.random()
    if depth == 0 or kind < 0.25:
        return _leaf(source)
    first, second = _graph(source, depth - 1), _graph(source, depth - 1)
    if kind < 0.75:
        return f"({first} | {second})"
    return f"({first} & {second})" if kind < 0.85 else f"({first} - {second})"


def _leaf(source: random.Random) -> str:
    return source.choice(LEAVES).format(
        few=source.randint(1, 4),
        some=source.choice((4, 16, 32, 64)),
        width=source.choice((16, 60, 128, 300, 511, 1000)),
        far=source.choice((512, 1000, 2048)),
        step=source.randint(2, 16),
        stride=source.choice((11, 32, 64, 100, 128, 256)),
        block=source.choice((32, 64, 100, 256)),
        seed=source.randint(0, 99),
    )
