"""`attnspec.from_deepspeed`: the sparsity configurations of DeepSpeed's sparse attention.

A layout says which blocks of queries read which blocks of keys, without a causal mask inside the
blocks of the diagonal: that was the caller's, and is `causal = True` here.
Source: DeepSpeed, sparsity_config.py, 2020.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attnspec.spec import Spec, parse
from attnspec.text.diagnostics import AttnSpecError, hinted

_COMMON: dict[str, Any] = {
    "mode": None,
    "num_heads": None,
    "block": 16,
    "different_layout_per_head": False,
}

_DEFAULTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "fixed": {
        "num_local_blocks": 4,
        "num_global_blocks": 1,
        "attention": "bidirectional",
        "horizontal_global_attention": False,
        "num_different_global_patterns": 1,
    },
    "variable": {
        "num_random_blocks": 0,
        "local_window_blocks": [4],
        "global_block_indices": [0],
        "global_block_end_indices": None,
        "attention": "bidirectional",
        "horizontal_global_attention": False,
    },
    "bigbird": {
        "num_random_blocks": 1,
        "num_sliding_window_blocks": 3,
        "num_global_blocks": 1,
        "attention": "bidirectional",
    },
    "bslongformer": {
        "num_sliding_window_blocks": 3,
        "global_block_indices": [0],
        "global_block_end_indices": None,
        "attention": "bidirectional",
    },
    "local": {"num_sliding_window_blocks": 3, "attention": "unidirectional"},
}
"""The options of each mode with DeepSpeed's defaults."""

_NOT_PAIRS = ("max_seq_length", "key_padding_mask_mode", "attn_mask_mode", "rpe")
"""Options of the attention module, which change no pair of the layout."""


def from_deepspeed(config: str | Mapping[str, Any], *, causal: bool = False) -> Spec:
    """The spec of a DeepSpeed sparsity configuration: the JSON text of its config file, or its
    `sparse_attention` part, as a dictionary.

    `num_heads` of the configuration becomes `heads`. `causal` adds the mask k <= q, which a
    unidirectional layout leaves to its caller. Random blocks are drawn anew, as many for each row.
    Raises ValueError for an option that DeepSpeed does not have or refuses.
    """
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except json.JSONDecodeError as error:
            raise AttnSpecError(f"this is no JSON: {error}") from None
    if not isinstance(config, Mapping):
        raise TypeError(f"a configuration is a mapping, got {type(config).__name__}")
    options = _options(config)
    mode = str(options.get("mode", "fixed")).lower()
    mode = "local" if mode in ("local_sliding_window", "localslidingwindow") else mode
    if mode not in _DEFAULTS:
        message = f"DeepSpeed has no sparsity mode {mode!r}; it has {', '.join(_DEFAULTS)}"
        raise AttnSpecError(hinted(message, mode, _DEFAULTS))
    known = {**_COMMON, **_DEFAULTS[mode]}
    for name in options:
        if name not in known and name not in _NOT_PAIRS:
            raise AttnSpecError(hinted(f"the mode `{mode}` has no option `{name}`", name, known))
    if options.get("rpe") is not None:
        raise AttnSpecError("`rpe` adds a tensor to the scores; `score bias()` is learned")
    given = {**known, **options}
    for name in ("block", *(key for key in given if key.startswith("num_"))):
        _require_count(name, given[name], 0 if name in ("num_random_blocks", "num_heads") else 1)
    for name in ("different_layout_per_head", "horizontal_global_attention"):
        if not isinstance(given.get(name, False), bool):
            raise AttnSpecError(f"`{name}` must be true or false, got {given[name]!r}")
    if given.get("attention", "bidirectional") not in ("bidirectional", "unidirectional"):
        raise AttnSpecError(f"attention is uni- or bidirectional, got {given['attention']!r}")
    lines = _MODES[mode](given)
    heads = [f"    heads {given['num_heads']}"] if given["num_heads"] else []
    masked = ["    causal"] if causal else []
    return parse("\n".join([f"attention deepspeed_{mode} {{", *heads, *masked, *lines, "}", ""]))


def _options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `sparse_attention` part of a config file; a configuration without one is it itself."""
    part = config.get("sparse_attention", config)
    if not isinstance(part, Mapping):
        raise AttnSpecError(
            f"`sparse_attention` must be a mapping of options, got {type(part).__name__}"
        )
    own = {"mode", *_COMMON, *(name for each in _DEFAULTS.values() for name in each)}
    if part is config and part and not own & part.keys():
        raise AttnSpecError(
            "the configuration has no `sparse_attention`, and no option of it: got"
            f" {', '.join(map(repr, part))}"
        )
    return dict(part)


def _require_count(name: str, value: object, least: int) -> None:
    if name == "num_heads" and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise AttnSpecError(f"`{name}` must be an integer from {least} on, got {value!r}")


def _lower(given: Mapping[str, Any], graph: str) -> str:
    """A graph, under unidirectional attention without the blocks after the query's own."""
    if given["attention"] == "bidirectional":
        return graph
    block = given["block"]
    return f"({graph}) & where(k // {block} <= q // {block})"


def _per_head(given: Mapping[str, Any]) -> str:
    return "" if given["different_layout_per_head"] else ", per_head = false"


def _dense(given: Mapping[str, Any]) -> list[str]:
    return ["    attend full"]


