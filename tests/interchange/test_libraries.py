"""The masks that other libraries ship, as specs: each row against its predicate, on all pairs.

A row is a text of the language, and the predicate as the library states it, in numpy. Rows that
several libraries have stand once. DeepSpeed's layouts are files of the zoo. What no spec says is on
the page of the room, with its reason.
"""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zoo

import attnspec
from attnspec import AttnSpecError

PAGE = Path(attnspec.__file__).parent / "interchange" / "README.md"

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


VALUES: dict[str, Any] = {
    **{"d": DOC, "g": MARKED, "real": ~MARKED, "root": ROOT, "last": DOC == 2, "gone": EVICTED},
    **{"prefix": np.arange(48) - START < 3, "at": PADDED, "block": UNEQUAL},
    **{"first": IMAGES[np.arange(48) // 6, 0], "end": IMAGES[np.arange(48) // 6, 1]},
    **dict.fromkeys(("topk", "kept"), CHOSEN),
}
"""What the inputs of the rows are."""

TREE = "attend columns(first(5)) | " + " | ".join(
    f"where(q == {5 + a} and k in {{{', '.join(str(5 + b) for b in np.flatnonzero(row))}}})"
    for a, row in enumerate(ANCESTORS)
)
TILED = "attend " + box_text(
    "{0} // 12 * 2 + {0} % 6 // 3", "{0} // 6 % 2 * 3 + {0} % 6 % 3", (8, 6), (3, 5)
)
MORTON = "attend " + box_text(
    "{0} // 2 % 2 + 2 * ({0} // 8 % 2) + 4 * ({0} // 32 % 2)",
    "{0} % 2 + 2 * ({0} // 4 % 2) + 4 * ({0} // 16 % 2)",
    (8, 8),
    (3, 3),
)
ROWS: dict[str, tuple[Any, ...]] = {
    "attention-gym, generate_sliding_window": (
        "causal attend window(before = 7, after = 0)",
        "(q >= k) & (q - k <= 7)",
    ),
    "attention-gym, generate_prefix_lm_mask": ("attend causal | prefix(6)", "(k < 6) | (q >= k)"),
    "attention-gym, generate_doc_mask_mod": (
        "input d: ids attend same(d) & window(before = 4, after = 1)",
        "(DOC[q] == DOC[k]) & (q - START[q] - (k - START[k]) <= 4) & (k - START[k] - (q - "
        "START[q]) <= 1)",
    ),
    "attention-gym, generate_packed_causal_doc_mask_mod": (
        "input d: ids causal attend same(d)",
        "(k >= START[q]) & (q >= k)",
    ),
    "attention-gym, batchify_mask_mod": (
        "attend block(size = 12) & where(q % 12 - k % 12 in 0..3)",
        "(q // 12 == k // 12) & (q % 12 - k % 12 <= 3) & (q % 12 >= k % 12)",
    ),
    "attention-gym, generate_block_diffusion_mask": (
        "let half = 24 attend where(q < half and k < half) & block(size = 4) | where(q < half <= "
        "k and (k - half) // 4 < q // 4) | where(half <= q and half <= k and (k - half) // 4 <= "
        "(q - half) // 4)",
        "block_diffusion(q, k, 24, 4)",
        (48,),
    ),
    "attention-gym, generate_shared_prefix_mask_mod": (
        "input d: ids input root: tokens causal attend same(d) | columns(root)",
        "(k >= START[q]) & (q >= k) | (DOC[q] != 0) & (k < 5)",
    ),
    "attention-gym, generate_vision_cross_attention_mask_mod": (
        "cross input first: numbers input end: numbers attend where(first(k) <= q and q < end(k))",
        "(IMAGES[k // 6, 0] <= q) & (q < IMAGES[k // 6, 1])",
    ),
    "attention-gym, generate_jetspec_tree_causal_mask_mod": (
        TREE,
        "(k < 5) | (q >= 5) & (k >= 5) & ANCESTORS[np.maximum(q - 5, 0), np.maximum(k - 5, 0)]",
        (13,),
    ),
    "attention-gym, generate_jetspec_training_mask_mod": (
        "attend columns(first(8)) | where(k >= 8 and q // 5 == (k - 8) // 5 and (k - 8) % 5 <= q "
        "% 5)",
        "(k < 8) | (k >= 8) & (q // 5 == (k - 8) // 5) & ((k - 8) % 5 <= q % 5)",
    ),
    "attention-gym, generate_natten": (
        "sequence grid(6, 8) attend neighborhood(3, 5)",
        "boxed((q // 8, q % 8), (k // 8, k % 8), (6, 8), (3, 5))",
        (48,),
    ),
    "attention-gym, generate_tiled_natten": (
        TILED,
        "boxed(tiled(q), tiled(k), (8, 6), (3, 5))",
        (48,),
    ),
    "attention-gym, generate_morton_natten": (
        MORTON,
        "boxed(morton(q), morton(k), (8, 8), (3, 3))",
        (64,),
    ),
    "attention-gym, generate_sta_mask_mod_2d": (
        "attend where(q < 32 and k < 32) & where(abs(min(max(q // 16, 0), 1) - (k // 16)) <= 0 "
        "and abs(min(max(q // 4 % 4, 1), 2) - (k // 4 % 4)) <= 1) | columns(positions(32..47)) | "
        "rows(positions(32..47))",
        "(q >= 32) | (k >= 32) | boxed((q // 16, q // 4 % 4), (k // 16, k // 4 % 4), (2, 4), (1, "
        "3))",
        (48,),
    ),
    "attention-gym, generate_spatial_head_mask_mod": (
        "attend columns(first(4 + 11)) | rows(first(4)) | where(abs(q - k) < 2 * 11 // 8 * 8)",
        "(k < 15) | (q < 4) | (abs(q - k) < np.floor(2 * 11 / 8) * 8)",
    ),
    "attention-gym, generate_temporal_head_mask_mod": (
        "attend global(first(4)) | where(abs((q - 4) % 11 - (k - 4) % 11) < 3)",
        "(q < 4) | (k < 4) | (abs((q - 4) % 11 - (k - 4) % 11) < 3)",
    ),
    "attention-gym, generate_vsa_mask_mod": (
        "input topk: choices(size = 12) input real: tokens attend chosen(topk) & columns(real)",
        "(CHOSEN[0][q] == (k // 12)[..., None]).any(-1) & ~MARKED[k]",
        (48,),
    ),
    "sparse_attention, local": ("attend window(before = 5, after = 0)", "(q >= k) & (q - k < 6)"),
    "sparse_attention, fixed": (
        "heads 4 causal attend block(size = 8) | where((k // 2) % 4 == 3 - head)",
        "(q >= k) & ((q // 8 == k // 8) | (k // 2 % 4 == 3 - h))",
    ),
    "splash, LocalMask": ("attend window(before = 5, after = 2)", "(q - 5 <= k) & (k <= q + 2)"),
    "splash, LocalMask(offset)": (
        "attend where(k - q in -3..4)",
        "(q + 2 - 5 <= k) & (k <= q + 2 + 2)",
    ),
    "splash, MultiHeadMask": (
        "heads 2 head 0 { attend causal } head 1 { attend window(radius = 2) }",
        "k <= q if h == 0 else abs(q - k) <= 2",
    ),
    "transformers, chunked_overlay, left padding": (
        "input at: numbers attend where(at(k) // 9 == at(q) // 9)",
        "PADDED[k] // 9 == PADDED[q] // 9",
    ),
    "transformers, blockwise_overlay": (
        "input d: ids input real: tokens causal attend full & (causal | same(d) & columns(real))",
        "k <= q",
    ),
    "transformers, padding_mask": (
        "input real: tokens attend columns(real)",
        "~MARKED[k] & (q == q)",
    ),
    "NATTEN, stride 2": (
        "attend where(abs(min(max(min(q // 2 * 2 + 1, n - 1), 2), n - 3) - k) <= 2)",
        "natten_axis(q, k, n, 5, 2, 1)",
        (13, 48),
    ),
    "NATTEN, dilation 3": (
        "attend where(q % 3 == k % 3 and abs(min(max(q // 3, 2), (n - 1 - q % 3) // 3 - 2) - k // "
        "3) <= 2)",
        "natten_axis(q, k, n, 5, 1, 3)",
        (16, 48),
    ),
    "NATTEN, even kernel": (
        "attend where(k - min(max(q, 2), n - 2) in -2..1)",
        "natten_axis(q, k, n, 4, 1, 1)",
        (13, 48),
    ),
    "NATTEN, additional keys": (
        "attend columns(first(4)) | where(q >= 4 and k >= 4 and abs(min(max(q - 4, 2), n - 7) - "
        "(k - 4)) <= 2)",
        "(k < 4) | (q >= 4) & (k >= 4) & natten_axis(q - 4, k - 4, n - 4, 5, 1, 1)",
        (13, 48),
    ),
    "NATTEN, causal, stride 4": (
        "causal attend where(min(q // 4 * 4 + 3, n - 1) - k < 6)",
        "(q >= k) & (np.minimum(q // 4 * 4 + 3, n - 1) - k < 6)",
    ),
    "FlashMask, causal blockwise": (
        "input d: ids input last: tokens causal attend same(d) | rows(last)",
        "(q >= k) & ((DOC[q] == DOC[k]) | (DOC[q] == 2))",
    ),
    "FlashMask, prefix-LM document": (
        "input d: ids input prefix: tokens attend same(d) & (causal | columns(prefix))",
        "(DOC[q] == DOC[k]) & ((q >= k) | (k - START[k] < 3))",
    ),
    "FlashMask V3, block_mask": (
        "input kept: choices(size = 12) causal attend chosen(kept)",
        "(CHOSEN[0][q] == (k // 12)[..., None]).any(-1) & (q >= k)",
        (48,),
    ),
    "FlashMask, random eviction": (
        "input gone: numbers causal attend where(q < gone(k))",
        "(q >= k) & (q < EVICTED[k])",
    ),
    "FlashMask, QK-sparse": (
        "causal attend ~(rows(positions(20..25)) | columns(positions(7..9)))",
        "(q >= k) & ~((q >= 20) & (q < 26)) & ~((k >= 7) & (k < 10))",
    ),
    "MagiAttention, a union of rectangles": (
        "attend where(q < 9 and k in 3..20) | where(q in 9..30 and k in 5..30 and k - 30 <= q - "
        "30)",
        "(q < 9) & (k >= 3) & (k <= 20) | (q >= 9) & (q <= 30) & (k >= 5) & (k <= 30) & (k <= q)",
    ),
    "MagiAttention, an INV_CAUSAL slice": (
        "attend where(q in 4..20 and k in 2..30 and k - 2 >= q - 4)",
        "(q >= 4) & (q < 21) & (k >= 2) & (k < 31) & (k - 2 >= q - 4)",
    ),
    "MagiAttention, a BI_CAUSAL slice": (
        "attend where(q in 4..20 and k - 2 >= q - 4 and k - 30 <= q - 20)",
        "(q >= 4) & (q < 21) & (k - 2 >= q - 4) & (k - 30 <= q - 20)",
    ),
    "FlashInfer, blocks of unequal sizes": (
        "input block: numbers attend where(block(q) - block(k) in 0..1)",
        "(UNEQUAL[q] - UNEQUAL[k] >= 0) & (UNEQUAL[q] - UNEQUAL[k] <= 1)",
    ),
    "MIT block-sparse, a streaming head": (
        "heads 2 causal head 0 { attend full } head 1 { attend columns(first(4)) | block(size = "
        "4, before = 2) }",
        "(q >= k) & ((h == 0) | (k < 4) | (q // 4 - k // 4 <= 2))",
    ),
    "Modular, AndMask": ("attend causal | block(size = 6)", "~(~(k <= q) & ~(q // 6 == k // 6))"),
    "Modular, ChunkedCausalMask": (
        "attend ~(~causal | ~block(size = 6))",
        "(k <= q) & (q // 6 == k // 6)",
    ),
    "Keras sliding_window = 4": ("attend window(radius = 3)", "abs(q - k) <= 4 - 1"),
}
"""A text, the predicate of h, q, k and n, and lengths if there are but some."""


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_a_spec(name: str) -> None:
    text, holds, *rest = ROWS[name]
    spec = attnspec.parse(f"attention row {{ {text} }}")
    for n in rest[0] if rest else (1, 13, 48):
        # words beside images
        m = 21 if spec.program.cross else n
        inputs = {
            x: VALUES[x][..., :n, :] if VALUES[x].ndim == 3 else VALUES[x][:n] for x in spec.inputs
        }
        for h in range(spec.heads or 1):
            at = {"h": h, "q": np.arange(m)[:, None], "k": np.arange(n)[None], "n": n}
            meant = np.broadcast_to(eval(holds, globals(), at), (m, n))
            held = spec.mask(n, head=h, inputs=inputs, m=m if spec.program.cross else None)
            assert (held == meant).all(), (n, h)


_SCORES = ("sandwich(dimension = 8)", "spatial(distance)", "edges(distance)", "rope()")
_MAPS = ("gelu", "swish", "sigmoid", "hedgehog", "dpfp", "t2r")
_OTHERS = ("retention", "gated_linear", "delta_rule", "orthoformer")
NO_SPEC: list[tuple[str, str]] = [
    *((f"full score {x}", "softcap|expected") for x in (*_SCORES, "activation(offset = 1)")),
    ("full normalize identity", "softmax1"),
    *((f"linear(feature = {x})", "`feature` is one of elu1, relu, squared_relu") for x in _MAPS),
    *((f"{x}()", f"`{x}` is not defined") for x in _OTHERS),
]


@pytest.mark.parametrize(("body", "words"), NO_SPEC)
def test_what_others_have_is_an_error_that_names_what_there_is(body: str, words: str) -> None:
    with pytest.raises(AttnSpecError, match=words):
        attnspec.parse(f"attention a {{ input distance: ids attend {body} }}")


def test_the_page_says_what_happens_and_what_no_spec_says() -> None:
    page = PAGE.read_text(encoding="utf-8")
    names = """Sandwich Graphormer MLA undo_softmax selected_attention NumpyMask MaterializedMask
        make_random_mask OnlineFunc Hedgehog RetNet compressed_sparse_attention max_seq_length"""
    assert [x for x in (*names.split(), "dynamic masks") if x not in page] == []
    found = doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert found.attempted > 15
    assert found.failed == 0


def test_every_spec_of_the_zoo_is_there_by_name() -> None:
    assert attnspec.zoo() == sorted(path.stem for path in zoo.FILES)
    for path, name in zoo.ATTENTIONS:
        assert attnspec.zoo(path.stem, name=name) == zoo.loaded(path, name)
    assert attnspec.zoo("bigbird", block=8) == attnspec.load(zoo.EXAMPLES / "bigbird.attn", block=8)
    assert attnspec.zoo("bigbird.attn").parameters["block"] == 64
    for wrong, words in (
        ("bigbrid", "did you mean `bigbird`"),
        ("../setup", r"no spec '\.\./setup'"),
    ):
        with pytest.raises(AttnSpecError, match=words):
            attnspec.zoo(wrong)
    with pytest.raises(TypeError, match="by name"):
        attnspec.zoo(3)  # type: ignore[call-overload]
