"""Every static spec of the zoo against its definition, written here from the paper or library.

`ZOO` names a file, smaller parameters that make short sequences interesting, and the definition;
`TRANSLATIONS` does the same for masks of libraries that test_libraries.py has no like of. A
definition gets column vectors of queries, row vectors of keys and a `Case`, and shares nothing with
the compiler.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import attnspec
from attnspec.graphs.stack import decides, has_mechanism

EXAMPLES = Path(str(resources.files("attnspec.examples")))
SIZES = (1, 2, 7, 64, 127, 130)

Array = np.ndarray
Definition = Callable[[Array, Array, SimpleNamespace], "Array | bool"]
Inputs = Callable[[int], Mapping[str, "Array | int"]]


@dataclass(frozen=True)
class Row:
    """One mask: a spec (a file's stem, or text), what it must be, and where to look."""

    spec: str
    allow: Definition
    parameters: dict[str, int] = field(default_factory=dict)
    slots: tuple[tuple[int, int], ...] = ((0, 0),)
    sizes: tuple[int, ...] = SIZES
    inputs: Inputs = lambda n: {}

    def expected(self, n: int, layer: int, head: int) -> Array:
        case = SimpleNamespace(n=n, layer=layer, head=head, **self.parameters, **self.inputs(n))
        q, k = np.arange(n)[:, None], np.arange(n)[None, :]
        return np.broadcast_to(self.allow(q, k, case), (n, n))


# --- inputs ------------------------------------------------------------------------------------


def documents(n: int) -> Array:
    """Runs of equal numbers, as packed texts have them, of lengths 1 to 24."""
    lengths = np.random.default_rng(n).integers(1, 25, n)
    return np.repeat(np.arange(n), lengths)[:n]


def marked(n: int, seed: int = 0) -> Array:
    return np.random.default_rng([n, seed]).random(n) < 0.15


def starts(ids: Array) -> Array:
    """The offset of each position inside its run."""
    first = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]])
    return np.arange(len(ids)) - first[np.searchsorted(first, np.arange(len(ids)), "right") - 1]


