"""Who decides which graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnspec.backends.decided import cluster, lists, lsh, sinkhorn, topk
from attnspec.backends.decided.choice import Choice
from attnspec.backends.decided.given import Given
from attnspec.graphs.relation import DataDependent

DECIDERS: dict[str, Callable[[Any, Given], Choice]] = {
    "chosen": lists.decide_chosen,
    "topk": topk.decide,
    "lsh": lsh.decide,
    "cluster": cluster.decide,
    "sinkhorn": sinkhorn.decide,
}


def decide(leaf: DataDependent, given: Given) -> Choice:
    """The choice of a graph for the tensors of a call."""
    return DECIDERS[leaf.name](leaf, given)
