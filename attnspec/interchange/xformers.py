"""`attnspec.from_xformers`: attention biases, patterns and the old registry of xFormers, by name.

Sources: xFormers, ops/fmha/attn_bias.py; components/attention and attention_patterns.py, 2021-2024.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attnspec.lower.work import alibi_slopes
from attnspec.spec import Spec, parse
from attnspec.text.diagnostics import AttnSpecError, hinted

Options = dict[str, Any]

_REFUSED = {
    "LowerTriangularMaskWithTensorBias": "it adds a tensor to the scores; `score bias()` is a"
    " learned table of distances",
    "orthoformer": "landmarks are chosen by orthogonality; `nystrom` takes means of segments",
    "pooling": "it averages neighbouring values and has no scores",
    "lambda": "it sums values under learned position embeddings and has no pairs",
    "visual": "it is a convolution with a large kernel",
    "compositional": "it searches and retrieves by separate heads",
    "random": "it keeps each pair by a chance of its own; `random(keys = r, seed = s)` draws r keys"
    " a query",
    "random_pattern": "it keeps each pair by a chance of its own; `random(keys = r, seed = s)`"
    " draws r keys a query",
    "random_pattern_from_probability_matrix": "it draws each pair by a chance that a table has",
    "local_nd_gaussian_distribution": "it is a table of chances, not of pairs",
    "local_2d_gausian_distribution": "it is a table of chances, not of pairs",
}
"""What is no spec, with the reason."""

_CACHED = (
    "PaddedKeys",
    "GappyKeys",
    "Paged",
)
"""Biases about keys in a cache, by a part of their names."""


def from_xformers(bias: object, **options: Any) -> Spec:
    """The spec of what xFormers calls so: a class of `attn_bias` by name or an instance of it, a
    pattern of `attention_patterns`, or a name of the old registry, with its arguments as keywords.

    The attributes `_window_size`, `window_left` and `window_right` of an instance are read. A
    block-diagonal bias becomes a spec with an input `document` of kind `ids`, and its lengths are
    handed over as labels. Masks from the bottom right and from the top left are the same where
    there are as many queries as keys; with fewer queries, specs take them as the last ones.
    Raises ValueError for what is no spec, with the reason.
    """
    if bias is None:
        raise TypeError(
            "no bias was given: xFormers reads every key without one, which is `attend full`"
        )
    name = bias if isinstance(bias, str) else type(bias).__name__
    given = {**_of_instance(bias), **options}
    if name in _REFUSED:
        raise AttnSpecError(f"`{name}` is no spec: {_REFUSED[name]}")
    if name.startswith(("BlockDiagonal", "Paged")) and any(part in name for part in _CACHED):
        raise AttnSpecError(
            f"`{name}` is no spec: it says where the keys of a cache lie; a call takes them as"
            " `key_padding_mask`, and `module.step` keeps a cache"
        )
    if name not in _KNOWN:
        message = f"xFormers has no attention {name!r} that is known here"
        raise AttnSpecError(hinted(message, name, [*_KNOWN, *_REFUSED]))
    defaults, says = _KNOWN[name]
    for key in given:
        if key not in defaults and key not in _NO_PAIRS:
            message = f"`{name}` has no argument `{key}`"
            raise AttnSpecError(hinted(message, key, defaults))
    filled = {**defaults, **{key: given[key] for key in given if key in defaults}}
    missing = [key for key, value in filled.items() if value is _NEEDED]
    if missing:
        raise AttnSpecError(f"`{name}` needs {', '.join(f'`{key}`' for key in missing)}")
    lines = says(filled)
    return parse("\n".join([f"attention {_called(name)} {{", *lines, "}", ""]))


_NEEDED = object()

_NO_PAIRS = ("dropout", "force_sparsity", "num_heads", "dim_model", "dim_head", "max_seq_len")
"""Arguments that change no pair and no weight of a pass without dropout."""


def _called(name: str) -> str:
    """A class or function name in the letters of the language."""
    parts = "".join(f"_{c.lower()}" if c.isupper() else c for c in name)
    return f"xformers_{parts.strip('_').removesuffix('_mask')}"[:64]


def _of_instance(bias: object) -> Options:
    if isinstance(bias, str):
        return {}
    read = {
        "_window_size": "window_size",
        "window_left": "window_left",
        "window_right": "window_right",
    }
    return {key: getattr(bias, name) for name, key in read.items() if hasattr(bias, name)}


def _count(options: Options, name: str, least: int = 0) -> int:
    value = options[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise AttnSpecError(f"`{name}` must be an integer from {least} on, got {value!r}")
    return value


# --- biases --------------------------------------------------------------------------------------


def _keys_back(options: Options) -> str:
    """A causal window of as many keys as its size says, the query's own among them."""
    return f"window(before = {_count(options, 'window_size', 1) - 1}, after = 0)"