def families(n: int) -> dict[str, Array]:
    """Families of three documents, the first of which is the prompt of the other two."""
    document = documents(n)
    return {"document": document, "family": document // 3, "prompt": document % 3 == 0}


def tree(n: int) -> dict[str, Array | int]:
    """A prompt and a random draft tree of three levels; `parent` is for the definition alone."""
    rng, prompt = np.random.default_rng(n), n // 2
    parent, level = np.full(n, -1), np.zeros(n, int)
    path = np.full((4, n), -1)
    for i in range(prompt, n):
        open_nodes = [j for j in range(prompt, i) if level[j] < 3]
        if open_nodes and rng.random() < 0.8:
            parent[i] = rng.choice(open_nodes)
            level[i] = level[parent[i]] + 1
            path[:, i] = path[:, parent[i]]
        else:
            level[i] = 1
        path[level[i], i] = i
    return {
        "prompt": prompt, "parent": parent, "at1": level == 1, "at2": level == 2,
        "path1": path[1], "path2": path[2],
    }  # fmt: skip


# --- definitions that take more than a line ----------------------------------------------------


def ancestors(c: SimpleNamespace, parent: Array, depth: int) -> Array:
    """k is q or one of its ancestors, by walking up from q."""
    mask = np.eye(c.n, dtype=bool)
    for i in range(c.n):
        at = i
        for _ in range(depth):
            at = parent[at] if at >= 0 else -1
            if at >= 0:
                mask[i, at] = True
    return mask


def heap_parents(c: SimpleNamespace) -> Array:
    parent = np.full(c.n, -1)
    for i in range(c.prompt + 1, c.n):
        parent[i] = c.prompt + (i - c.prompt - 1) // c.b
    return parent


def log_sparse(c: SimpleNamespace) -> Array:
    mask = np.eye(c.n, dtype=bool)
    for i in range(c.n):
        distance = 1
        while distance <= i:
            mask[i, i - distance] = True
            distance *= 2
    return mask


def boxed(extent: int, size: int, step: int = 1) -> Array:
    """Along one axis: the `size` nearest of the pixels in one's residue class, cut to fit."""
    mask = np.zeros((extent, extent), dtype=bool)
    for i in range(extent):
        lane = list(range(i % step, extent, step))
        start = min(max(lane.index(i) - size // 2, 0), len(lane) - size)
        mask[i, lane[start : start + size]] = True
    return mask


def tiled(extent: int, tile: int, reach: int) -> Array:
    return np.kron(boxed(extent // tile, 2 * reach + 1), np.ones((tile, tile), dtype=bool))


def outer(*axes: Array) -> Array:
    """The mask of a grid whose axes are independent, row-major."""
    mask = np.ones((1, 1), dtype=bool)
    for axis in axes:
        mask = np.kron(mask, axis)
    return mask


def cells(c: SimpleNamespace) -> tuple[Array, Array, Array, Array]:
    """Rows and columns of queries, and of keys."""
    row, column = np.divmod(np.arange(c.n), c.width)
    return row[:, None], column[:, None], row[None, :], column[None, :]


def swin(c: SimpleNamespace) -> Array:
    """Swin's own recipe: roll, number the regions, cut windows, compare."""
    shift = c.size // 2 if c.layer % 2 else 0
    index = np.arange(c.n).reshape(c.height, c.width)
    region = np.zeros((c.height, c.width), int)
    if shift:
        parts = (slice(0, -c.size), slice(-c.size, -shift), slice(-shift, None))
        for label, (rows, columns) in enumerate((r, s) for r in parts for s in parts):
            region[rows, columns] = label
        index = np.roll(index, (-shift, -shift), (0, 1))
    mask = np.zeros((c.n, c.n), dtype=bool)
    for top in range(0, c.height, c.size):
        for left in range(0, c.width, c.size):
            window = np.s_[top : top + c.size, left : left + c.size]
            pixels, number = index[window].ravel(), region[window].ravel()
            mask[np.ix_(pixels, pixels)] = number[:, None] == number[None, :]
    return mask


def expand(layout: Array, block: int, n: int) -> Array:
    return np.kron(layout, np.ones((block, block), dtype=bool))[:n, :n]


def openai_fixed(c: SimpleNamespace) -> Array:
    blocks, stride = -(-c.n // c.block), c.stride // c.block
    columns = list(range(stride - 1, -1, -1))
    vertical = [columns[i * c.size : (i + 1) * c.size] for i in range(c.verticals)]
    layout = np.zeros((blocks, blocks), dtype=bool)
    for i in range(blocks):
        for j in range(i + 1):
            own = i // stride == j // stride
            layout[i, j] = own or j % stride in vertical[c.head % c.verticals]
    return np.tril(expand(layout, c.block, c.n))


def deepspeed_fixed(c: SimpleNamespace) -> Array:
    blocks = -(-c.n // c.block)
    layout = np.zeros((blocks, blocks), dtype=bool)
    for i in range(0, blocks, c.local):
        layout[i : i + c.local, i : i + c.local] = True
    first = c.local - (1 + c.head % c.patterns) * c.globals
    end = blocks - blocks % c.local
    for i in range(first, end, c.local):
        layout[:, i : i + c.globals] = True
    if end < blocks:
        start = min(end + first, blocks - c.globals)
        layout[:, start : start + c.globals] = True
    return expand(layout, c.block, c.n)


def longformer_layer(q: Array, k: Array, c: SimpleNamespace) -> Array:
    """Windows in equal steps from low to high; gaps of 1, 2, 3 in layers 6-7, 8-9, 10-11."""
    size = c.low + (c.high - c.low) * c.layer // 11
    gaps = {6: 1, 7: 1, 8: 2, 9: 2, 10: 3, 11: 3}.get(c.layer, 0) if c.head < 2 else 0
    distance = q - k
    return np.isin(distance, np.arange(size + 1) * (gaps + 1))


def sparse_videogen(q: Array, k: Array, c: SimpleNamespace) -> Array:
    p, t = c.prompt, c.tokens
    if c.head == 0:
        return np.asarray((k < p + t) | (q < p) | (abs(q - k) < c.width * t // 128 * 128))
    near = abs((q - p) % t - (k - p) % t) < c.width * t // c.frames
    return np.asarray((q < p) | (k < p) | near)


def block_diffusion(q: Array, k: Array, c: SimpleNamespace) -> Array:
    half = c.n // 2
    clean_q, clean_k = q >= half, k >= half
    block_q = np.where(clean_q, q - half, q) // c.block
    block_k = np.where(clean_k, k - half, k) // c.block
    diagonal = (block_q == block_k) & (clean_q == clean_k)
    offset = (block_q > block_k) & clean_k & ~clean_q
    return np.asarray(diagonal | offset | ((block_q >= block_k) & clean_k & clean_q))


def drafts(q: Array, k: Array, c: SimpleNamespace) -> Array:
    a, b, s = q - c.prompt, k - c.prompt, c.size
    draft = (k < c.prompt) | ((b >= 0) & (a // s == b // s) & (b % s <= a % s))
    return np.where(a >= 0, draft, k <= q)


def streaming(q: Array, k: Array, c: SimpleNamespace) -> Array:
    return np.asarray((k <= q) & ((q - k < c.recent) | (k < c.sinks)))


# --- the zoo -----------------------------------------------------------------------------------

BOTH = ((0, 0), (0, 1))
ZOO = [
    Row("full", lambda q, k, c: True),
    Row("causal", lambda q, k, c: q >= k),
    Row("window", lambda q, k, c: abs(q - k) <= c.radius, {"radius": 5}),
    Row("causal_window", lambda q, k, c: (q >= k) & (k > q - c.keys), {"keys": 8}),
    Row("monotonic_band", lambda q, k, c: abs(q - k) <= c.width, {"width": 5}),
    Row("flamingo", lambda q, k, c: q // c.text == k // c.latents, {"text": 12, "latents": 5}),
    Row("dilated", lambda q, k, c: (abs(q - k) <= c.radius) & (abs(q - k) % c.step == 0),
        {"radius": 13, "step": 3}),
    Row("dilated_stack", lambda q, k, c: np.isin(q - k, np.arange(4) * 4**c.layer),
        {"radius": 3}, slots=((0, 0), (1, 0), (3, 0))),
    Row("block_local", lambda q, k, c: abs(q // c.block - k // c.block) <= 1, {"block": 12}),
    Row("chunked_causal", lambda q, k, c: (q // c.chunk == k // c.chunk) & (q >= k), {"chunk": 24}),
    Row("block_causal", lambda q, k, c: q // c.block >= k // c.block, {"block": 12}),
    Row("sparse_strided", lambda q, k, c: (k <= q) & (
        (k >= q - c.stride) if c.head == 0 else (q - k) % c.stride == 0), {"stride": 9}, BOTH),
    Row("sparse_strided", lambda q, k, c: (k <= q) & (
        (k >= q - int(c.n**0.5)) if c.head == 0 else (q - k) % int(c.n**0.5) == 0), slots=BOTH),
    Row("sparse_strided_merged", lambda q, k, c: (k <= q) & (
        (k >= q - c.stride) | ((q - k) % c.stride == 0)), {"stride": 9}),
    Row("sparse_fixed", lambda q, k, c: (k <= q) & (
        (q // c.stride == k // c.stride) if c.head == 0
        else np.isin(k % c.stride, range(c.stride - c.cells, c.stride))),
        {"stride": 16, "cells": 3}, BOTH),
    Row("sparse_fixed_merged", lambda q, k, c: (k <= q) & (
        (q // c.stride == k // c.stride)
        | np.isin(k % c.stride, range(c.stride - c.cells, c.stride))), {"stride": 16, "cells": 3}),
    Row("sparse_interleaved", lambda q, k, c: (k <= q) & (
        (q // c.stride == k // c.stride) if c.layer == 0 else k % c.stride >= c.stride - c.cells),
        {"stride": 16, "cells": 3}, ((0, 0), (1, 0))),
    Row("openai_strided", lambda q, k, c: (k <= q) & (
        (k > q - c.stride) if c.head == 0 else (q - k) % c.stride == 0), {"stride": 9}, BOTH),
    Row("openai_fixed", lambda q, k, c: openai_fixed(c),
        {"stride": 32, "block": 4, "verticals": 3, "size": 2}, ((0, 0), (0, 1), (0, 5))),
    Row("strided_bidirectional", lambda q, k, c: (abs(q - k) < c.stride)
        | ((q - k) % c.stride == 0), {"stride": 9}),
    Row("fixed_bidirectional", lambda q, k, c: (q // c.stride == k // c.stride)
        | (k % c.stride >= c.stride - c.cells), {"stride": 9, "cells": 2}),
    Row("longformer", lambda q, k, c: (abs(q - k) <= c.radius) | (q < c.globals) | (k < c.globals),
        {"radius": 6, "globals": 2}),
    Row("longformer_inputs", lambda q, k, c: (abs(q - k) <= c.radius) | c.important[:, None]
        | c.important, {"radius": 6}, inputs=lambda n: {"important": marked(n)}),
    Row("longformer_autoregressive", longformer_layer, {"low": 3, "high": 20},
        ((0, 0), (5, 1), (6, 0), (9, 1), (10, 2), (11, 0))),
    Row("bigbird_etc", lambda q, k, c: (q < c.globals) | (k < c.globals)
        | (abs((q - c.globals) // c.block - (k - c.globals) // c.block) <= 1),
        {"block": 8, "globals": 5}, sizes=(7, 64, 127, 130)),
    Row("star", lambda q, k, c: (q == k) | (q == 0) | (k == 0)),
    Row("logsparse", lambda q, k, c: log_sparse(c)),
    Row("blockbert", lambda q, k, c: (q // -(-c.n // 2) != k // -(-c.n // 2)) == (c.head >= 10),
        slots=((0, 0), (0, 9), (0, 10))),
    Row("prefix_lm", lambda q, k, c: (k < c.prompt) | (q >= k),
        inputs=lambda n: {"prompt": n // 3}),
    Row("packed_documents", lambda q, k, c: c.document[:, None] == c.document,
        inputs=lambda n: {"document": documents(n)}),
    Row("event_times", lambda q, k, c: (c.time[None] <= c.time[:, None])
        & (c.time[:, None] - c.time[None] <= c.horizon), {"horizon": 7},
        inputs=lambda n: {"time": np.random.default_rng(n).random(n) * 30}),
    Row("packed_causal", lambda q, k, c: (k >= q - starts(c.document)[:, None]) & (k <= q),
        inputs=lambda n: {"document": documents(n)}),
    Row("prefix_lm_documents", lambda q, k, c: (c.document[:, None] == c.document)
        & ((starts(c.document) < 4) | (q >= k)),
        inputs=lambda n: {"document": documents(n), "prompt": starts(documents(n)) < 4}),
    Row("shared_prefix", lambda q, k, c: (
        (k >= q - starts(c.document)[:, None]) & (k <= q)) | (
        (c.document[:, None] // 3 * 3 == c.document) & (c.document[:, None] % 3 != 0)),
        inputs=families),
    Row("causal_blockwise", lambda q, k, c: (k <= q) & (
        (c.demonstration[:, None] == c.demonstration) | c.test[:, None]),
        inputs=lambda n: {"demonstration": documents(n), "test": np.arange(n) >= n - n // 4}),
    Row("qk_sparse", lambda q, k, c: (k <= q) & ~c.dropped_queries[:, None] & ~c.dropped_keys,
        inputs=lambda n: {"dropped_queries": marked(n), "dropped_keys": marked(n, 1)}),
    Row("moa", lambda q, k, c: (k <= q) & ((q - k < 256 << c.head // 2) | (k < c.sinks)),
        {"sinks": 5}, ((0, 0), (0, 1), (0, 2), (0, 7)), sizes=(1, 130, 300)),
    Row("streaming_llm", streaming, {"sinks": 3, "recent": 10}),
    Row("duo_attention", lambda q, k, c: (k <= q) if c.head < 4 else streaming(q, k, c),
        {"sinks": 3, "recent": 10}, ((0, 0), (0, 3), (0, 4))),
    Row("longlora", lambda q, k, c: (k <= q) & ((q + c.head * c.group // 2) // c.group
        == (k + c.head * c.group // 2) // c.group), {"group": 16}, BOTH),
    Row("tree_decoding", lambda q, k, c: ((k < c.prompt) & (k <= q)) | ancestors(c, c.parent, 3),
        inputs=tree),
    Row("tree_heap", lambda q, k, c: ((k < c.prompt) & (k <= q))
        | ancestors(c, heap_parents(c), 3), {"prompt": 5, "b": 3}),
    Row("draft_blocks", drafts, {"prompt": 20, "size": 8}),
    Row("block_diffusion", block_diffusion, {"block": 4}),
    Row("gemma2", lambda q, k, c: (k <= q) & ((c.layer % 2 == 1) | (q - k < c.keys)), {"keys": 8},
        ((0, 0), (1, 0), (25, 0))),
    Row("gemma3", lambda q, k, c: (k <= q) & (((c.layer + 1) % 6 == 0) | (q - k < c.keys)),
        {"keys": 8}, ((0, 0), (4, 0), (5, 0), (29, 0), (33, 0))),
    Row("alibi", lambda q, k, c: k <= q),
    Row("t5_bias", lambda q, k, c: True),
    Row("longt5_local", lambda q, k, c: abs(q - k) <= c.radius, {"radius": 9}),
    Row("softmax1", lambda q, k, c: k <= q),
    Row("relu_attention", lambda q, k, c: True),
    Row("sigmoid_attention", lambda q, k, c: k <= q),
    Row("neighborhood_2d", lambda q, k, c: outer(boxed(c.height, c.size), boxed(c.width, c.size)),
        {"height": 7, "width": 9, "size": 5}, sizes=(63,)),
    Row("neighborhood_3d", lambda q, k, c: outer(
        boxed(c.frames, c.span), boxed(c.height, c.size), boxed(c.width, c.size)),
        {"frames": 4, "height": 5, "width": 7, "span": 3, "size": 5}, sizes=(140,)),
    Row("neighborhood_dilated", lambda q, k, c: outer(
        boxed(c.height, 2 * c.radius + 1, c.step), boxed(c.width, 2 * c.radius + 1, c.step)),
        {"height": 11, "width": 13, "radius": 1, "step": 3}, sizes=(143,)),
    Row("axial", lambda q, k, c: (q // c.width == k // c.width) | (q % c.width == k % c.width),
        {"height": 6, "width": 9}, sizes=(54,)),
    Row("axial_layers", lambda q, k, c: (q // c.width == k // c.width) if c.layer == 0
        else (q % c.width == k % c.width), {"height": 6, "width": 9}, ((0, 0), (1, 0)), (54,)),
    Row("swin", lambda q, k, c: swin(c), {"height": 12, "width": 8, "size": 4},
        ((0, 0), (1, 0)), (96,)),
    Row("swin", lambda q, k, c: swin(c), {"height": 10, "width": 15, "size": 5}, ((1, 0),), (150,)),
    Row("sliding_tile_2d", lambda q, k, c: outer(
        tiled(c.height, c.tile, c.reach), tiled(c.width, c.tile, c.reach)),
        {"height": 8, "width": 12, "tile": 2, "reach": 1}, sizes=(96,)),
    Row("sliding_tile_3d", lambda q, k, c: outer(
        tiled(c.frames, c.span, c.reach), tiled(c.height, c.tile, c.reach),
        tiled(c.width, c.tile, c.reach)),
        {"frames": 4, "height": 6, "width": 8, "span": 1, "tile": 2, "reach": 1}, sizes=(192,)),
    Row("sparse_videogen", sparse_videogen,
        {"prompt": 5, "frames": 20, "tokens": 33, "width": 4}, BOTH),
    Row("sparse_videogen", sparse_videogen,
        {"prompt": 10, "frames": 3, "tokens": 130, "width": 1}, BOTH, (400,)),
    Row("local_2d", lambda q, k, c: np.hypot(
        cells(c)[0] - cells(c)[2], cells(c)[1] - cells(c)[3]) < c.distance,
        {"height": 9, "width": 7, "distance": 3}, sizes=(63,)),
    Row("dilated_2d", lambda q, k, c: (cells(c)[0] % c.step == cells(c)[2] % c.step)
        & (cells(c)[1] % c.step == cells(c)[3] % c.step),
        {"height": 9, "width": 7, "step": 2}, sizes=(63,)),
    Row("deepspeed_fixed", lambda q, k, c: deepspeed_fixed(c),
        {"block": 4, "local": 4, "globals": 1, "patterns": 4}, tuple((0, h) for h in range(4))),
    Row("deepspeed_fixed", lambda q, k, c: deepspeed_fixed(c),
        {"block": 2, "local": 6, "globals": 2, "patterns": 2}, BOTH),
    Row("deepspeed_bslongformer", lambda q, k, c: (abs(q // c.block - k // c.block) <= c.reach)
        | (q // c.block == 0) | (k // c.block == 0), {"block": 8, "reach": 2}),
    Row("deepspeed_sliding", lambda q, k, c: (q // c.block - c.reach <= k // c.block) & (k <= q),
        {"block": 8, "reach": 1}),
]  # fmt: skip

TRANSLATIONS = [
    Row("attention mask { heads 8 attend where(2 ** (-8 * (head + 1) / heads) * k < 3) }",
        lambda q, k, c: k * 0.5 ** (c.head + 1) < 3, slots=((0, 0), (0, 2), (0, 7))),
    # MagiAttention: rectangles of types full and causal (aligned at the bottom right)
    Row("attention mask { attend where(q < 40 and k < 20)"
        " | where(q in 40..79 and k in 10..49 and k <= q - 30) }",
        lambda q, k, c: ((q < 40) & (k < 20))
        | ((q >= 40) & (q < 80) & (k >= 10) & (k < 50) & (k - 50 <= q - 80))),
    # NATTEN on video, causal in time
    Row("attention mask { sequence grid(4, 5, 5) attend where(q.time - k.time in 0..1)"
        " & where(abs(min(max(q.row, 1), 3) - k.row) <= 1)"
        " & where(abs(min(max(q.col, 1), 3) - k.col) <= 1) }",
        lambda q, k, c: outer(np.tri(4, dtype=bool) & ~np.tri(4, k=-2, dtype=bool),
                              boxed(5, 3), boxed(5, 3)), sizes=(100,)),
]  # fmt: skip


CASES = [pytest.param(row, id=row.spec.split("{")[-1].strip(" }")) for row in (*ZOO, *TRANSLATIONS)]


@pytest.mark.parametrize("row", CASES)
def test_masks_are_those_of_papers_and_libraries(row: Row) -> None:
    if "{" in row.spec:
        spec = attnspec.parse(row.spec)
    else:
        spec = attnspec.load(EXAMPLES / f"{row.spec}.attn", parameters=row.parameters)
    for n, (layer, head) in product(row.sizes, row.slots):
        mask = spec.mask(n, layer=layer, head=head, inputs=declared(spec, row, n))
        where = f"n = {n}, layer {layer}, head {head}"
        np.testing.assert_array_equal(mask, row.expected(n, layer, head), where)


def declared(loaded: attnspec.Spec, row: Row, n: int) -> dict[str, Array | int] | None:
    """Of a row's inputs, those that the spec declares; the others serve the definition alone."""
    given = row.inputs(n)
    return {name: given[name] for name in loaded.inputs} or None


# --- random graphs: what every draw must satisfy -----------------------------------------------


@pytest.mark.parametrize("n", SIZES)
def test_random_draws_distinct_keys_beside_a_query_or_before_it(n: int) -> None:
    for name, available in (("random", np.full(n, n)), ("random_causal", np.arange(n) + 1)):
        mask = attnspec.load(EXAMPLES / f"{name}.attn", keys=5).mask(n)
        few = np.minimum(available, 5)
        assert ((mask.sum(1) >= few) & (mask.sum(1) <= few + 1)).all()
        assert name == "random" or not np.triu(mask, 1).any()
        assert name != "random" or mask.diagonal().all()


@pytest.mark.parametrize(("name", "certain"), [
    ("bigbird", lambda i, j, last: (abs(i - j) <= 1) | (i * j == 0) | (i == last) | (j == last)),
    ("deepspeed_bigbird", lambda i, j, last: (abs(i - j) <= 1) | (i * j == 0)),
    ("deepspeed_variable", lambda i, j, last: ((i + 2) // 4 == (j + 2) // 4) | (j == 0)),
])  # fmt: skip
def test_random_blocks_come_on_top_of_the_certain_ones(
    name: str, certain: Callable[[Array, Array, int], Array]
) -> None:
    size, blocks = 4, 32
    loaded = attnspec.load(EXAMPLES / f"{name}.attn", block=size, r=2)
    mask = loaded.mask(size * blocks)
    layout = mask[::size, ::size]
    np.testing.assert_array_equal(mask, expand(layout, size, size * blocks))
    expected = certain(np.arange(blocks)[:, None], np.arange(blocks)[None, :], blocks - 1)
    assert layout[expected].all()
    assert (layout & ~expected).sum(1).max() in (1, 2)
    np.testing.assert_array_equal(mask, loaded.mask(size * blocks))


@pytest.mark.parametrize("n", [7, 64, 127])
def test_an_expander_is_a_union_of_cycles(n: int) -> None:
    mask = attnspec.load(EXAMPLES / "expander.attn", links=4).mask(n)
    assert (mask == mask.T).all()
    degree = mask.sum(1) - 1
    assert ((degree >= 2) & (degree <= 4)).all()


@pytest.mark.parametrize("n", [7, 64, 127])
def test_a_small_world_holds_its_ring(n: int) -> None:
    mask = attnspec.load(EXAMPLES / "small_world.attn", radius=2, keys=2).mask(n)
    gap = abs(np.arange(n)[:, None] - np.arange(n))
    ring = np.minimum(gap, n - gap) <= 2
    assert mask[ring].all()
    assert (mask.sum(1) <= 7).all()
    assert mask.sum() > ring.sum()


# --- the folder itself -------------------------------------------------------------------------

DRAWN = {"random", "random_causal", "bigbird", "deepspeed_bigbird", "deepspeed_variable",
         "expander", "small_world"}  # fmt: skip


def test_every_file_of_the_zoo_is_checked_here() -> None:
    programs = {path.stem: attnspec.load(path).program for path in EXAMPLES.glob("*.attn")}
    static = {
        name
        for name, program in programs.items()
        if not has_mechanism(program)
        and not any(decides(attend.graph) for attend in program.attends if attend.graph)
    }
    assert static == {row.spec for row in ZOO} | DRAWN


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.attn")), ids=lambda path: path.stem)
def test_every_file_says_what_it_is_and_where_it_comes_from(path: Path) -> None:
    header = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            break
        header.append(line)
    assert header[1].startswith("# Look at: ")
    [source] = [line for line in header if line.startswith("# Source: ")]
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert f"| [{path.stem}]({path.stem}.attn) | {header[0][2:].rstrip('.')} |" in readme
    work = source.removeprefix("# Source: ")
    cited = re.sub(r"(, (section|figure) [\d.]+)?( \(.*\))?$", "", work)
    assert f"\n- {cited}\n" in readme
