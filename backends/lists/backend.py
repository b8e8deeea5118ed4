"""Lists of tiles that the data decide: entries sorted by key tile, computed in few large products.

For graphs of which a part is decided by queries, keys or inputs. The decided graphs are taken apart
from the rest, which runs in tables; results are merged by their log-sum-exps.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from attnspec.backends.lists.products import Parts, parts_of
from attnspec.backends.tables.backend import TablesBackend
from attnspec.graphs.relation import Relation
from attnspec.graphs.token_sets import inputs_in
from attnspec.limits import LIMITS
from attnspec.lower.costs import seconds_for, weighed
from attnspec.lower.work import MERGED, Kernel, Work

if TYPE_CHECKING:
    import torch


class ListsBackend:
    """Decided lists of tiles, and the rest in tables."""

    name = "lists"
    runs_decided = True
    takes_standing = True

    def refuses(self, work: Work, device: str) -> str | None:
        if device != "cpu":
            return f"its kernel runs on the CPU, not on {device}"
        if not work.decided:
            return "nothing of the graph is decided by data"
        if work.normalize not in MERGED:
            return f"results that `{work.normalize}` normalises are not merged by log-sum-exps"
        parts = parts_of(work.relation)
        if parts is None:
            return (
                "decided graphs stand under something else than `|` and `&`, or in too many terms"
            )
        alone = len(parts.products) == 1 and parts.rest is None and not parts.products[0].others
        for leaf in work.decided:
            if not alone and not leaf.beside(vars(leaf)):
                return f"`{leaf.name}` changes weights, and another graph stands beside it"
            if leaf.averages and work.needs_distance:
                return "scores change with the distance, and means of queries have none"
        return None

    def cost(self, work: Work) -> float:
        # the tensors of a call decide what it is
        reads = [min(work.n_k, leaf.about_keys(work.n_k)) for leaf in work.decided]
        pairs = work.n_q * sum(reads)
        entries = work.n_q * sum(-(-count // LIMITS.tile) for count in reads)
        units = {"layout": 1, "pair": pairs, "merge": entries}
        seconds = seconds_for(weighed("tables", units, copies=work.copies))
        rest = _parts(work.relation).rest
        if rest is None:
            return seconds
        return seconds + TablesBackend().cost(replace(work, relation=rest, reads=inputs_in(rest)))

    def steps(self, work: Work) -> tuple[str, ...]:
        if work.decided[0].averages:
            return ("means of queries over all keys",)
        parts = _parts(work.relation)
        lines = [f"lists of `{product.leaf.name}`" for product in parts.products]
        return (*lines, *(["the rest in tables"] if parts.rest is not None else []))

    def build(self, work: Work, heads: tuple[int, ...], device: torch.device) -> Kernel:
        from attnspec.backends.lists.kernel import ListedKernel
        from attnspec.backends.lists.means import MeansKernel

        (leaf, *_) = work.decided
        if leaf.averages:
            return MeansKernel(work, heads, device, leaf.about_keys(work.n_k))
        return ListedKernel(work, heads, device, _parts(work.relation))


@lru_cache(maxsize=64)
def _parts(relation: Relation) -> Parts:
    found = parts_of(relation)
    if found is None:
        raise ValueError("this graph is not taken apart")
    return found