def _documents(*lines: str) -> list[str]:
    return ["    input document: ids", *lines]


_CAUSAL, _FULL = ["    causal", "    attend full"], ["    attend full"]


def _local_bias(options: Options) -> list[str]:
    left, right = (_count(options, name) for name in ("window_left", "window_right"))
    return [f"    attend window(before = {left}, after = {right})"]


# --- patterns ------------------------------------------------------------------------------------


def _odd(options: Options) -> int:
    size = _count(options, "window_size", 1)
    if size % 2 == 0:
        raise AttnSpecError(f"`window_size` must be odd without `causal`, got {size}")
    return size // 2


def _local(options: Options) -> list[str]:
    if options["causal"]:
        # twice the size and one, cut in half
        return [f"    attend window(before = {_count(options, 'window_size')}, after = 0)"]
    return [f"    attend window(radius = {_odd(options)})"]


def _grid(options: Options, graph: str) -> list[str]:
    extents = ", ".join(str(_count(options, name, 1)) for name in ("H", "W"))
    return [f"    sequence grid({extents})", f"    attend {graph}"]


_ROW, _COLUMN = "(q.row - k.row)", "(q.col - k.col)"


def _near_2d(options: Options) -> list[str]:
    """Cells of a norm below a distance."""
    distance, p = options["distance"], options["p"]
    if isinstance(distance, bool) or not isinstance(distance, int | float):
        raise AttnSpecError(f"`distance` must be a number, got {distance!r}")
    norms = {
        1: f"abs{_ROW} + abs{_COLUMN} < {distance}",
        2: f"{_ROW} ** 2 + {_COLUMN} ** 2 < {distance * distance}",
        float("inf"): f"max(abs{_ROW}, abs{_COLUMN}) < {distance}",
    }
    if p not in norms:
        raise AttnSpecError(f"the norm p must be 1, 2 or infinite, got {p!r}")
    return _grid(options, f"where({norms[p]})")


def _swin(options: Options) -> list[str]:
    size, shift = _count(options, "window_size", 1), _count(options, "shift_size")
    if shift >= size:
        raise AttnSpecError(f"`shift_size` must be below the window's {size}, got {shift}")
    move = (size - shift) % size
    # windows begin at the shift, and the first is cut short

    def one(axis: str) -> str:
        q, k = (f"({side}.{axis} + {move}) // {size}" for side in "qk")
        return f"{q} == {k}"

    for name in ("H", "W"):
        if _count(options, name, 1) % size:
            raise AttnSpecError(f"`{name}` must be divisible by the window's {size}")
    return _grid(options, f"where({one('row')} and {one('col')})")


def _dilated_2d(options: Options) -> list[str]:
    step = _count(options, "k", 1)
    return _grid(options, f"where({_ROW} % {step} == 0 and {_COLUMN} % {step} == 0)")


def _alibi(options: Options) -> list[str]:
    heads = _count(options, "num_heads", 1)
    slope = f"2 ** (-8 * (head + 1) / {heads})"
    if heads & (heads - 1):
        slope = f"{list(alibi_slopes(heads))}[head]"
    return [
        f"    heads {heads}",
        f"    attend where(abs(q - k) * {slope} < {options['threshold']})",
    ]


# --- the old registry ----------------------------------------------------------------------------


def _dot_product(options: Options) -> list[str]:
    return _CAUSAL if options["causal"] else _FULL


def _global(options: Options) -> list[str]:
    lines = ["    input marked: tokens"] + (["    causal"] if options["causal"] else [])
    return [*lines, "    attend global(marked)"]