def _fixed(given: Mapping[str, Any]) -> list[str]:
    block, local, count = (given[x] for x in ("block", "num_local_blocks", "num_global_blocks"))
    patterns, one_way = (
        given["num_different_global_patterns"],
        given["attention"] != "bidirectional",
    )
    if local % count:
        raise AttnSpecError(
            f"num_local_blocks = {local} must be divisible by num_global_blocks = {count}"
        )
    if patterns > 1 and not given["different_layout_per_head"]:
        raise AttnSpecError("several global patterns need `different_layout_per_head`")
    if patterns > local // count:
        raise AttnSpecError(
            f"there are at most {local // count} different global patterns, got {patterns}"
        )
    if one_way and given["horizontal_global_attention"]:
        raise AttnSpecError("only bidirectional attention has horizontal global attention")
    first = f"{local - count}" if patterns == 1 else f"{local} - (1 + head % {patterns}) * {count}"
    window = f"block(size = {local * block})"
    if one_way:
        window = f"{window} & where(k // {block} <= q // {block})"
    parts = [window, *_verticals("k", block, local, count, one_way)]
    if given["horizontal_global_attention"]:
        parts += _verticals("q", block, local, count, False)
    return [
        f"    let blocks = (n + {block - 1}) // {block}",
        f"    let whole = blocks - blocks % {local}",
        f"    let first = {first}",
        f"    let last = max(0, min(whole + first, blocks - {count}))",
        "    attend " + "\n         | ".join(parts),
    ]


def _verticals(side: str, block: int, local: int, count: int, one_way: bool) -> list[str]:
    """The global blocks of the whole windows, and those of a last one that is short."""
    at = f"{side} // {block}"
    start = f"{at} - {at} % {local} + first"
    regular = f"{at} < whole and first <= {at} % {local} < first + {count}"
    short = f"whole < blocks and last <= {at} < last + {count}"
    if one_way:
        regular, short = (
            f"{regular} and q // {block} >= {start}",
            f"{short} and q // {block} >= last",
        )
    return [f"where({regular})", f"where({short})"]


def _variable(given: Mapping[str, Any]) -> list[str]:
    block, one_way = given["block"], given["attention"] != "bidirectional"
    if one_way and given["horizontal_global_attention"]:
        raise AttnSpecError("only bidirectional attention has horizontal global attention")
    local = _windows(given["local_window_blocks"], block)
    if one_way:
        local = f"({local}) & where(k // {block} <= q // {block})"
    parts = [local]
    for first, end in _global_blocks(given):
        if one_way:
            parts.append(f"where({first * block} <= k < {end * block} and q >= {first * block})")
        else:
            kind = "global" if given["horizontal_global_attention"] else "columns"
            parts.append(f"{kind}({_range(first, end, block)})")
    return ["    attend " + "\n         | ".join([*parts, *_random(given)])]


def _windows(sizes: object, block: int) -> str:
    """Windows of the sizes listed one behind the other, the last of them repeated to the end."""
    if not isinstance(sizes, Sequence) or not sizes or isinstance(sizes, str):
        raise AttnSpecError(f"`local_window_blocks` must be a list of sizes, got {sizes!r}")
    for size in sizes:
        _require_count("local_window_blocks", size, 1)
    *opening, last = (size * block for size in sizes)
    parts, start = [], 0
    for size in opening:
        end = start + size - 1
        parts.append(f"where(q in {start}..{end} and k in {start}..{end})")
        start += size
    if not start:
        return f"block(size = {last})"
    tail = f"(q - {start}) // {last} == (k - {start}) // {last}"
    return " | ".join([*parts, f"where(q >= {start} and k >= {start} and {tail})"])


def _global_blocks(given: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The ranges [first, end) of global blocks."""
    starts, ends = given["global_block_indices"], given["global_block_end_indices"]
    for name, value in (("global_block_indices", starts), ("global_block_end_indices", ends)):
        optional = name == "global_block_end_indices" and value is None
        if not optional and (not isinstance(value, Sequence) or isinstance(value, str)):
            raise AttnSpecError(f"`{name}` must be a list of blocks, got {value!r}")
    for start in starts:
        _require_count("global_block_indices", start, 0)
    ends = [start + 1 for start in starts] if ends is None else ends
    if len(starts) != len(ends):
        raise AttnSpecError(
            f"there are {len(starts)} starts of global blocks and {len(ends)} ends, not as many"
        )
    for start, end in zip(starts, ends, strict=True):
        _require_count("global_block_end_indices", end, start + 1)
    return list(zip(starts, ends, strict=True))


def _range(first: int, end: int, block: int) -> str:
    if first == 0:
        return f"first({end * block})"
    return f"positions({first * block}..{end * block - 1})"


def _random(given: Mapping[str, Any]) -> list[str]:
    count = given["num_random_blocks"]
    if not count:
        return []
    return [f"random_blocks(size = {given['block']}, blocks = {count}, seed = 0{_per_head(given)})"]


def _near(given: Mapping[str, Any]) -> str:
    # DeepSpeed halves an even number too: it means one block more than it says
    reach = given["num_sliding_window_blocks"] // 2
    after = 0 if given["attention"] == "unidirectional" else reach
    return f"block(size = {given['block']}, before = {reach}, after = {after})"


def _bigbird(given: Mapping[str, Any]) -> list[str]:
    parts = [_near(given), f"global(first({given['num_global_blocks'] * given['block']}))"]
    return ["    attend " + _lower(given, " | ".join([*parts, *_random(given)]))]


def _bslongformer(given: Mapping[str, Any]) -> list[str]:
    block = given["block"]
    parts = [_near(given), *(f"global({_range(*each, block)})" for each in _global_blocks(given))]
    return ["    attend " + _lower(given, " | ".join(parts))]


def _local(given: Mapping[str, Any]) -> list[str]:
    return [f"    attend {_near(given)}"]


_MODES: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "dense": _dense,
    "fixed": _fixed,
    "variable": _variable,
    "bigbird": _bigbird,
    "bslongformer": _bslongformer,
    "local": _local,
}
