"""Names of xFormers as specs, against the patterns as they define them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attnspec
from attnspec.interchange.xformers import from_xformers
from attnspec.text.diagnostics import AttnSpecError

N = 24
Q, K = np.arange(N)[:, None], np.arange(N)[None]
DOC = np.arange(N) // 7
SAME = DOC[:, None] == DOC[None]
MARKED = np.arange(N) % 9 == 4

BIASES: dict[str, tuple[dict[str, Any], np.ndarray]] = {
    "LowerTriangularMask": ({}, K <= Q),
    "LowerTriangularFromBottomRightMask": ({}, K <= Q),
    "LowerTriangularFromBottomRightLocalAttentionMask": (
        {"window_size": 4},
        (K <= Q) & (K > Q - 4),
    ),
    "LocalAttentionFromBottomRightMask": (
        {"window_left": 3, "window_right": 1},
        (Q - 3 <= K) & (K <= Q + 1),
    ),
    "BlockDiagonalMask": ({}, SAME),
    "BlockDiagonalCausalMask": ({}, SAME & (K <= Q)),
    "BlockDiagonalCausalFromBottomRightMask": ({}, SAME & (K <= Q)),
    "BlockDiagonalCausalLocalAttentionMask": (
        {"window_size": 3},
        SAME & (K <= Q) & (K > Q - 3),
    ),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (
        {"window_size": 3},
        SAME & (K <= Q) & (K > Q - 3),
    ),
    "local_1d_pattern": ({"window_size": 5}, abs(Q - K) <= 2),
    "causal_1d_pattern": ({}, K <= Q),
    "global_token_pattern": ({}, MARKED[:, None] | MARKED[None]),
    "scaled_dot_product": ({"causal": True, "dropout": 0.1}, K <= Q),
    "local": ({"window_size": 7}, abs(Q - K) <= 3),
    "global": ({}, MARKED[:, None] | MARKED[None]),
}


@pytest.mark.parametrize("name", BIASES)
def test_a_name_has_its_pairs(name: str) -> None:
    options, meant = BIASES[name]
    spec = from_xformers(name, **options)
    inputs = {key: {"document": DOC, "marked": MARKED}[key] for key in spec.inputs}
    assert (spec.mask(N, inputs=inputs) == meant).all()


def test_a_causal_local_window_of_the_registry_keeps_one_key_more() -> None:
    spec = from_xformers("local", window_size=4, causal=True)
    # local_1d_pattern(2 * 4 + 1) & causal
    assert (spec.mask(N) == ((abs(Q - K) <= 4) & (K <= Q))).all()


ROW = np.repeat(np.arange(4), 6)
COLUMN = np.tile(np.arange(6), 4)
DOWN, ACROSS = ROW[:, None] - ROW[None], COLUMN[:, None] - COLUMN[None]


def swin(size: int, shift: int) -> np.ndarray:
    """Cells whose nearest anchor is the same."""
    extra, start = int(shift % size != 0), size / 2 - (-shift) % size
    anchors = [
        (a * size + start, b * size + start)
        for a in range(4 // size + extra)
        for b in range(6 // size + extra)
    ]
    nearest = [
        min(
            range(len(anchors)),
            key=lambda at: (r + 0.5 - anchors[at][0]) ** 2 + (c + 0.5 - anchors[at][1]) ** 2,
        )
        for r, c in zip(ROW, COLUMN, strict=True)
    ]
    cells = np.array(nearest)
    found: np.ndarray = np.equal(cells[:, None], cells[None])
    return found


@pytest.mark.parametrize(
    ("name", "options", "meant"),
    [
        ("axial_2d_pattern", {}, (DOWN == 0) | (ACROSS == 0)),
        ("local_2d_pattern", {"distance": 2.5}, DOWN**2 + ACROSS**2 < 2.5**2),
        ("local_2d_pattern", {"distance": 3, "p": 1}, abs(DOWN) + abs(ACROSS) < 3),
        (
            "local_2d_pattern",
            {"distance": 2, "p": float("inf")},
            np.maximum(abs(DOWN), abs(ACROSS)) < 2,
        ),
        ("dilated_2d_pattern", {"k": 2}, (DOWN % 2 == 0) & (ACROSS % 2 == 0)),
        ("swin_attention_pattern", {"window_size": 2}, swin(2, 0)),
        ("swin_attention_pattern", {"window_size": 2, "shift_size": 1}, swin(2, 1)),
        ("swin_attention_pattern", {"window_size": 1}, swin(1, 0)),
        ("dilated_2d_pattern", {}, (DOWN % 2 == 0) & (ACROSS % 2 == 0)),
        ("dilated_2d_pattern", {"k": 1}, DOWN == DOWN),
    ],
)
def test_a_pattern_of_a_grid_has_its_pairs(
    name: str, options: dict[str, Any], meant: np.ndarray
) -> None:
    assert (from_xformers(name, H=4, W=6, **options).mask(24) == meant).all()


def test_alibi_cuts_by_slopes() -> None:
    spec = from_xformers("alibi_pattern", threshold=1.0, num_heads=4)
    for head in range(4):
        assert (spec.mask(N, head=head) == (abs(Q - K) * 2.0 ** (-2 * (head + 1)) < 1.0)).all()
    spec = from_xformers("alibi_pattern", threshold=1.0, num_heads=6)
    for head, power in enumerate((2, 4, 6, 8, 1, 3)):
        assert (spec.mask(N, head=head) == (abs(Q - K) * 2.0**-power < 1.0)).all()


def test_an_instance_says_its_own_sizes() -> None:
    class LowerTriangularFromBottomRightLocalAttentionMask:
        _window_size = 5

    class LocalAttentionFromBottomRightMask:
        window_left, window_right = 2, 3

    found = from_xformers(LowerTriangularFromBottomRightLocalAttentionMask())
    assert (found.mask(N) == ((K <= Q) & (K > Q - 5))).all()
    found = from_xformers(LocalAttentionFromBottomRightMask())
    assert (found.mask(N) == ((Q - 2 <= K) & (K <= Q + 3))).all()


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("fourier_mix", {}, "attend fourier()"),
        (
            "nystrom",
            {"num_landmarks": 8, "conv_kernel_size": 3},
            "attend nystrom(landmarks = 8, iterations = 6, conv = 3)",
        ),
        (
            "linformer",
            {"seq_len": 64, "k": 8},
            "attend linformer(rank = 8, max_length = 64, share = none)",
        ),
        (
            "linformer",
            {"seq_len": 64},
            "attend linformer(rank = 16, max_length = 64, share = none)",
        ),
        ("linformer", {"seq_len": 3}, "attend linformer(rank = 1, max_length = 3, share = none)"),
        ("nystrom", {}, "attend nystrom(landmarks = 64, iterations = 6, conv = 0)"),
        ("scaled_dot_product", {}, "attend full"),
        (
            "favor",
            {"dim_features": 16, "feature_map": "sm_hyp", "iter_before_redraw": 5},
            "attend favor(features = 16, kind = hyperbolic, redraw = 5, seed = 0)",
        ),
        (
            "favor",
            {"dim_features": 16, "feature_map": "sm_orf", "causal": True},
            "causal attend favor(features = 16, seed = 0)",
        ),
    ],
)
def test_mechanisms_of_the_registry(name: str, options: dict[str, Any], text: str) -> None:
    found = from_xformers(name, **options)
    meant = attnspec.parse(f"attention a {{ {text} }}")
    assert found.program.attends == meant.program.attends
    assert found.program.causal == meant.program.causal


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("LowerTriangularMaskk", {}, "did you mean `LowerTriangularMask`"),
        ("LowerTriangularMaskWithTensorBias", {}, "score bias"),
        ("BlockDiagonalCausalWithOffsetPaddedKeysMask", {}, "key_padding_mask"),
        ("BlockDiagonalGappyKeysMask", {}, "cache"),
        ("PagedBlockDiagonalPaddedKeysMask", {}, "cache"),
        ("random", {"r": 0.1}, "random\\(keys"),
        ("random_pattern", {}, "random\\(keys"),
        ("random_pattern_from_probability_matrix", {}, "a chance that a table has"),
        ("local_nd_gaussian_distribution", {}, "table of chances"),
        ("orthoformer", {}, "landmarks"),
        ("pooling", {}, "averages"),
        ("lambda", {}, "no pairs"),
        ("visual", {}, "convolution"),
        ("compositional", {}, "retrieves"),
        ("local", {"window_size": 4}, "odd"),
        ("local", {"window": 5}, "window_size"),
        ("LocalAttentionFromBottomRightMask", {"window_left": 3}, "needs `window_right`"),
        ("swin_attention_pattern", {"H": 5, "W": 6, "window_size": 2}, "divisible"),
        ("favor", {"dim_features": 8}, "sm_orf"),
        ("nystrom", {"causal": True}, "no causal form"),
        ("nystrom", {"v_skip_connection": 3}, "no skip of the values"),
        ("nystrom", {"landmark_pooling": 3}, "no pooling"),
        ("favor", {"feature_map": "sm_orf"}, "needs `dim_features`"),
        ("swin_attention_pattern", {"H": 4, "W": 5, "window_size": 2}, "`W` must be divisible"),
        ("swin_attention_pattern", {"H": 0, "W": 4, "window_size": 2}, "from 1 on, got 0"),
        (
            "swin_attention_pattern",
            {"H": 4, "W": 4, "window_size": 2, "shift_size": 2},
            "below the window's 2, got 2",
        ),
        ("local", {"window_size": True}, "from 1 on, got True"),
        ("local_1d_pattern", {"window_size": 0}, "from 1 on, got 0"),
        ("alibi_pattern", {"num_heads": 0, "threshold": 1.0}, "from 1 on, got 0"),
        ("local_2d_pattern", {"H": 3, "W": 3, "distance": 2, "p": 3}, "norm"),
    ],
)
def test_what_is_no_spec_is_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(AttnSpecError, match=words):
        from_xformers(name, **options)


def test_an_argument_of_another_type_is_refused_in_words() -> None:
    with pytest.raises(AttnSpecError, match="`distance` must be a number, got '2'"):
        from_xformers("local_2d_pattern", H=3, W=4, distance="2")
    with pytest.raises(TypeError, match="every key without one, which is `attend full`"):
        from_xformers(None)


def test_a_spec_is_called_as_what_it_was() -> None:
    assert from_xformers("LowerTriangularMask").name == "xformers_lower_triangular"
    assert from_xformers("local_1d_pattern", window_size=3).name == "xformers_local_1d_pattern"
    name = "BlockDiagonalCausalLocalAttentionFromBottomRightMask"
    said = from_xformers(name, window_size=3).name
    assert said == "xformers_block_diagonal_causal_local_attention_from_bottom_right"
    assert from_xformers("fourier_mix", dropout=0.1).source == from_xformers("fourier_mix").source


def test_tokens_of_the_registry_may_be_read_causally() -> None:
    meant = (MARKED[:, None] | MARKED[None]) & (K <= Q)
    for name in ("global", "global_token_pattern"):
        spec = from_xformers(name, causal=True)
        assert (spec.mask(N, inputs={"marked": MARKED}) == meant).all()
