"""Smaller specs with the same finding: statements, terms and numbers are left out one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from oracle.tree import Attention, Node, Scope, Statement, pattern

MOST = 150
"""The most smaller specs that are tried."""


def shrunk(spec: Attention, fails: Callable[[Attention], bool]) -> Attention:
    """The smallest spec found on the way down that still fails."""
    tried, going = 0, True
    while going and tried < MOST:
        going = False
        for smaller in _smaller(spec):
            tried += 1
            if tried > MOST:
                break
            if fails(smaller):
                spec, going = smaller, True
                break
    return spec


def _smaller(spec: Attention) -> Iterator[Attention]:
    if len(spec.claims) > 1:
        for index in range(len(spec.claims)):
            yield replace(spec, claims=(spec.claims[index],))
    elif spec.claims:
        yield replace(spec, claims=())
    for body in _bodies(spec.body):
        yield replace(spec, body=body)
    if not any(isinstance(each, Scope) for each in spec.body):
        yield from (replace(spec, layers=None) for _ in range(spec.layers is not None))
        yield from (replace(spec, heads=None) for _ in range(spec.heads is not None))
    if spec.causal:
        yield replace(spec, causal=False)
    for index in range(len(spec.lets)):
        yield replace(spec, lets=(*spec.lets[:index], *spec.lets[index + 1 :]))
    for index in range(len(spec.parameters)):
        kept = (*spec.parameters[:index], *spec.parameters[index + 1 :])
        names = {called for called, _ in kept}
        overrides = tuple(each for each in spec.overrides if each[0] in names)
        yield replace(spec, parameters=kept, overrides=overrides)
    for index in range(len(spec.graphs)):
        yield replace(spec, graphs=(*spec.graphs[:index], *spec.graphs[index + 1 :]))
    for index in range(len(spec.inputs)):
        yield replace(spec, inputs=(*spec.inputs[:index], *spec.inputs[index + 1 :]))
    if spec.extra_tokens:
        yield replace(spec, extra_tokens=0)
    if spec.grid:
        yield replace(spec, grid=())
    for index, claim in enumerate(spec.claims):
        for expr in _inner(claim.expr):
            less = replace(claim, expr=expr)
            yield replace(spec, claims=(*spec.claims[:index], less, *spec.claims[index + 1 :]))


def _bodies(body: tuple[Statement, ...]) -> Iterator[tuple[Statement, ...]]:
    for index, each in enumerate(body):
        before, after = body[:index], body[index + 1 :]
        if isinstance(each, Scope):
            yield (*before, *after)
            for inner in _bodies(each.body):
                yield (*before, replace(each, body=inner), *after)
        else:
            if each.kind != "attend":
                yield (*before, *after)
            for less in _inner(each):
                yield (*before, less, *after)


def _inner(node: Node) -> Iterator[Node]:
    """The expression with one of its parts replaced by a part of that."""
    for index, part in enumerate(node.parts):
        if not isinstance(part, Node):
            continue
        for less in (*_instead(part), *_inner(part)):
            yield Node(node.kind, (*node.parts[:index], less, *node.parts[index + 1 :]))


_GRAPHS = ("pattern", "graph", "transpose", "shift", "g|", "g&", "g-", "g~")


def _instead(node: Node) -> Iterator[Node]:
    """What of the same sort may stand in place of an expression."""
    if node.kind in ("g|", "g&", "g-", "g~", "transpose", "shift"):
        yield from (each for each in node.nodes if each.kind in _GRAPHS)
    elif node.kind in ("t|", "t&", "t-", "t~", "and", "or", "not"):
        yield from node.nodes
    elif node.kind in ("+", "-", "*", "//", "call", "neg", "%", "min", "max"):
        yield from node.nodes
    elif node.kind == "pattern" and node.parts[0] not in ("self", "full"):
        yield pattern("self")
        yield pattern("full")
    elif node.kind == "arg" and node.parts[0] == "seed":
        yield from ()
