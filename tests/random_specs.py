"""Random well-formed specs, compositions first: seeded, so that a failure names its case."""

from __future__ import annotations

import random
from collections.abc import Sequence

LEAVES = (
    "full",
    "self",
    "causal",
    "window(radius = {small})",
    "window(before = {small}, after = {tiny})",
    "dilated(radius = {large}, step = {step})",
    "residue(step = {step})",
    "strided(stride = {step})",
    "block(size = {step}, before = {tiny}, after = {bit})",
    "summary(stride = {step}, cells = {bit})",
    "fixed(stride = {step}, cells = {tiny})",
    "global(first({tiny}) | last({bit}))",
    "global(every({step}))",
    "rows(positions({tiny}, 5, 9..12))",
    "columns(every({step}, offset = {bit}))",
    "powers(base = 2)",
    "powers(base = 3)",
    "random(keys = {tiny}, seed = {seed})",
    "random_blocks(size = {step}, blocks = {bit}, seed = {seed})",
    "expander(degree = 2, seed = {seed})",
    "prefix({small})",
    "where((q * {tiny} + k * 3) % {step} == 0)",
    "where(q // {step} >= k // {step} and k % 3 != 1)",
)


def spec_text(seed: int) -> str:
    """One attention with one to three heads, each a composition of up to five patterns."""
    source = random.Random(seed)
    causal = "    causal\n" if source.random() < 0.4 else ""
    heads = source.choice((0, 0, 2, 3))
    if not heads:
        return f"attention a {{\n{causal}    attend {_graph(source, 3)}\n}}\n"
    scopes = "".join(f"    head {head} {{ attend {_graph(source, 2)} }}\n" for head in range(heads))
    return f"attention a {{\n{causal}    heads {heads}\n{scopes}}}\n"


def _graph(source: random.Random, depth: int, leaves: Sequence[str] = LEAVES) -> str:
    kind = source.random()
    if depth == 0 or kind < 0.2:
        return _leaf(source, leaves)
    first, second = _graph(source, depth - 1, leaves), _graph(source, depth - 1, leaves)
    if kind < 0.6:
        return f"({first} | {second})"
    if kind < 0.75:
        return f"({first} & {second})"
    if kind < 0.87:
        return f"({first} - {second})"
    if kind < 0.92:
        return f"~{_leaf(source, leaves)}"
    if kind < 0.96:
        return f"transpose({first})"
    return f"shift({first}, by = {source.randint(-7, 7)})"


def _leaf(source: random.Random, leaves: Sequence[str]) -> str:
    return source.choice(leaves).format(
        bit=source.randint(0, 1) + 1,
        tiny=source.randint(1, 4),
        small=source.randint(0, 40),
        large=source.randint(0, 90),
        step=source.randint(2, 24),
        seed=source.randint(0, 99),
    )
