"""Random terms of the language, for properties that every term must have."""

from __future__ import annotations

import random

import numpy as np

from attnspec.graphs.bind import Situation, bind
from attnspec.graphs.patterns import BY_NAME
from attnspec.ir.program import Compound, Leaf, Term, TokenCompound, Tokens, TokenTerm
from attnspec.ir.scalars import Apply, Scalar, Symbol

N = Symbol("n")


def scalar(draw: random.Random, least: int = 0) -> Scalar:
    """A size of at least `least` at every n >= 0."""
    match draw.randrange(4):
        case 0:
            return Apply("max", (least, Apply("isqrt", (N,))))
        case 1:
            return Apply("+", (least, Apply("//", (N, draw.randint(2, 4)))))
        case _:
            return least + draw.choice((0, 0, 1, 2, 3, 5))


def tokens(draw: random.Random, depth: int = 2) -> TokenTerm:
    """A token set without inputs."""
    if depth and draw.random() < 0.4:
        op = draw.choice("|&-~")
        parts = 1 if op == "~" else draw.randint(2, 3)
        return TokenCompound(op, tuple(tokens(draw, depth - 1) for _ in range(parts)))
    match draw.randrange(4):
        case 0:
            return Tokens("first", (scalar(draw),))
        case 1:
            return Tokens("last", (scalar(draw),))
        case 2:
            return Tokens("every", (scalar(draw, 1), scalar(draw)))
        case _:
            first = draw.randint(0, 6)
            return Tokens("positions", (first, first + draw.randint(0, 2)))


def leaf(draw: random.Random) -> Leaf:
    """A pattern with its arguments in the order of the IR."""
    q, k = Symbol("q"), Symbol("k")
    arguments: dict[str, object] = {}

    def size() -> Scalar:
        return scalar(draw)

    def one() -> Scalar:
        return scalar(draw, 1)

    name = draw.choice(
        "full self causal window before dilated residue strided block summary fixed global rows"
        " columns powers random random_blocks expander where prefix".split()
    )
    match name:
        case "window":
            arguments = {"radius": size()}
        case "before":
            name, arguments = "window", {"before": size(), "after": draw.choice((0, 0, 2))}
        case "dilated":
            arguments = {"radius": size(), "step": one()}
        case "residue":
            arguments = {"step": one()}
        case "strided":
            arguments = {"stride": one()}
        case "block":
            arguments = {"size": one(), "before": size(), "after": size()}
        case "summary" | "fixed":
            arguments = {"stride": one(), "cells": one()}
        case "global" | "rows" | "columns":
            arguments = {"tokens": tokens(draw)}
        case "powers":
            arguments = {"base": draw.randint(2, 3)}
        case "random":
            arguments = {"keys": draw.randint(0, 3), "seed": draw.randint(0, 9), "per_head": True}
        case "random_blocks":
            arguments = {"size": draw.randint(1, 4), "blocks": draw.randint(0, 2)}
            arguments |= {"seed": draw.randint(0, 9), "per_head": True}
        case "expander":
            arguments = {"degree": 2 * draw.randint(1, 2), "seed": draw.randint(0, 9)}
            arguments |= {"per_head": True}
        case "where":
            gap = Apply("-", (q, k))
            arguments = {
                "predicate": draw.choice(
                    (
                        Apply("<=", (k, q)),
                        Apply("==", (Apply("%", (gap, draw.randint(1, 4))), 0)),
                        Apply("within", (gap, -draw.randint(0, 3), draw.randint(0, 3))),
                    )
                )
            }
        case "prefix":
            arguments = {"length": size()}
        case _:
            pass
    return Leaf(name, tuple(sorted(arguments.items())))  # type: ignore[arg-type]


def term(draw: random.Random, depth: int = 3) -> Term:
    """A graph of a few patterns."""
    if not depth or draw.random() < 0.3:
        return leaf(draw)
    op = draw.choice(("|", "|", "&", "&", "-", "~", "transpose", "shift"))
    parts = draw.randint(2, 3) if op in "|&-" else 1
    by = draw.randint(-3, 3) if op == "shift" else None
    return Compound(op, tuple(term(draw, depth - 1) for _ in range(parts)), by)


def mask(graph: Term, n: int, causal: bool = False) -> np.ndarray:
    """The pairs of a term at n by definition, bool [n, n]."""
    relation = bind(graph, Situation(n=n, patterns=BY_NAME, causal=causal))
    i = np.arange(n)
    held = np.asarray(relation.holds(i[:, None], i[None, :], n), bool)
    return np.broadcast_to(held, (n, n))
