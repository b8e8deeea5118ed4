"""Every limit of the package, and every number that chooses a path or bounds memory.

They are read where they are used, as `LIMITS.piece`. `ATTNSPEC_LIMITS=tiny` takes the second number
of those that have one, so that short sequences go where long ones go; `ATTNSPEC_LIMITS=piece=64` or
`tiny,piece=64` sets single ones. The variable is read once: caches keep what was made under it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from os import environ
from typing import Any


def _limit(usual: int | tuple[int, ...], tiny: int | tuple[int, ...]) -> Any:
    return field(default=usual, metadata={"tiny": tiny})


@dataclass(frozen=True)
class Limits:
    """Above those without a second number something is refused, with its reason."""

    # the language
    text_size: int = 1 << 20  # characters or bytes of a text
    words_read: int = 40_000  # words, numbers and signs of a text
    nesting: int = 64  # brackets, or named graphs, inside one another
    problems: int = 100  # mistakes of one text, after which it is not read on
    clashes: int = 50  # settings of one layer and head that contradict each other, likewise
    files: int = 256  # files that import one another
    files_deep: int = 32  # files of a chain of imports
    layers: int = 4096  # layers, or heads, of a spec
    slots: int = 1 << 18  # layers times heads
    scopes: int = 16  # scopes inside one another
    term_size: int = 100_000  # patterns and operators of one graph, names written out
    term_depth: int = 100  # patterns, operators and functions inside one another, names written out
    term_work: int = 1_000_000  # sum of the sizes of the terms that are built for a spec
    operations: int = 1000  # operators and functions of one scalar or token set, names written out
    length: int = 2**31 - 1  # n of any sequence
    shape: int = 1 << 20  # samples, heads or numbers of a head of a plan

    # what is examined
    positions: int = 1 << 22  # n of a report or comparison
    planned: int = 1 << 20  # n that is planned, verified or drawn pair by pair
    mask: int = 32_768  # n of a dense mask: 1 GiB of booleans
    matrix: int = 4096  # n of spectra, claims, graphs and pages that need every pair
    longest_stable: int = 1024  # n of `stable` where nobody asks for longer ones
    reach_printed: int = 16_384  # n for distances of all pairs that nobody asked for
    pairs_shown: int = 8192  # n of the pairs, choices and weights that a module returns
    patterns: int = 100  # patterns of one graph
    graphs: int = 1024  # different graphs of a spec
    graphs_compared: int = 256  # different pairs of graphs that one claim compares
    places: int = 1 << 14  # layers and heads that one claim is judged for
    proofs: int = 64  # graphs, or places, for which a proof is tried
    edges: int = 2**31 - 1  # pairs of an adjacency: about 10 GB
    pairs_listed: int = 1 << 27  # pairs of a head that are listed, or scored one by one: 0.5 GiB
    pairs_evaluated: int = 1 << 28  # pairs of one graph that are evaluated, or weighed
    pairs_passed: int = 1 << 31  # pairs that one figure passes over, for each pattern or iteration
    edges_kept: int = 1 << 25  # pairs that are kept for a spectrum, or looked up one by one
    positions_listed: int = 1 << 26  # tokens of a set that are listed
    positions_computed: int = 1 << 21  # positions, for each head, whose gradients are verified
    scores_sampled: int = 1 << 24  # scores of the queries that verification samples
    dense: int = 1 << 36  # pairs of the dense kernel: 64 GB of booleans
    edges_few: int = 1 << 22  # pairs whose density does not matter to `edges`
    mask_call: int = 1 << 24  # numbers of a mask that torch's call is given
    mask_bytes: int = 1 << 30  # bytes of exported masks, or of a rival's
    blocks_classified: int = 1 << 24  # pairs of blocks of an export
    tiles: int = 1 << 20  # tiles that a layout lists
    products: int = 16  # products of chosen graphs, in one that lists run
    tile_pairs: int = 1 << 23  # pairs of tiles that are examined on one level
    iterations: int = 2000  # steps of an eigenvalue solver
    looks_grown: int = 1 << 27  # pairs that are evaluated at one length to see how counts grow
    cells_grown: int = 1 << 15  # cells of a grid, likewise

    # which path is taken
    every_pair: int = _limit(4096, 32)  # n up to which every pair is examined
    every_length: int = _limit(64, 8)  # lengths that are all tried for `stable`
    soon: int = _limit(1 << 24, 0)  # pairs or hops that are gone through without a thought
    wide: int = _limit(16, 2)  # progressions of a row from which on other ways of counting pay
    terms: int = _limit(64, 8)  # conjunctions of one form or count; nothing is proven beyond
    parts: int = _limit(12, 3)  # terms of a union that orders tell apart; parts of an `or`
    left_out: int = _limit(3, 1)  # relations that counting leaves out; beyond, pairs are listed
    width: int = _limit(64, 2)  # progressions of a row in closed form
    runs: int = _limit(16, 2)  # progressions that a set of tokens, or one side, is written as
    period: int = _limit(1 << 20, 16)  # positions of a period that is looked for
    slices: int = _limit(64, 2)  # ranges that are written as slices, one by one
    few_queries: int = _limit(8, 0)  # queries that are followed one by one
    eigenvalues: int = _limit(1024, 2)  # n for which all eigenvalues are computed
    blocks_looked: int = _limit(1 << 22, 16)  # rows times blocks that are asked what is forced
    blocks_touched: int = _limit(32, 2)  # pairs of random blocks that a tile is known by
    values: int = _limit(1 << 20, 256)  # pairs at which a predicate is tried for its values
    pairs_sampled: int = _limit(1 << 18, 64)  # pairs up to which sampled rows are evaluated
    pairs_counted: int = _limit(1 << 20, 64)  # the same for estimates of edges
    rows_written: int = _limit(1 << 11, 4)  # rows that are listed rather than sampled
    tiles_followed: int = _limit(1 << 13, 4096)  # tiles that an estimate follows to the next level
    tile_pairs_surveyed: int = _limit(1 << 16, 64)  # pairs of tiles of a level, before a sample
    queries_sampled: int = _limit(64, 20)  # queries that verification samples
    pairs_tallied: int = _limit(1 << 21, 256)  # pairs that are listed for a picture
    tally_work: int = _limit(1 << 26, 256)  # progressions times cells that are counted one by one
    pairs_short: int = _limit(1 << 16, 0)  # pairs whose form the definition tells
    pairs_weighed: int = _limit(1 << 18, 0)  # pairs beside a mechanism that need no lists
    compared: int = _limit(1 << 17, 16)  # n up to which a graph is compared with the causal one
    rows_looked_up: int = _limit(16, 1)  # queries of a step of generation
    ranges_read: int = _limit(8, 1)  # ranges of keys that a step reads, before a list of keys
    classes: int = _limit(2048, 8)  # residue classes of an order
    orders: int = _limit(16, 3)  # orders that are tried for a term
    tokens_ordered: int = _limit(4096, 8)  # tokens that an order lists
    fused: int = _limit(1 << 22, 64)  # scores from which on torch's fused call is taken
    table: int = _limit(1 << 26, 64)  # entries of a table of rows and the blocks they read
    lookups: int = _limit(1024, 2)  # rows that are looked up as quickly as a tile is sorted
    grouped: int = _limit(4, 2)  # scores of a group whose maxima are examined first

    # how much at once
    piece: int = _limit(1 << 20, 256)  # numbers of the largest temporary of a kernel
    product: int = _limit(1 << 20, 128)  # numbers of one product: what stays in the cache
    partials: int = _limit(1 << 23, 512)  # numbers of the partial results of a chunk
    queries_together: int = _limit(1 << 18, 64)  # numbers of queries of a part
    heads_together: int = _limit(1 << 20, 256)  # numbers of queries or keys of some heads
    pairs_at_once: int = _limit(1 << 22, 64)  # pairs that are evaluated in one go
    listed_at_once: int = _limit(1 << 18, 16)  # pairs or progressions that are listed in one go
    rows_listed: int = _limit(256, 2)  # rows that are listed in one go at least
    rows_least: int = _limit(16, 2)  # the same for a layout
    rows_drawn: int = _limit(1 << 12, 3)  # rows that are drawn, or sorted, in one go
    drawn_at_once: int = _limit(1 << 14, 8)  # random numbers that are drawn in one go
    words_gathered: int = _limit(1 << 21, 4)  # words of 64 keys that a sweep gathers in one go
    columns: int = _limit(1 << 10, 4)  # columns of the hashes of some rounds
    stream: int = _limit(256, 4)  # positions that are streamed in one go
    ring: int = _limit(32, 2)  # positions for which a ring of keys is examined
    feature_chunk: int = _limit(64, 4)  # positions of a chunk of features
    taylor_chunk: int = _limit(512, 4)  # the same for the Taylor formula
    tile_sizes: tuple[int, ...] = _limit((32, 64, 128, 256), (4, 8))  # positions, on offer
    tile: int = _limit(64, 4)  # positions of a tile where nothing is chosen
    side: int = _limit(64, 4)  # positions of the finest tiles in which pairs are looked for
    fanout: int = _limit(8, 2)  # tiles of a level in one of the next
    coarsest: int = _limit(64, 4)  # tiles on a side of the coarsest level
    tall: int = _limit(48, 4)  # rows of a tile from which on it meets all keys in one product
    narrow: int = _limit(64, 0)  # queries or keys of a block for which products take less time
    tallest: int = _limit(2048, 16)  # rows of a block
    blocks_covered: int = _limit(2048, 4)  # blocks on a side of a cover

    # what is kept
    masks: int = _limit(1 << 25, 0)  # numbers of the masks of all rows of tiles
    mask_shared: int = _limit(1 << 22, 64)  # numbers of a mask that several rows share
    mask_kept: int = _limit(1 << 20, 64)  # numbers of a mask of one block or padding
    buffer: int = _limit(1 << 24, 64)  # numbers of a buffer for the next call
    layouts: int = _limit(64, 2)  # layouts of an engine, tables of a device, answers of verify
    layouts_few: int = _limit(32, 1)  # layouts of samples, paddings, steps and programs
    paddings_laid_out: int = _limit(4, 1)  # paddings of a kernel
    draws: int = _limit(8, 1)  # draws of rotations and centroids
    rows_kept: int = _limit(2, 1)  # positions of a stream whose rows are kept
    answers: int = _limit(1024, 1)  # works, or answers of the definition

    @classmethod
    def of(cls, text: str) -> Limits:
        """The limits of `tiny`, `NAME=NUMBER`, or several of them with commas between."""
        chosen: dict[str, Any] = {}
        metadata: Mapping[str, Any] = {each.name: each.metadata for each in fields(cls)}
        for word in filter(None, text.split(",")):
            name, _, number = word.partition("=")
            if word == "tiny":
                chosen |= {name: each["tiny"] for name, each in metadata.items() if "tiny" in each}
            elif name in metadata and number.isdecimal():
                chosen[name] = int(number)
            else:
                raise ValueError(f"ATTNSPEC_LIMITS: `tiny` or NAME=NUMBER, got {word!r}")
        return cls(**chosen)


LIMITS = Limits.of(environ.get("ATTNSPEC_LIMITS", ""))
