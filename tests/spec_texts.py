"""Texts of the language for the tests of reading, parsing and printing."""

from __future__ import annotations

LONGFORMER = """\
# Longformer (Beltagy et al. 2020), two of its twelve layers' kinds of heads
attention longformer(radius = 256) {
    layers 12
    heads 12
    input important: tokens                      # which tokens are global is known only at run time

    attend window(radius = radius) | global(important)

    layer 6..11 {
        head 10, 11 { attend dilated(radius = 2 * radius, step = 2) | global(important) }
    }

    require degree <= 4 * radius at n = 4096     # checked when the spec is compiled
}
"""

SPARSE_STRIDED = """\
# Sparse Transformer, strided (Child et al. 2019): two factorised heads, causal
attention sparse_strided(stride = isqrt(n)) {
    causal
    heads 2
    head 0 { attend window(before = stride, after = 0) }
    head 1 { attend residue(step = stride) }
    require causal
    require reach(layers = 2)
}
"""

BIGBIRD = """\
attention bigbird(block = 64, r = 3) {
    attend block(size = block, before = 1, after = 1)
         | global(first(block) | last(block))
         | random_blocks(size = block, blocks = r, seed = 7)
    require diameter <= 2
}
"""

PERFORMER = """\
attention performer { causal  attend favor(features = 256, seed = 0) }
"""

IMPORTING = """\
from "patterns/local.attn" import local_global
graph ring(r) = window(radius = r) | where((q - k) % n < r) | where((k - q) % n < r)
attention a(r = 4) { attend ring(r) }
"""

EVERYTHING = """\
# every statement and every kind of expression
from "a.attn" import first_graph, second_graph  # an import
from "b.attn" import third

graph plain = full
graph two(a, b = 2 ** -1,) = transpose(shift(first_graph, by = a)) & ~second_graph - third(b)

attention everything(
    size = 1_024,  # in tokens
    heads = 8,
    layers = 2 * isqrt(n) // 3,
) {  # opens
    let x = min(size, 0.5 + 1e-3) / 7 % 2
    let on = true and not false or x < 3
    input important: tokens(at_most = 64)
    input ids: ids
    input length: length
    layers layers
    heads heads
    sequence grid(8, 8)
    extra_tokens 4
    causal
    scale 1 / sqrt(d)
    score softcap(cap = 30.0)
    score alibi()
    normalize softmax1
    attend causal | (where(0 <= q - k < 4 and q.row == k.row) | where(q - k in {0, 1, -4}))
    attend where(k in 0..5) & global(positions(0, 5, 100..120) | every(step = 3))

    layer even { head 0, 2, 7..9 { attend same(ids) } head all { attend - - ~full } }

    require causal
    require reach(layers = 2) at n = 64, 257
    require plain subset two(1) and plain == plain
    require order <= n * log2(n)
    require -2 ** 2 ** -1 != (-2) ** 2 or (1 < 2) == (not true)
    # the end
}  # closed

# nothing more
"""

TEXTS = {
    "longformer": LONGFORMER,
    "sparse_strided": SPARSE_STRIDED,
    "bigbird": BIGBIRD,
    "performer": PERFORMER,
    "importing": IMPORTING,
    "everything": EVERYTHING,
}