def _favor(options: Options) -> list[str]:
    kinds = {"sm_orf": "positive", "sm_hyp": "hyperbolic", "sm_reg": None}
    chosen = options["feature_map"]
    if kinds.get(chosen) is None:
        raise AttnSpecError(f"`favor` has the feature maps sm_orf and sm_hyp, got {chosen!r}")
    features = options["dim_features"]
    if features is None:
        raise AttnSpecError("`favor` needs `dim_features`: how many random features there are")
    redraw = options["iter_before_redraw"] or 0
    lines = ["    causal"] if options["causal"] else []
    said = f"features = {features}, kind = {kinds[chosen]}, redraw = {redraw}"
    return [*lines, f"    attend favor({said}, seed = 0)"]


def _linformer(options: Options) -> list[str]:
    length = _count(options, "seq_len", 1)
    rank = options["k"] if options["k"] is not None else max(1, length // 4)
    return [f"    attend linformer(rank = {rank}, max_length = {length}, share = none)"]


def _nystrom(options: Options) -> list[str]:
    if options["v_skip_connection"] or options["landmark_pooling"]:
        raise AttnSpecError("`nystrom` has no skip of the values and no pooling of its own here")
    if options["causal"]:
        raise AttnSpecError("`nystrom` has no causal form: its segments run over all positions")
    conv = options["conv_kernel_size"] or 0
    return [
        f"    attend nystrom(landmarks = {options['num_landmarks']},"
        f" iterations = {options['inv_iterations']}, conv = {conv})"
    ]


_Says = Callable[[Options], list[str]]

_WINDOWED: Mapping[str, Any] = {"window_size": _NEEDED}
_CELLS: Mapping[str, Any] = {"H": _NEEDED, "W": _NEEDED}

_KNOWN: dict[str, tuple[Mapping[str, Any], _Says]] = {
    "LowerTriangularMask": ({}, lambda o: _CAUSAL),
    "LowerTriangularFromBottomRightMask": ({}, lambda o: _CAUSAL),
    "LowerTriangularFromBottomRightLocalAttentionMask": (
        _WINDOWED,
        lambda o: [f"    attend {_keys_back(o)}"],
    ),
    "LocalAttentionFromBottomRightMask": (
        {"window_left": _NEEDED, "window_right": _NEEDED},
        _local_bias,
    ),
    "BlockDiagonalMask": ({}, lambda o: _documents("    attend same(document)")),
    "BlockDiagonalCausalMask": (
        {},
        lambda o: _documents("    causal", "    attend same(document)"),
    ),
    "BlockDiagonalCausalFromBottomRightMask": (
        {},
        lambda o: _documents("    causal", "    attend same(document)"),
    ),
    "BlockDiagonalCausalLocalAttentionMask": (
        _WINDOWED,
        lambda o: _documents(f"    attend same(document) & {_keys_back(o)}"),
    ),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (
        _WINDOWED,
        lambda o: _documents(f"    attend same(document) & {_keys_back(o)}"),
    ),
    "local_1d_pattern": (_WINDOWED, lambda o: [f"    attend window(radius = {_odd(o)})"]),
    "causal_1d_pattern": ({}, lambda o: _CAUSAL),
    "global_token_pattern": ({"causal": False}, _global),
    "local_2d_pattern": ({**_CELLS, "distance": _NEEDED, "p": 2.0}, _near_2d),
    "axial_2d_pattern": (_CELLS, lambda o: _grid(o, "axial")),
    "swin_attention_pattern": ({**_CELLS, "window_size": _NEEDED, "shift_size": 0}, _swin),
    "dilated_2d_pattern": ({**_CELLS, "k": 2}, _dilated_2d),
    "alibi_pattern": ({"threshold": _NEEDED, "num_heads": _NEEDED}, _alibi),
    "scaled_dot_product": ({"causal": False, "seq_len": None, "to_seq_len": None}, _dot_product),
    "local": ({"window_size": 5, "causal": False}, _local),
    "global": ({"causal": False, "attention_query_mask": None}, _global),
    "favor": (
        {
            "causal": False,
            "dim_features": None,
            "iter_before_redraw": None,
            "feature_map": "sm_reg",
            "normalize_inputs": False,
        },
        _favor,
    ),
    "linformer": ({"seq_len": _NEEDED, "k": None}, _linformer),
    "nystrom": (
        {
            "num_landmarks": 64,
            "inv_iterations": 6,
            "conv_kernel_size": None,
            "landmark_pooling": None,
            "v_skip_connection": None,
            "causal": False,
        },
        _nystrom,
    ),
    "fourier_mix": ({}, lambda o: ["    attend fourier()"]),
}
"""The arguments of each name with their defaults, and what is written for them."""
