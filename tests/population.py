"""The specs that every view is asked about: samples of each pattern, named bodies, the zoo."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from oracle import meaning
from oracle.program import Unknown, attention_of, graph
from oracle.tree import Node
from zoo import ATTENTIONS, loaded

import attnspec
from attnspec.spec import Spec, load, parse

BODIES = {
    "full": "attend full",
    "causal": "causal attend full",
    "window": "attend window(radius = 5)",
    "causal window": "causal attend window(before = 40, after = 3)",
    "strided": "causal attend window(before = isqrt(n), after = 0) | residue(step = isqrt(n))",
    "blocks": "attend block(size = 16, before = 1) | global(first(3) | last(2))",
    "random": "attend random(keys = 3, seed = 5)",
    "random causal": "causal attend random(keys = 3, seed = 6) | self",
    "random blocks": "attend random_blocks(size = 16, blocks = 2) | self",
    "random for all heads": "heads 3 attend random(keys = 2, per_head = false)"
    " | expander(degree = 2, seed = 3)",
    "difference": "attend window(radius = 30) - window(radius = 4) - columns(every(3))",
    "complement": "attend ~(fixed(stride = 16, cells = 2) & dilated(radius = 50, step = 3))",
    "shifted": "attend shift(self, by = 2) | transpose(summary(stride = 9, cells = 1))",
    "shifted back": "causal attend shift(block(size = 7), by = -3) | self",
    "shifted away": "attend shift(full, by = 29) | shift(residue(step = 3), by = -31)",
    "where": "attend where(q == k + 1 or (q + k) % 7 == 0)",
    "empty rows": "attend where(k < q // 2)",
    "nothing": "attend window(radius = 3) - full",
    "token sets": "attend rows(positions(0, 3..9)) | columns(~every(2) & first(20) - first(4))",
    "last tokens": "causal attend global(last(3)) | columns(every(11, offset = 4)) | self",
    "prefix": "causal attend prefix(9) | window(before = 2, after = 0)",
    "powers": "causal attend powers(base = 3) | prefix(isqrt(n))",
    "tree": "attend where(q == 2 * k + 1 or q == 2 * k + 2 or q == k)",
    "arithmetic": "attend where((q * q - 3 * k) % 5 in 1..2 and not (k // 4 in {0, 2}))",
    "real numbers": "attend where(sqrt(q) <= k / 3 + 1 and min(q, k) != max(q, 5) - 2)",
    "lists": "attend where(q // 8 >= k // 8 and (k % 8 < 4 or q - k <= 12))",
    "products": "attend where(q * k < 2 * n)",
    "sizes of n": "attend window(radius = n // 5) | columns(every(max(1, n // 4)))",
    "choices by head": "heads 4 input sel: choices attend window(radius = 4)"
    " head 0, 2 { attend topk(keys = 2 + head, within = chosen(sel)) } head 1 {attend chosen(sel)}",
    "by head": "heads 4 attend window(radius = 3 * head) head 1, 3 { attend residue(step = head) }",
    "by layer": "layers 3 heads 2 attend dilated(radius = 4 * layer + 2, step = layer + 1)"
    " layer 1 { head 0 { attend full } }",
    "without a count": "attend window(radius = 2) | random(keys = head % 3, seed = layer)",
    "grid": "sequence grid(5, 7) extra_tokens 2 attend axial | global(first(2))",
    "neighbours": "sequence grid(5, 7) attend neighborhood(3, 5)",
    "cells": "sequence grid(3, 4, 3) extra_tokens 1"
    " attend where(q.time >= k.time and abs(q.row - k.row) + abs(q.col - k.col) <= 2) | self",
    "rows of a grid": "sequence grid(n // 5, 5) attend where(q.row == k.row) | columns(first(1))",
    "documents": "input d: ids causal attend same(d)",
    "documents and windows": "input d: ids attend same(d) & window(radius = 9) | self",
    "marked tokens": "input m: tokens attend window(radius = 4) | global(m)",
    "few marked tokens": "input m: tokens(at_most = 5) attend columns(m) | rows(m & first(9))",
    "length": "input s: length attend prefix(s) | window(radius = 1)",
    "times": "input t: numbers attend where(t(k) <= t(q) and abs(t(q) - t(k)) <= 3)",
    "times by n": "input t: numbers attend where(t(k) // n < 2) & where(t(q) % (n + 7) != 3)",
    "labels as numbers": "input d: ids attend where(d(q) // 2 == d(k) // 2)",
    "times beside sums": "causal input t: numbers"
    " attend (where(t(k) <= t(q)) & window(before = 4, after = 0)) + linear()",
    "length as a number": "input p: length attend ~where(k < p or q - k < 3) | where(k > p - 8)",
    "length turned": "input p: length attend transpose(where(q + k // 2 <= max(p, 3)))"
    " | where(p in 3..k)",
    "choices": "input c: choices(size = 8) causal attend chosen(c) | window(before = 4, after = 0)",
    "softcap": "heads 4 attend window(radius = 20) | global(first(2)) score softcap(cap = 2)",
    "alibi": "heads 6 causal attend window(before = 20, after = 0) score alibi()",
    "slopes": "heads 4 attend window(radius = 20) score alibi(slopes = [0.3, -0.2, 0, 2])",
    "both": "heads 3 attend block(size = 9) score alibi() score softcap(cap = 3) scale 0.5",
    "bias": "heads 4 attend window(radius = 20) score bias(buckets = 8, max_distance = 30)",
    "causal bias": "layers 2 heads 2 causal attend full score bias(buckets = 6, max_distance = 20)",
    "scale of n": "attend window(radius = 20) scale 1 / (2 + n)",
    "softmax1": "causal attend window(before = 30, after = 0) normalize softmax1",
    "softmax1 of nothing": "attend where(k < q // 2) score softcap(cap = 5) normalize softmax1",
    "relu": "attend block(size = 16, before = 1) normalize relu",
    "sigmoid": "heads 4 causal attend full score alibi() normalize sigmoid",
    "sigmoid of documents": "input d: ids attend same(d) normalize sigmoid",
    "several normalisers": "heads 3 attend window(radius = 7) head 1 { attend full normalize relu }"
    " head 2 { attend residue(step = 3) scale 2 normalize softmax1 }",
    "five residues": "attend residue(step = 3) | residue(step = 5) | residue(step = 7)"
    " | residue(step = 11) | residue(step = 13)",
    "two residues": "attend residue(step = 6) & residue(step = 4)",
    "without a residue": "attend window(radius = 30) - residue(step = 3)",
    "dilated columns": "attend dilated(radius = 40, step = 5) | columns(first(3))",
    "three strides": "causal attend window(radius = 30) | residue(step = 12)"
    " | summary(stride = 8, cells = 2)",
    "scattered tokens": "causal attend window(radius = 4) | global(positions(2, 5, 40, 41, 99))",
    "powers of all": "attend powers(base = 2)",
    "many keys": "attend random(keys = 20)",
    "skewed": "attend random(keys = 2) | global(first(3))",
    "ring": "attend where((q - k) % n <= 2) | where((k - q) % n <= 2) | random(keys = 2)",
    "tree of a prefix": "causal attend self | prefix(5) | where(5 <= k and (q - 6) // 2 == k - 5)",
    "long rows and all keys": "attend block(size = 16) | global(first(2) | last(1))",
    "shifted columns": "causal attend shift(columns(first(2)), by = 3) | window(radius = 2)",
    "shifted rows": "causal attend shift(rows(positions(30)) | self, by = 11)"
    " & window(before = 60, after = 0)",
    "drawn in a window": "causal attend window(before = 20, after = 0) & (self | random(keys = 9))",
    "documents apart": "causal input d: ids attend window(radius = 9) - same(d) score alibi()"
    " normalize softmax1",
    "documents moved": "causal input d: ids attend window(before = 6, after = 0)"
    " & transpose(shift(same(d), by = 3))",
    "several inputs": "input m: tokens(at_most = 9) input d: ids input s: length"
    " attend (window(radius = 30) | global(m | first(1))) & same(d) | prefix(s)",
    "capped relu": "heads 4 attend window(radius = 20) | global(first(2)) score softcap(cap = 2)"
    " normalize relu",
    "biased sigmoid": "heads 4 attend window(radius = 20) score bias(buckets = 8)"
    " normalize sigmoid",
    "graph beside sums": "causal heads 2 attend window(before = 3, after = 0)"
    " head 1 { attend linear() }",
    "changed beside sums": "causal attend window(radius = 3) + taylor() score softcap(cap = 2)"
    " score alibi()",
    "linear": "causal attend linear()",
    "linear of other maps": "attend linear(feature = squared_relu)",
    "undivided": "attend linear(feature = exp, normalize = none)",
    "taylor": "causal attend taylor(order = 2)",
    "favor": "attend favor(features = 12, seed = 3)",
    "favor of relus": "causal attend favor(features = 9, kind = relu, orthogonal = false)",
    "hyperbolic": "causal attend favor(features = 7, kind = hyperbolic)",
    "rbf": "attend rbf(features = 8, sigma = 2.0)",
    "efficient": "attend efficient()",
    "fourier": "attend fourier()",
    "window and linear": "causal attend window(before = 5, after = 0) + linear()",
    "window and favor": "attend window(radius = 5) + favor(features = 8)",
    "stride and taylor": "causal attend residue(step = 6) + taylor(order = 2)",
    "marked tokens and favor": "input m: tokens attend (window(radius = 5) | global(m))"
    " + favor(features = 16)",
    "a prefix and sums": "causal input s: length attend prefix(s) + linear(feature = exp)",
    "documents and linear": "input d: ids causal attend same(d) + linear()",
    "identity": "attend linear(feature = identity)",
    "favor of waves": "causal attend favor(features = 12, kind = trig)",
    "efficient by scaling": "attend efficient(normalize = scaling)",
    "waves": "layers 2 heads 2 attend rfa(features = 6)",
    "waves above a floor": "causal attend rfa(features = 6, floor = 0.3)",
    "gated waves": "causal heads 2 attend rfa(features = 6, gated = true)",
    "stride and waves": "attend residue(step = 3) + rfa(features = 8)",
    "linformer": "layers 2 heads 2 attend linformer(rank = 8, max_length = 140)",
    "linformer of heads": "heads 2 attend linformer(rank = 8, share = none, max_length = 140)",
    "linformer of layers": "layers 3 attend linformer(rank = 5, share = head, max_length = 140)",
    "linformer by kernels": "attend linformer(rank = 9, projection = conv, max_length = 140)",
    "kernels for values": "heads 2 attend"
    " linformer(rank = 9, projection = conv, share = none, max_length = 140)",
    "linformer of means": "attend linformer(rank = 6, projection = mean)",
    "linformer of maxima": "heads 3 attend linformer(rank = 6, projection = max)",
    "nystrom": "attend nystrom(landmarks = 5)",
    "nystrom and a kernel": "heads 2 attend nystrom(landmarks = 7, iterations = 1, conv = 5)",
    "synthesizer": "attend synthesizer(max_length = 140)",
    "mixed synthesizer": "causal heads 2 attend synthesizer(max_length = 140, products = true)",
    "random weights": "layers 2 heads 2 attend synthesizer(kind = random, max_length = 140)",
    "random factors": "causal attend"
    " synthesizer(kind = factorized_random, rank = 3, max_length = 140)",
    "factors": "causal attend synthesizer(kind = factorized_dense, max_length = 140)",
    "factors and products": "attend"
    " synthesizer(kind = factorized_dense, max_length = 140, products = true)",
    "mixer": "layers 2 attend mixer(hidden = 7, max_length = 140)",
    "gmlp": "attend gmlp(max_length = 140)",
    "causal gmlp": "causal heads 2 attend gmlp(max_length = 140)",
    "score of distances": "heads 2 attend window(radius = 20) | global(first(2))"
    " score s - 0.1 * abs(q - k) score 4 * tanh(s / 4) score s + (q > k) / (1 + layer)",
    "score of a list": "heads 4 causal attend full score s * [0.5, 1, 2, 4][head]"
    " score s + [1, 0, 2][min(abs(q - k) // 3, 2)] normalize softmax1",
    "score of inputs": "input t: numbers input d: ids input p: length attend window(radius = 9)"
    " score s + 0.3 * (d(q) == d(k)) - abs(t(q) - t(k)) / 9 score s + log(0.5 + (k < p))",
    "score of pairs": "heads 2 input near: pairs causal attend residue(step = 3) | self"
    " score s + near(q, k) * (k % 2)",
    "score of a short list": "causal attend window(before = 2, after = 0)"
    " score s * [0.5, 2, 1][q - k] score s * log(2 + q - k) + [1, 0, 2][q - k]",
    "score beside sums": "causal heads 2 attend window(before = 4, after = 0) + linear()"
    " score s * sqrt(1 + q - k) - 0.3 * (1 + head) * abs(q - k)",
    "score of pairs beside sums": "heads 2 input near: pairs input t: numbers"
    " attend where(abs(t(q) - t(k)) < 1) + favor(features = 8)"
    " score s + near(q, k) - abs(t(q) - t(k))",
    "score that hides": "attend block(size = 8) score s + log(k // 4 + (q < 0))",
    "score of choices": "causal attend topk(keys = 4) score s * exp(-abs(q - k) / 8) / (1 + q - k)",
    "score of sigmoids": "attend window(radius = 4) score max(s, min(q, k) - n / 2)"
    " normalize sigmoid",
}
"""Bodies of attentions by what they are about."""

ALWAYS = "always = columns(first(2)) | window(before = 3, after = 0)"
WITHIN = "within = window(radius = 4)"

DECIDED = [
    "attend topk(keys = 3)",
    "causal attend topk(keys = 2, queries = 3)",
    "attend topk(blocks = 2, size = 4)",
    "causal attend topk(blocks = 3, size = 4, queries = 1) score alibi()",
    "causal attend topk(blocks = 2, size = 4, queries = 3, score = max) | window(radius = 2)",
    "heads 4 attend topk(blocks = 2, size = 4, score = bound, share = all)",
    "heads 4 causal attend topk(blocks = 2, size = 4, queries = 2, score = mass, share = group)",
    "heads 4 causal attend topk(blocks = 3, size = 3, share = head)",
    "attend topk(mass = 0.6, size = 4, queries = 1) score softcap(cap = 3)",
    "causal attend topk(mass = 0.6, size = 4, score = bound)",
    "attend topk(mass = 0.7, size = 4, score = mass) normalize softmax1",
    "causal attend topk(mass = 0.5, size = 1)",
    "attend topk(mass = 1, size = 4)",
    "causal attend topk(above = 0.2, size = 4, score = max)",
    f"causal attend topk(blocks = 3, size = 4, {ALWAYS})",
    "attend topk(blocks = 3, size = 2, queries = 3)",
    "causal attend topk(blocks = 4, size = 3, queries = 5)",
    # a block that is not over is not a candidate, and nothing forces the own one here
    "causal attend topk(blocks = 2, size = 4, queries = 1, always = columns(first(2)))",
    "attend topk(above = 0.1, size = 3, queries = 2, always = columns(first(2)))",
    f"causal attend topk(keys = 3, {WITHIN})",
    f"attend topk(blocks = 2, size = 3, score = bound, {WITHIN}) & ~self",
    f"causal attend topk(mass = 0.4, size = 3, queries = 2, {WITHIN})",
    # what is forced and no candidate has no mass
    f"attend topk(mass = 0.5, size = 1, queries = 2, score = mass, {ALWAYS}, {WITHIN})",
    "input s: scores(size = 4) causal attend topk(blocks = 2, size = 4, queries = 1, score = s)",
    "input s: scores(size = 4) attend topk(mass = 0.9, size = 4, queries = 1, score = s)",
    "input t: numbers causal attend topk(keys = 3, within = where(t(k) <= t(q)))",
    "causal attend topk(keys = 3) + linear()",
    "input h: buckets attend lsh(h, chunk = 4)",
    "input h: buckets causal attend lsh(h, chunk = 4, look = 2, bucket_mask = false)",
    "input h: buckets causal attend lsh(h, chunk = 4, look = 0, cut = bucket)",
    "input h: buckets attend lsh(h, chunk = 4, look = 2, cut = bucket, share_qk = false)",
    "input h: buckets causal attend lsh(h, chunk = 4, share_qk = false, bucket_mask = false)",
    "input h: buckets causal attend lsh(h, chunk = 4, multiplicity = true, scale = unit)",
    "input h: buckets attend lsh(h, chunk = 4, combine = mean, scale = unit)",
    "input h: buckets attend lsh(h, chunk = 4, multiplicity = true, share_qk = false)"
    " | window(radius = 2)",
    "layers 2 heads 2 attend lsh(buckets = 6, rounds = 2, chunk = 4, seed = 5)",
    "attend lsh(buckets = 8, rounds = 2, chunk = 4, hash = hyperplanes, share_qk = false)",
    "causal attend lsh(chunk = 4, rounds = 2)",
    "input l: ids causal attend cluster(l)",
    "attend cluster()",
    "layers 2 heads 2 attend cluster(count = 4, seed = 3) | self",
    "causal attend cluster(count = 40)",
    "heads 2 attend cluster(count = 4, assign = balanced, seed = 1)",
    "attend cluster(count = 4, of = q)",
    "attend cluster(count = 3) + favor(features = 8)",
    "heads 2 attend sinkhorn(size = 4)",
    "causal attend sinkhorn(size = 4)",
    "attend sinkhorn(size = 4, cut = 2) score softcap(cap = 20)",
]
"""Bodies whose pairs queries and keys, or what an input says in their place, decide."""

BODIES |= {each.replace("attend ", "", 1): each for each in DECIDED}


SAMPLES = """
block(size = 1)
block(size = 3)
block(size = 4, before = 1)
block(size = 5, after = 2)
block(size = 16, before = 1, after = 1)
block(size = 1000)
block(size = 7, before = 1000, after = 1000)
columns(last(200))
columns(every(7))
columns(positions(0, 5..9, 100..120))
columns(first(2) | last(2))
dilated(radius = 0, step = 5)
dilated(radius = 4, step = 1)
dilated(radius = 6, step = 3)
dilated(radius = 7, step = 3)
dilated(radius = 1000, step = 2)
expander(degree = 2)
expander(degree = 4, seed = 9)
expander(degree = 6, per_head = false)
fixed(stride = 5, cells = 2)
fixed(stride = 8, cells = 8)
fixed(stride = 16, cells = 3)
fixed(stride = 3, cells = 100)
fixed(stride = 1000, cells = 900)
global(first(0))
global(every(5, offset = 2))
global(positions(2, 9..40))
global(every(2) & ~first(9))
powers(base = 3)
powers(base = 7)
powers(base = 1000)
prefix(0)
prefix(5)
prefix(1000)
random(keys = 0)
random(keys = 5, seed = 4611686018427387904)
random(keys = 1000)
random(keys = 1000, per_head = false)
random_blocks(size = 4, blocks = 0)
random_blocks(size = 1, blocks = 2)
random_blocks(size = 5, blocks = 2, seed = 3)
random_blocks(size = 7, blocks = 1000)
random_blocks(size = 1000, blocks = 1)
residue(step = 1)
residue(step = 7)
residue(step = 64)
residue(step = 1000)
rows(first(0))
rows(last(2))
rows(every(4, offset = 1))
rows(~first(5))
strided(stride = 1)
strided(stride = 2)
strided(stride = 13)
strided(stride = 1000)
summary(stride = 1, cells = 1)
summary(stride = 4, cells = 1)
summary(stride = 8, cells = 8)
summary(stride = 3, cells = 100)
window(radius = 0)
window(radius = 1)
window(radius = 70)
window(radius = 1000)
window(before = 0, after = 0)
window(before = 0, after = 2)
window(before = 4, after = 9)
where(false)
where(abs(q - k) in {1, 2, 4})
where(k ** 8 * (q + 1 - q) % 3 == 1)
""".strip().splitlines()
"""Calls that between them reach every branch of a pattern."""

CELLS = {
    "sequence grid(9, 4) extra_tokens 3": ("axial", "neighborhood(1, 5)"),
    "sequence grid(1, 6) extra_tokens 1": ("axial", "neighborhood(3, 7)"),
    "sequence grid(2, 11) extra_tokens 1": ("neighborhood(5, 3)", "where(k.col == 0)"),
    "sequence grid(7, 8)": ("neighborhood(7, 7)",),
    "sequence grid(3, 4, 5)": ("neighborhood(3, 1, 3)",),
    "sequence grid(4, 3, 3) extra_tokens 2": ("axial", "neighborhood(1, 3, 5)"),
}


def samples() -> Iterator[tuple[str, str]]:
    """Bodies with one pattern each."""
    for index, call in enumerate(SAMPLES):
        # what is drawn under `causal` are other numbers
        yield call, f"{'causal ' if 'random' in call and index % 2 else ''}attend {call}"
    for grid, calls in CELLS.items():
        yield from ((f"{call} of {grid}", f"{grid} attend {call}") for call in calls)


SMALL: dict[str, int] = {
    "block": 4,
    "stride": 5,
    "radius": 3,
    "keys": 5,
    "chunk": 8,
    "group": 6,
    "prompt": 6,
    "globals": 2,
    "cells": 2,
    "verticals": 2,
    "recent": 6,
    "sinks": 2,
    "low": 2,
    "high": 8,
    "frames": 3,
    "tokens": 16,
    "height": 6,
    "width": 8,
    "tile": 2,
    "distance": 3,
}
"""Parameters of the zoo by name, so that a pattern is more than `full` at n = 64."""

APART: dict[str, dict[str, int]] = {
    "axial_attention": {"height": 5, "width": 7},
    "clustered": {"clusters": 8},
    "hybrid_cluster": {"clusters": 5, "features": 32},
    "hybrid_topk": {"r": 2},
    "moba": {"r": 3},
    "msa": {"r": 3},
    "neighborhood_2d": {"size": 3},
    "neighborhood_3d": {"height": 4, "width": 5, "size": 3},
    "neighborhood_dilated": {"radius": 1},
    "openai_fixed": {"stride": 8, "block": 2},
    "quest": {"page": 4, "pages": 4},
    "reformer": {"rounds": 2},
    "reformer_causal": {"rounds": 2, "buckets": 6},
    "reformer_hf": {"buckets": 6},
    "routing_transformer": {"clusters": 5},
    "scatterbrain": {"features": 32},
    "sliding_tile_3d": {"frames": 4, "height": 4, "width": 4},
    "sparse_videogen": {"frames": 2, "tokens": 24, "prompt": 5},
    "swin": {"size": 3, "width": 9},
    "topk_blocks": {"r": 3},
}
"""What differs from `SMALL`, by name of the attention."""


@cache
def small(path: Path, name: str) -> Spec:
    """An attention of the zoo with small parameters."""
    spec = loaded(path, name)
    wanted = {**SMALL, **APART.get(name, {})}
    changed = {
        key: wanted[key]
        for key, value in spec.parameters.items()
        if key in wanted and not isinstance(value, str)
    }
    return load(path, name=name, parameters=changed)


@cache
def spec_of(body: str) -> Spec:
    return parse(f"attention sample {{ {body} }}")


PRELUDE = (Path(attnspec.__file__).parent / "graphs/patterns/prelude.attn").read_text("utf-8")


def _of_prelude(pattern: str, arguments: Mapping[str, Any]) -> Node:
    """What the prelude says of a pattern, whose word no graph of a text may have."""
    text = re.sub(r"(?m)^graph ", "graph the_", PRELUDE)
    said = ", ".join(f"{name} = {value}" for name, value in arguments.items())
    spec = parse(f"{text} attention sample {{ attend the_{pattern}{f'({said})' * bool(said)} }}")
    return graph(spec.program.attend().graph)


# a pattern that the oracle has no line for means what its line in the prelude says
meaning.WRITTEN |= {
    name: partial(_of_prelude, name) for name in re.findall(r"(?m)^graph (\w+)", PRELUDE)
}


@cache
def population() -> dict[str, Spec]:
    """Every spec whose meaning the oracle knows, by name."""
    found = {name: spec_of(body) for name, body in BODIES.items()}
    found |= {name: spec_of(body) for name, body in samples()}
    found |= {f"{path.stem}:{name}": small(path, name) for path, name in ATTENTIONS}
    return {name: spec for name, spec in found.items() if _is_known(spec)}


def _is_known(spec: Spec) -> bool:
    try:
        attention_of(spec.program)
    except Unknown:
        return False
    return True


def inputs_of(spec: Spec, n: int, seed: int = 0) -> dict[str, Any]:
    """One sample of every run-time input."""
    return sample_of(spec.program.inputs, n, np.random.default_rng([n, seed]))


def sample_of(inputs: Iterable[Any], n: int, draw: np.random.Generator) -> dict[str, Any]:
    """One sample of inputs, which have a name, a kind, a size and a promise."""
    made: dict[str, Any] = {}
    for entry in inputs:
        match entry.kind:
            case "tokens":
                marks = draw.random(n) < draw.choice((0.0, 0.1, 0.2, 0.2, 0.5, 1.0))
                most = n if entry.at_most is None else entry.at_most
                made[entry.name] = marks & (marks.cumsum() <= most)
            case "ids":
                ids = draw.integers(-2, 4, n)
                made[entry.name] = np.sort(ids) if draw.random() < 0.6 else ids
            case "numbers":
                made[entry.name] = draw.integers(-3, 9, n)
            case "choices":
                # some repeat, some are none
                made[entry.name] = draw.integers(-1, -(-n // entry.size), (1, n, 3))
            case "pairs":
                made[entry.name] = draw.standard_normal((1, n, n))
            case "scores":
                made[entry.name] = draw.standard_normal((1, n, -(-n // entry.size)))
            case "buckets":
                made[entry.name] = draw.integers(-2, 3, (1, 3, n))
            case _:
                made[entry.name] = int(draw.integers(0, n + 3))
    return made
