"""Tables of blocks in any order of tokens, the backend of most graphs.

On the CPU disjoint steps, each in the order of tokens in which its pairs are close, go through
torch's flash kernel and are merged by their log-sum-exps: of inputs anew for every sample, of
data-dependent graphs by the choices of a call. Elsewhere plain operations compute the same tables,
or those of one step in natural order. In decoding the last few queries read their rows as they are:
the next step has another length, and nothing would be laid out for long.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from attnspec.backends.decided.products import Parts, parts_of
from attnspec.backends.one_block.backend import definition_of
from attnspec.backends.one_block.row_keys import row_keys
from attnspec.graphs.token_sets import inputs_in
from attnspec.layout.orders import NATURAL
from attnspec.layout.steps import READING, natural_tables, reading_seconds, seconds_of, work_bands
from attnspec.layout.tiling import Survey, Tiling, survey
from attnspec.limits import LIMITS
from attnspec.lower.costs import Amounts, dense_seconds, seconds_for, work_amounts, work_seconds
from attnspec.lower.work import MERGED, Heads, Kernel, Work, graph_of, inputs_read

if TYPE_CHECKING:
    import torch

TILES = (64, 512, 8192)
"""Tile sizes of one step in natural order: the first of which there are no more than
`LIMITS.tiles`."""


class TablesBackend:
    """Blocks of queries and keys in any order."""

    name = "tables"
    runs_decided = True
    takes_standing = True
    takes_scores = "static"

    def refuses(self, work: Work, device: str) -> str | None:
        if work.decided:
            return refuses_decided(work, device)
        if work.decodes or self.stepped(work, device):
            return None
        if work.reads:
            return f"it lays tables out before a call, and the graph reads {inputs_read(work)}"
        if not self.natural(work)[1]:
            size = f"{TILES[-1]:,} x {TILES[-1]:,}"
            return f"the graph needs more tiles of {size} than {LIMITS.tiles:,}"
        return None

    def cost(self, work: Work) -> float:
        if work.decided:
            return self._decided_seconds(work)
        if work.decodes:
            return work_seconds("torch", work, call=1, pair=work.n_q * len(row_keys(work)[0]))
        if not self.stepped(work, work.device):
            return self.natural(work)[0]
        # nothing is known before the inputs are; the kernel compares again for every sample
        return reading_seconds(work) if work.reads else _stepped_seconds(work)

    def _decided_seconds(self, work: Work) -> float:
        # the tensors of a call decide what it is
        beside = self._beside_lists(work)
        if _is_brought(work):
            return beside + READING * definition_of(work, work.device).cost(work)
        reads = [min(work.n_k, leaf.about_keys(work.n_k)) for leaf in work.decided]
        pairs = work.n_q * sum(reads)
        entries = work.n_q * sum(-(-count // LIMITS.tile) for count in reads)
        return beside + work_seconds("tables", work, pair=pairs, merge=entries)

    def _beside_lists(self, work: Work) -> float:
        """What a work of lists takes besides them: laying them out, and the rest of the graph."""
        seconds = work_seconds("tables", work, **{"lists" if _is_brought(work) else "layout": 1})
        parts = parts_of(work.relation)
        if parts is None or parts.rest is None:
            return seconds
        rest = replace(work, relation=parts.rest, reads=inputs_in(parts.rest))
        return seconds + self.cost(rest)

    def _most_seconds(self, work: Work) -> float:
        """From how many seconds on the lists of inputs take more than the definition, where that
        needs no more room than a mask may have."""
        whole = definition_of(work, work.device)
        small = whole.name == "torch" and _is_brought(work)
        return whole.cost(work) - self._beside_lists(work) if small else inf

    def stepped(self, work: Work, device: str) -> bool:
        """Whether steps of a work go through the flash kernel and are merged; of bent scores,
        where plain operations in natural order do not take less."""
        if device != "cpu" or work.normalize not in MERGED:
            return False
        if work.reads or not work.changes.bends:
            return True
        return _stepped_seconds(work) <= self.natural(work)[0]

    def natural(self, work: Work) -> tuple[float, int]:
        """The seconds in natural order, and the size of its tiles; infinity and 0 where every size
        makes too many."""
        for tile in TILES:
            if _natural_tiles(work, tile).tiles <= LIMITS.tiles:
                return seconds_for(self.amounts(work, tile), work.device), tile
        return inf, 0

    def amounts(self, work: Work, tile: int = 0) -> Amounts:
        """What the work takes in natural order in tiles of a size, by default its own."""
        tile = tile or self.natural(work)[1]
        tiles = _natural_tiles(work, tile)
        full, undecided = tiles.area
        pairs = min(full + undecided, work.n_q * work.n_k)
        units = {"row": tiles.q.count, "gather": pairs / tile, "masked": undecided}
        return work_amounts("tiles", work, call=1, pair=pairs, **units)

    def steps(self, work: Work) -> tuple[str, ...]:
        if work.decided:
            parts = parts_of(work.relation)
            if work.decided[0].averages or parts is None:
                return ("means of queries over all keys",)
            lines = (f"lists of `{product.leaf.name}`" for product in parts.products)
            return (*lines, *(["the rest in tables"] if parts.rest is not None else []))
        if work.decodes:
            return (f"{len(row_keys(work)[0]):,} of {work.n_k:,} keys",)
        if not self.stepped(work, work.device):
            size = self.natural(work)[1]
            return (f"natural order, tiles {size} x {size}",)
        if work.reads:
            return ("as the inputs of a call decide",)
        return tuple(str(band) for band in work_bands(work))

    def build(self, work: Work, heads: Heads, device: torch.device) -> Kernel:
        from attnspec.backends.common.composed import ComposedTables
        from attnspec.backends.one_block.dense import RowsKernel
        from attnspec.backends.tables.decided import DecidedTables, MeansKernel
        from attnspec.backends.tables.kernel import SteppedKernel
        from attnspec.backends.tables.per_sample import ReadingKernel

        if work.decided:
            (leaf, *_), parts = work.decided, parts_of(work.relation)
            if leaf.averages or parts is None:
                return MeansKernel(work, heads, device, leaf.about_keys(work.n_k))
            return DecidedTables(work, heads, device, parts, self._most_seconds(work))
        if work.decodes:
            return RowsKernel(work, heads, device)
        if not self.stepped(work, device.type):
            tables = natural_tables(work, self.natural(work)[1])
            return ComposedTables(work, heads, device, tables)
        if work.reads:
            return ReadingKernel(work, heads, device, dense_seconds(work))
        return SteppedKernel(work, heads, device)


def _is_brought(work: Work) -> bool:
    """Whether inputs bring every choice of a work."""
    return all(leaf.by_inputs for leaf in work.decided)


def refuses_decided(work: Work, device: str) -> str | None:
    """Why the tables of a work's choices are not run, or None."""
    if device != "cpu":
        return f"its kernel runs on the CPU, not on {device}"
    if work.normalize not in MERGED:
        return f"it computes softmax weights, and the spec says `normalize {work.normalize}`"
    parts = parts_of(work.relation)
    if parts is None:
        return "data-dependent graphs must be joined only by `|` and `&`, in few terms"
    alone = len(parts.products) == 1 and parts.rest is None and not parts.products[0].others
    for leaf in work.decided:
        if not alone and not leaf.beside(vars(leaf)):
            return f"`{leaf.name}` changes weights, and is joined with another graph"
        if leaf.averages and work.changes.placed:
            return "`score` depends on positions, and the mean query of a cluster has no position"
    return None


def listed_parts(work: Work, device: str) -> Parts | None:
    """The parts of a data-dependent graph beside a mechanism where lists say what is taken away;
    None where every pair is weighed by itself."""
    parts = parts_of(work.relation) if work.decided and work.hybrid else None
    few = work.n_q * work.n_k <= LIMITS.pairs_weighed
    if parts is None or few or work.changes.inputs or inputs_in(parts.rest):
        return None
    return None if refuses_decided(graph_of(work), device) else parts


def _natural_tiles(work: Work, tile: int) -> Survey:
    return survey(Tiling(work.relation, work.n_q, work.n_k, NATURAL, (tile, tile)))


def _stepped_seconds(work: Work) -> float:
    bands = work_bands(work)
    seconds = seconds_of(bands, work.copies)
    if work.changes.bends:
        # scores that are bent are computed one operation after the other
        seconds += work_seconds("dense", work, pair=sum(band.pairs for band in bands))
    return seconds
