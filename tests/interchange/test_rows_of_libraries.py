"""The masks that other libraries ship, as specs: each row against its predicate, on all pairs.

A row is a text of the language, its inputs, and the predicate as the library states it, in numpy.
DeepSpeed's layouts are files of the zoo (tests/graphs/test_zoo_masks.py). What no spec says is on
the page of the room, with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnspec
from attnspec.text.diagnostics import AttnSpecError

PAGE = Path(attnspec.__file__).parent / "interchange" / "README.md"


@dataclass(frozen=True)
class Row:
    """A mask that a library ships; `holds` is asked with (h, q, k, n)."""

    text: str
    holds: Callable[..., Any]
    inputs: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (1, 13, 48)
    heads: int = 1
    queries: int | None = None
    """Of another sequence, in a row that says `cross`."""


DOC = np.array([0] * 5 + [3] * 11 + [1] * 2 + [2] * 30)
START = np.array([0] * 5 + [5] * 11 + [16] * 2 + [18] * 30)
"""Where the document of each position begins."""

MARKED = np.arange(48) % 11 == 3
ROOT = DOC == 0
PARENT = (0, 0, 1, 1, 0, 4, 5, 5)
"""Of eight drafted tokens, the parent of each; the first is the root."""

ANCESTORS = np.eye(8, dtype=bool)
for node in range(1, 8):
    ANCESTORS[node] |= ANCESTORS[PARENT[node]]

CHOSEN = np.stack([np.arange(48) // 12, np.arange(48) // 4 % 4, np.full(48, -1)], 1)[None]


IMAGES = np.array([(0, 9), (4, 21), (9, 12), (5, 5), (0, 21), (20, 21), (3, 4), (1, 17)])
"""Of eight images, the words that read them: from the first up to the second."""

UNEQUAL = np.repeat(np.arange(4), [5, 7, 12, 24])

PADDED = np.arange(48) - 5
"""Positions counted from the first real token, behind five of padding."""

EVICTED = np.arange(48) + 1 + np.random.default_rng(0).integers(0, 30, 48)
"""The first row that no longer reads each key."""


def block_diffusion(q: Any, k: Any, n: int, size: int) -> Any:
    noisy_q, noisy_k = q < n, k < n
    b_q, b_k = q % n // size, k % n // size
    own = (b_q == b_k) & noisy_q & noisy_k
    return own | ((b_q > b_k) & noisy_q & ~noisy_k) | ((b_q >= b_k) & ~noisy_q & ~noisy_k)


def boxed(q: tuple[Any, Any], k: tuple[Any, Any], shape: Any, kernel: Any) -> Any:
    """The kernel around each cell, moved inside at the borders."""
    found: Any = True
    for at, other, extent, size in zip(q, k, shape, kernel, strict=True):
        r = size // 2
        found = found & (abs(np.clip(at, r, extent - 1 - r) - other) <= r)
    return found


def tiled(x: Any) -> tuple[Any, Any]:
    """The cell of an index into tiles of 2 x 3 on a canvas of 8 x 6."""
    tile, inside = x // 6, x % 6
    return tile // 2 * 2 + inside // 3, tile % 2 * 3 + inside % 3


def morton(x: Any) -> tuple[Any, Any]:
    """The cell of a place on the Morton curve of 8 x 8."""
    bits = [x >> at & 1 for at in range(6)]
    return bits[1] + 2 * bits[3] + 4 * bits[5], bits[0] + 2 * bits[2] + 4 * bits[4]


def box_text(row: str, column: str, extents: tuple[int, int], kernel: tuple[int, int]) -> str:
    """The same box as a predicate, of what q becomes a row and a column by."""
    parts = []
    for cell, extent, size in zip((row, column), extents, kernel, strict=True):
        r = size // 2
        middle = f"min(max({cell.format('q')}, {r}), {extent - 1 - r})"
        parts.append(f"abs({middle} - ({cell.format('k')})) <= {r}")
    return f"where({' and '.join(parts)})"


def natten_axis(q: Any, k: Any, size: int, kernel: int, stride: int, dilation: int) -> Any:
    """One axis of NATTEN without causality."""
    at, extent = q // dilation, -(-(size - q % dilation) // dilation)
    leader = np.minimum(at // stride * stride + stride // 2, extent - 1)
    centre = np.clip(leader, kernel // 2, extent - 1 - (kernel // 2 + kernel % 2 - 1))
    first = centre - kernel // 2
    own = k // dilation
    return (q % dilation == k % dilation) & (first <= own) & (own < first + kernel)


GYM = {
    "causal_mask": Row("attend causal", lambda h, q, k, n: q >= k),
    "generate_sliding_window": Row(
        "causal attend window(before = 7, after = 0)", lambda h, q, k, n: (q >= k) & (q - k <= 7)
    ),
    "generate_dilated_sliding_window": Row(
        "attend dilated(radius = 9, step = 3)",
        lambda h, q, k, n: (abs(q - k) <= 9) & (abs(q - k) % 3 == 0),
    ),
    "generate_global_sliding_window": Row(
        "input g: tokens attend window(radius = 4) | global(g)",
        lambda h, q, k, n: (abs(q - k) <= 4) | MARKED[q] | MARKED[k],
        {"g": MARKED},
    ),
    "generate_prefix_lm_mask": Row(
        "attend causal | prefix(6)", lambda h, q, k, n: (k < 6) | (q >= k)
    ),
    "generate_doc_mask_mod": Row(
        # offsets of one document cancel in q - k
        "input d: ids attend same(d) & window(before = 4, after = 1)",
        lambda h, q, k, n: (
            (DOC[q] == DOC[k])
            & ((q - START[q]) - (k - START[k]) <= 4)
            & ((k - START[k]) - (q - START[q]) <= 1)
        ),
        {"d": DOC},
    ),
    "generate_packed_causal_doc_mask_mod": Row(
        "input d: ids causal attend same(d)",
        lambda h, q, k, n: (k >= START[q]) & (q >= k),
        {"d": DOC},
    ),
    "batchify_mask_mod": Row(
        "attend block(size = 12) & where(q % 12 - k % 12 in 0..3)",
        lambda h, q, k, n: (q // 12 == k // 12) & (q % 12 - k % 12 <= 3) & (q % 12 >= k % 12),
    ),
    "generate_block_diffusion_mask": Row(
        """let half = 24
        attend where(q < half and k < half) & block(size = 4)
             | where(q < half <= k and (k - half) // 4 < q // 4)
             | where(half <= q and half <= k and (k - half) // 4 <= (q - half) // 4)""",
        lambda h, q, k, n: block_diffusion(q, k, 24, 4),
        lengths=(48,),
    ),
    "generate_shared_prefix_mask_mod": Row(
        # documents 1, 2 and 3 go on from document 0
        "input d: ids input root: tokens causal attend same(d) | columns(root)",
        lambda h, q, k, n: ((k >= START[q]) & (q >= k)) | ((DOC[q] != 0) & (k < 5)),
        {"d": DOC, "root": ROOT},
    ),
    "generate_vision_cross_attention_mask_mod": Row(
        # images of 6 keys each are read by the words from one place of the text to another
        "cross input first: numbers input end: numbers attend where(first(k) <= q and q < end(k))",
        lambda h, q, k, n: (IMAGES[k // 6, 0] <= q) & (q < IMAGES[k // 6, 1]),
        {"first": IMAGES[np.arange(48) // 6, 0], "end": IMAGES[np.arange(48) // 6, 1]},
        queries=21,
    ),
    "generate_jetspec_tree_causal_mask_mod": Row(
        "attend columns(first(5)) | "
        + " | ".join(
            f"where(q == {5 + a} and k in "
            f"{{{', '.join(str(5 + b) for b in np.flatnonzero(ANCESTORS[a]))}}})"
            for a in range(8)
        ),
        lambda h, q, k, n: (
            (k < 5) | ((q >= 5) & (k >= 5) & ANCESTORS[np.maximum(q - 5, 0), np.maximum(k - 5, 0)])
        ),
        lengths=(13,),
    ),
    "generate_jetspec_training_mask_mod": Row(
        "attend columns(first(8)) | where(k >= 8 and q // 5 == (k - 8) // 5"
        " and (k - 8) % 5 <= q % 5)",
        lambda h, q, k, n: (k < 8) | ((k >= 8) & (q // 5 == (k - 8) // 5) & ((k - 8) % 5 <= q % 5)),
    ),
    "generate_natten": Row(
        "sequence grid(6, 8) attend neighborhood(3, 5)",
        lambda h, q, k, n: boxed((q // 8, q % 8), (k // 8, k % 8), (6, 8), (3, 5)),
        lengths=(48,),
    ),
    "generate_tiled_natten": Row(
        "attend "
        + box_text(
            "{0} // 12 * 2 + {0} % 6 // 3", "{0} // 6 % 2 * 3 + {0} % 6 % 3", (8, 6), (3, 5)
        ),
        lambda h, q, k, n: boxed(tiled(q), tiled(k), (8, 6), (3, 5)),
        lengths=(48,),
    ),
    "generate_morton_natten": Row(
        "attend "
        + box_text(
            "{0} // 2 % 2 + 2 * ({0} // 8 % 2) + 4 * ({0} // 32 % 2)",
            "{0} % 2 + 2 * ({0} // 4 % 2) + 4 * ({0} // 16 % 2)",
            (8, 8),
            (3, 3),
        ),
        lambda h, q, k, n: boxed(morton(q), morton(k), (8, 8), (3, 3)),
        lengths=(64,),
    ),
    "generate_sta_mask_mod_2d": Row(
        # a canvas of 4 x 8 in tiles of 2 x 2, one behind the other, then sixteen tokens of text
        f"attend where(q < 32 and k < 32) & {box_text('{0} // 16', '{0} // 4 % 4', (2, 4), (1, 3))}"
        " | columns(positions(32..47)) | rows(positions(32..47))",
        lambda h, q, k, n: (
            (q >= 32)
            | (k >= 32)
            | boxed((q // 16, q // 4 % 4), (k // 16, k // 4 % 4), (2, 4), (1, 3))
        ),
        lengths=(48,),
    ),
    "generate_spatial_head_mask_mod": Row(
        # a prompt of 4, frames of 11 tokens, width 2 rounded to 8, the first frame a sink
        "attend columns(first(4 + 11)) | rows(first(4)) | where(abs(q - k) < 2 * 11 // 8 * 8)",
        lambda h, q, k, n: (k < 15) | (q < 4) | (abs(q - k) < np.floor(2 * 11 / 8) * 8),
    ),
    "generate_temporal_head_mask_mod": Row(
        "attend global(first(4)) | where(abs((q - 4) % 11 - (k - 4) % 11) < 3)",
        lambda h, q, k, n: (q < 4) | (k < 4) | (abs((q - 4) % 11 - (k - 4) % 11) < 3),
    ),
    "generate_vsa_mask_mod": Row(
        "input topk: choices(size = 12) input real: tokens attend chosen(topk) & columns(real)",
        lambda h, q, k, n: (CHOSEN[0][q] == (k // 12)[..., None]).any(-1) & ~MARKED[k],
        {"topk": CHOSEN, "real": ~MARKED},
        lengths=(48,),
    ),
}

OPENAI = {
    "all": Row("causal attend full", lambda h, q, k, n: q >= k),
    "local": Row("attend window(before = 5, after = 0)", lambda h, q, k, n: (q >= k) & (q - k < 6)),
    "strided": Row(
        "causal attend residue(step = 6)", lambda h, q, k, n: (q >= k) & ((q - k) % 6 == 0)
    ),
    "fixed": Row(
        # c = 8 in blocks of 2: a stride of 4 block columns, of which head h has one more
        """heads 4 causal
        attend block(size = 8) | where((k // 2) % 4 == 3 - head)""",
        lambda h, q, k, n: (q >= k) & ((q // 8 == k // 8) | ((k // 2) % 4 == 3 - h)),
        heads=4,
    ),
}

SPLASH = {
    "CausalMask(offset)": Row("attend where(q + 3 >= k)", lambda h, q, k, n: q + 3 >= k),
    "ChunkedCausalMask": Row(
        "causal attend block(size = 7)", lambda h, q, k, n: (q // 7 == k // 7) & (q >= k)
    ),
    "LocalMask": Row(
        "attend window(before = 5, after = 2)",
        lambda h, q, k, n: (q - 5 <= k) & (k <= q + 2),
    ),
    "LocalMask(offset)": Row(
        "attend where(k - q in -3..4)", lambda h, q, k, n: (q + 2 - 5 <= k) & (k <= q + 2 + 2)
    ),
    "LocalMask((None, r))": Row("attend where(k <= q + 2)", lambda h, q, k, n: k <= q + 2),
    "FullMask": Row("attend full", lambda h, q, k, n: (q == q) & (k == k)),
    "LogicalAnd": Row(
        "attend causal & residue(step = 2)", lambda h, q, k, n: (k <= q) & ((q - k) % 2 == 0)
    ),
    "LogicalOr": Row("attend causal | self", lambda h, q, k, n: (k <= q) | (q == k)),
    "MultiHeadMask": Row(
        "heads 2 head 0 { attend causal } head 1 { attend window(radius = 2) }",
        lambda h, q, k, n: (k <= q) if h == 0 else abs(q - k) <= 2,
        heads=2,
    ),
    "segment_ids": Row(
        "input d: ids attend same(d)", lambda h, q, k, n: DOC[q] == DOC[k], {"d": DOC}
    ),
}

TRANSFORMERS = {
    "causal": Row("causal attend full", lambda h, q, k, n: k <= q),
    "bidirectional": Row("attend full", lambda h, q, k, n: (q == q) & (k == k)),
    "sliding_window_overlay": Row("attend where(k > q - 5)", lambda h, q, k, n: k > q - 5),
    "sliding_window_bidirectional": Row(
        "attend window(radius = 5)", lambda h, q, k, n: abs(q - k) <= 5
    ),
    "chunked_overlay": Row("attend block(size = 9)", lambda h, q, k, n: k // 9 == q // 9),
    "chunked_overlay, left padding": Row(
        "input at: numbers attend where(at(k) // 9 == at(q) // 9)",
        lambda h, q, k, n: PADDED[k] // 9 == PADDED[q] // 9,
        {"at": PADDED},
    ),
    "blockwise_overlay": Row(
        "input d: ids input real: tokens causal attend full & (causal | same(d) & columns(real))",
        lambda h, q, k, n: k <= q,
        {"d": DOC, "real": ~MARKED},
    ),
    "packed_sequence": Row(
        "input d: ids attend same(d)", lambda h, q, k, n: DOC[q] == DOC[k], {"d": DOC}
    ),
    "padding_mask": Row(
        "input real: tokens attend columns(real)",
        lambda h, q, k, n: ~MARKED[k] & (q == q),
        {"real": ~MARKED},
    ),
    "add_offsets": Row("attend where(k + 2 <= q + 5)", lambda h, q, k, n: k + 2 <= q + 5),
}

OTHERS = {
    "NATTEN, stride 2": Row(
        "attend where(abs(min(max(min(q // 2 * 2 + 1, n - 1), 2), n - 3) - k) <= 2)",
        lambda h, q, k, n: natten_axis(q, k, n, 5, 2, 1),
        lengths=(13, 48),
    ),
    "NATTEN, dilation 3": Row(
        "attend where(q % 3 == k % 3 and "
        "abs(min(max(q // 3, 2), (n - 1 - q % 3) // 3 - 2) - k // 3) <= 2)",
        lambda h, q, k, n: natten_axis(q, k, n, 5, 1, 3),
        lengths=(16, 48),
    ),
    "NATTEN, even kernel": Row(
        "attend where(k - min(max(q, 2), n - 2) in -2..1)",
        lambda h, q, k, n: natten_axis(q, k, n, 4, 1, 1),
        lengths=(13, 48),
    ),
    "NATTEN, additional keys": Row(
        "attend columns(first(4)) | where(q >= 4 and k >= 4 and "
        "abs(min(max(q - 4, 2), n - 7) - (k - 4)) <= 2)",
        lambda h, q, k, n: (
            (k < 4) | ((q >= 4) & (k >= 4) & natten_axis(q - 4, k - 4, n - 4, 5, 1, 1))
        ),
        lengths=(13, 48),
    ),
    "NATTEN, causal, stride 4": Row(
        "causal attend where(min(q // 4 * 4 + 3, n - 1) - k < 6)",
        lambda h, q, k, n: (q >= k) & (np.minimum(q // 4 * 4 + 3, n - 1) - k < 6),
    ),
    "FlashMask, sliding window": Row(
        "attend window(before = 8, after = 0)", lambda h, q, k, n: ~((q >= k + 9) | (q < k))
    ),
    "FlashMask, causal document": Row(
        "input d: ids causal attend same(d)",
        lambda h, q, k, n: (DOC[q] == DOC[k]) & (q >= k),
        {"d": DOC},
    ),
    "FlashMask, share question": Row(
        "input d: ids input root: tokens causal attend same(d) | columns(root)",
        lambda h, q, k, n: (q >= k) & ((DOC[q] == DOC[k]) | (DOC[k] == 0)),
        {"d": DOC, "root": ROOT},
    ),
    "FlashMask, global sliding window": Row(
        "attend window(radius = 3) | global(first(2))",
        lambda h, q, k, n: (abs(q - k) <= 3) | (q < 2) | (k < 2),
    ),
    "FlashMask, causal blockwise": Row(
        # all blocks causally inside, the last one reads everything before it
        "input d: ids input last: tokens causal attend same(d) | rows(last)",
        lambda h, q, k, n: (q >= k) & ((DOC[q] == DOC[k]) | (DOC[q] == 2)),
        {"d": DOC, "last": DOC == 2},
    ),
    "FlashMask, prefix-LM document": Row(
        "input d: ids input prefix: tokens attend same(d) & (causal | columns(prefix))",
        lambda h, q, k, n: (DOC[q] == DOC[k]) & ((q >= k) | (k - START[k] < 3)),
        {"d": DOC, "prefix": np.arange(48) - START < 3},
    ),
    "FlashMask, document": Row(
        "input d: ids attend same(d)", lambda h, q, k, n: DOC[q] == DOC[k], {"d": DOC}
    ),
    "FlashMask, prefix-LM causal": Row(
        "attend causal | prefix(6)", lambda h, q, k, n: (k < 6) | (k <= q)
    ),
    "FlashMask V3, block_mask": Row(
        "input kept: choices(size = 12) causal attend chosen(kept)",
        lambda h, q, k, n: (CHOSEN[0][q] == (k // 12)[..., None]).any(-1) & (q >= k),
        {"kept": CHOSEN},
        lengths=(48,),
    ),
    "FlashMask, random eviction": Row(
        "input gone: numbers causal attend where(q < gone(k))",
        lambda h, q, k, n: (q >= k) & (q < EVICTED[k]),
        {"gone": EVICTED},
    ),
    "FlashMask, QK-sparse": Row(
        "causal attend ~(rows(positions(20..25)) | columns(positions(7..9)))",
        lambda h, q, k, n: (q >= k) & ~((q >= 20) & (q < 26)) & ~((k >= 7) & (k < 10)),
    ),
    "MagiAttention, a union of rectangles": Row(
        "attend where(q < 9 and k in 3..20)"
        " | where(q in 9..30 and k in 5..30 and k - 30 <= q - 30)",
        lambda h, q, k, n: (
            ((q < 9) & (k >= 3) & (k <= 20))
            | ((q >= 9) & (q <= 30) & (k >= 5) & (k <= 30) & (k <= q))
        ),
    ),
    "MagiAttention, an INV_CAUSAL slice": Row(
        "attend where(q in 4..20 and k in 2..30 and k - 2 >= q - 4)",
        lambda h, q, k, n: (q >= 4) & (q < 21) & (k >= 2) & (k < 31) & (k - 2 >= q - 4),
    ),
    "MagiAttention, a BI_CAUSAL slice": Row(
        "attend where(q in 4..20 and k - 2 >= q - 4 and k - 30 <= q - 20)",
        lambda h, q, k, n: (q >= 4) & (q < 21) & (k - 2 >= q - 4) & (k - 30 <= q - 20),
    ),
    "FlashAttention, window_size = (5, 2)": Row(
        "attend window(before = 5, after = 2)", lambda h, q, k, n: (q - 5 <= k) & (k <= q + 2)
    ),
    "FlashInfer, blocks of unequal sizes": Row(
        # of 5, 7, 12 and 24 positions, each of which reads itself and the one before
        "input block: numbers attend where(block(q) - block(k) in 0..1)",
        lambda h, q, k, n: (UNEQUAL[q] - UNEQUAL[k] >= 0) & (UNEQUAL[q] - UNEQUAL[k] <= 1),
        {"block": UNEQUAL},
    ),
    "MIT block-sparse, a head of a block mask": Row(
        "input kept: choices(size = 12) causal attend chosen(kept)",
        lambda h, q, k, n: (q >= k) & (CHOSEN[0][q] == (k // 12)[..., None]).any(-1),
        {"kept": CHOSEN},
        lengths=(48,),
    ),
    "MIT block-sparse, a streaming head": Row(
        "heads 2 causal head 0 { attend full }"
        " head 1 { attend columns(first(4)) | block(size = 4, before = 2) }",
        lambda h, q, k, n: (q >= k) & ((h == 0) | (k < 4) | (q // 4 - k // 4 <= 2)),
        heads=2,
    ),
    "Modular, CausalMask": Row("causal attend full", lambda h, q, k, n: k <= q),
    "Modular, CausalPaddingMask": Row(
        "input real: tokens causal attend columns(real)",
        lambda h, q, k, n: (k <= q) & ~MARKED[k],
        {"real": ~MARKED},
    ),
    "Modular, SlidingWindowCausalMask": Row(
        "attend window(before = 5, after = 0)", lambda h, q, k, n: (k <= q) & (q - k < 6)
    ),
    "Modular, SlidingWindowNonCausalMask": Row(
        "attend window(before = 5, after = 2)", lambda h, q, k, n: (q - 5 <= k) & (k <= q + 2)
    ),
    "Modular, ChunkedMask": Row("attend block(size = 6)", lambda h, q, k, n: q // 6 == k // 6),
    "Modular, NullMask": Row("attend full", lambda h, q, k, n: (q == q) & (k == k)),
    "Modular, AndMask": Row(
        # masked out is what both mask out
        "attend causal | block(size = 6)",
        lambda h, q, k, n: ~(~(k <= q) & ~(q // 6 == k // 6)),
    ),
    "Modular, ChunkedCausalMask": Row(
        # their OrMask joins what is masked out
        "attend ~(~causal | ~block(size = 6))",
        lambda h, q, k, n: (k <= q) & (q // 6 == k // 6),
    ),
}

WINDOWS = {
    "attention-gym, w = 4": Row(
        "attend window(before = 4, after = 0)", lambda h, q, k, n: (q - 4 <= k) & (k <= q)
    ),
    "HF sliding_window = 4": Row(
        "attend window(before = 3, after = 0)", lambda h, q, k, n: (q - 4 < k) & (k <= q)
    ),
    "HF Longformer attention_window = 4": Row(
        "attend window(radius = 2)", lambda h, q, k, n: abs(q - k) <= 4 / 2
    ),
    "xFormers local_1d 5": Row(
        "attend window(radius = 2)", lambda h, q, k, n: abs(q - k) <= 5 // 2
    ),
    "LongT5 local_radius = 4": Row("attend window(radius = 4)", lambda h, q, k, n: abs(q - k) <= 4),
    "Keras sliding_window = 4": Row(
        "attend window(radius = 3)", lambda h, q, k, n: abs(q - k) <= 4 - 1
    ),
}

ROWS = {
    f"{library}: {name}": row
    for library, rows in (
        ("attention-gym", GYM),
        ("sparse_attention", OPENAI),
        ("splash", SPLASH),
        ("transformers", TRANSFORMERS),
        ("others", OTHERS),
        ("windows", WINDOWS),
    )
    for name, row in rows.items()
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_a_spec(name: str) -> None:
    row = ROWS[name]
    spec = attnspec.parse(f"attention row {{ {row.text} }}")
    for n in row.lengths:
        m = n if row.queries is None else row.queries
        q, k = np.arange(m)[:, None], np.arange(n)[None]
        inputs = {
            key: value[:, :n] if value.ndim == 3 else value[:n] for key, value in row.inputs.items()
        }
        for head in range(row.heads):
            meant = np.broadcast_to(row.holds(head, q, k, n), (m, n))
            held = spec.mask(n, head=head, inputs=inputs, m=row.queries)
            assert (held == meant).all(), (n, head)


@pytest.mark.parametrize(
    "text",
    [
        "score sandwich(dimension = 8)",
        "score spatial(distance)",
        "score edges(distance)",
        "score rope()",
        "score activation(offset = 1)",
        "normalize identity",
    ],
)
def test_other_changes_of_scores_are_errors_that_name_those_there_are(text: str) -> None:
    with pytest.raises(AttnSpecError, match=r"softcap|softmax1|expected"):
        attnspec.parse(f"attention a {{ input distance: ids attend full {text} }}")


NOT_SAID = (
    "Sandwich",
    "Graphormer",
    "MLA",
    "undo_softmax",
    "selected_attention",
    "NumpyMask",
    "MaterializedMask",
    "make_random_mask",
    "OnlineFunc",
    "Hedgehog",
    "RetNet",
    "compressed_sparse_attention",
    "max_seq_length",
    "dynamic masks",
)


@pytest.mark.parametrize("feature", ["gelu", "swish", "sigmoid", "hedgehog", "dpfp", "t2r"])
def test_other_features_are_errors_that_name_those_there_are(feature: str) -> None:
    with pytest.raises(AttnSpecError, match="`feature` is one of elu1, relu, squared_relu"):
        attnspec.parse(f"attention a {{ attend linear(feature = {feature}) }}")


@pytest.mark.parametrize("name", ["retention", "gated_linear", "delta_rule", "orthoformer"])
def test_other_mechanisms_are_not_defined(name: str) -> None:
    with pytest.raises(AttnSpecError, match=f"`{name}` is not defined"):
        attnspec.parse(f"attention a {{ attend {name}() }}")


@pytest.mark.parametrize("kind", ["compressed_sparse", "heavily_compressed", "deepseek_sparse"])
def test_layers_that_choose_by_their_own_parts_are_refused(kind: str) -> None:
    config = {"model_type": "a", "num_hidden_layers": 1, "layer_types": [f"{kind}_attention"]}
    with pytest.raises(AttnSpecError, match="decided by their own parts"):
        attnspec.from_hf_config(config, causal=True)


@pytest.mark.parametrize("name", NOT_SAID)
def test_what_no_spec_says_is_on_the_page(name: str) -> None:
    assert name in PAGE.read_text(encoding="utf-8")
