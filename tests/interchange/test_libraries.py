"""The masks that other libraries ship, as specs: each row against its predicate, on all pairs.

A row is a text of the language, and the predicate as the library states it, in numpy. Predicates
that `from_mask_mod` reads stand in the file of test_mask_mods.py, DeepSpeed's layouts are files of
the zoo. What no spec says is on the page of the room, with its reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zoo

import attnspec
from attnspec import AttnSpecError

PAGE = Path(attnspec.__file__).parent / "interchange" / "README.md"

DOC = np.array([0] * 5 + [3] * 11 + [1] * 2 + [2] * 30)
MARKED = np.arange(48) % 11 == 3
PARENT = (0, 0, 1, 1, 0, 4, 5, 5)
"""Of eight drafted tokens, the parent of each; the first is the root."""

ANCESTORS = np.eye(8, dtype=bool)
for node in range(1, 8):
    ANCESTORS[node] |= ANCESTORS[PARENT[node]]

CHOSEN = np.stack([np.arange(48) // 12, np.arange(48) // 4 % 4, np.full(48, -1)], 1)[None]


IMAGES = np.array([(0, 9), (4, 21), (9, 12), (5, 5), (0, 21), (20, 21), (3, 4), (1, 17)])
"""Of eight images, the words that read them: from the first up to the second."""


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
    **{"d": DOC, "real": ~MARKED},
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
    "attention-gym, generate_vision_cross_attention_mask_mod": (
        "cross input first: numbers input end: numbers attend where(first(k) <= q and q < end(k))",
        "(IMAGES[k // 6, 0] <= q) & (q < IMAGES[k // 6, 1])",
    ),
    "attention-gym, generate_jetspec_tree_causal_mask_mod": (
        TREE,
        "(k < 5) | (q >= 5) & (k >= 5) & ANCESTORS[np.maximum(q - 5, 0), np.maximum(k - 5, 0)]",
        (13,),
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
    "attention-gym, generate_vsa_mask_mod": (
        "input topk: choices(size = 12) input real: tokens attend chosen(topk) & columns(real)",
        "(CHOSEN[0][q] == (k // 12)[..., None]).any(-1) & ~MARKED[k]",
        (48,),
    ),
    "transformers, blockwise_overlay": (
        "input d: ids input real: tokens causal attend full & (causal | same(d) & columns(real))",
        "k <= q",
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
    *((f"linear(feature = {x})", "`feature` must be one of elu1, relu") for x in _MAPS),
    *((f"{x}()", f"`{x}` is not defined") for x in _OTHERS),
]


@pytest.mark.parametrize(("body", "words"), NO_SPEC)
def test_names_from_other_libraries_are_errors_that_name_the_equivalent(
    body: str, words: str
) -> None:
    with pytest.raises(AttnSpecError, match=words):
        attnspec.parse(f"attention a {{ input distance: ids attend {body} }}")


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
