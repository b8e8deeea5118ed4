"""DeepSpeed's sparsity configurations against their layouts, block by block."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from attnspec.interchange.deepspeed import from_deepspeed
from attnspec.text.diagnostics import AttnSpecError

B = 4


def layout(config: dict[str, Any], h: int, blocks: int) -> np.ndarray:
    """Which blocks head h reads, bool [blocks, blocks], without those drawn at random."""
    mode, found = config["mode"], np.zeros((blocks, blocks), bool)
    i, j = np.arange(blocks)[:, None], np.arange(blocks)[None]
    one_way = config.get("attention", "bidirectional") == "unidirectional"
    below = j <= i if one_way else np.ones_like(found)
    near = abs(i - j) <= config.get("num_sliding_window_blocks", 3) // 2
    if mode == "dense":
        return ~found
    if mode == "local":
        one_way = config.get("attention") != "bidirectional"
        return np.logical_and(near, j <= i) if one_way else np.array(near)
    if mode == "fixed":
        size, count = config.get("num_local_blocks", 4), config.get("num_global_blocks", 1)
        found |= (i // size == j // size) & below
        first = size - (1 + h % config.get("num_different_global_patterns", 1)) * count
        whole = blocks - blocks % size
        starts = list(range(first, whole, size))
        starts += [min(whole + first, blocks - count)] if whole < blocks else []
        for start in starts:
            low = max(0, start)
            found[low if one_way else 0 :, low : start + count] = True
            if config.get("horizontal_global_attention"):
                found[low : start + count] = True
        return found
    if mode == "variable":
        sizes, at = list(config.get("local_window_blocks", [4])), 0
        while at < blocks:
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            own = slice(at, min(at + size, blocks))
            found[own, own] = below[own, own]
            at += size
        for start, end in ranges(config):
            found[start if one_way else 0 :, start:end] = True
            if config.get("horizontal_global_attention"):
                found[start:end] = True
        return found
    if mode == "bigbird":
        count = config.get("num_global_blocks", 1)
        found |= near | (i < count) | (j < count)
        return np.where(below, found, False)
    for start, end in ranges(config):
        found[start:end], found[:, start:end] = True, True
    found |= near
    return np.where(below, found, False)


def ranges(config: dict[str, Any]) -> list[tuple[int, int]]:
    starts = config.get("global_block_indices", [0])
    ends = config.get("global_block_end_indices") or [start + 1 for start in starts]
    return list(zip(starts, ends, strict=True))


CONFIGS: list[dict[str, Any]] = [
    {"mode": "dense"},
    {"mode": "fixed"},
    {"mode": "fixed", "attention": "unidirectional"},
    {"mode": "fixed", "attention": "unidirectional", "num_local_blocks": 6, "num_global_blocks": 2},
    {"mode": "fixed", "horizontal_global_attention": True, "num_local_blocks": 3},
    {
        "mode": "fixed",
        "num_heads": 4,
        "different_layout_per_head": True,
        "num_different_global_patterns": 4,
    },
    {
        "mode": "fixed",
        "num_heads": 4,
        "attention": "unidirectional",
        "different_layout_per_head": True,
        "num_different_global_patterns": 2,
        "num_global_blocks": 2,
    },
    {"mode": "variable"},
    {"mode": "variable", "local_window_blocks": [2, 3, 1]},
    {"mode": "variable", "local_window_blocks": [1, 4], "attention": "unidirectional"},
    {
        "mode": "variable",
        "global_block_indices": [1, 5],
        "global_block_end_indices": [3, 6],
        "horizontal_global_attention": True,
    },
    {
        "mode": "variable",
        "global_block_indices": [0, 4],
        "global_block_end_indices": [2, 7],
        "attention": "unidirectional",
    },
    {"mode": "bigbird", "num_random_blocks": 0},
    {"mode": "bigbird", "num_random_blocks": 0, "attention": "unidirectional"},
    {"mode": "bigbird", "num_random_blocks": 0, "num_sliding_window_blocks": 5,
     "num_global_blocks": 2},
    {"mode": "bslongformer"},
    {"mode": "bslongformer", "global_block_indices": [2, 6], "attention": "unidirectional"},
    {"mode": "bslongformer", "global_block_indices": [1], "global_block_end_indices": [4]},
    {"mode": "local"},
    {"mode": "local", "attention": "bidirectional", "num_sliding_window_blocks": 5},
    {"mode": "local", "attention": "bidirectional", "num_sliding_window_blocks": 4},
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("blocks", [3, 8, 11])
def test_the_pairs_are_those_of_the_layout(config: dict[str, Any], blocks: int) -> None:
    spec = from_deepspeed({**config, "block": B})
    for head in range(config.get("num_heads", 1)):
        meant = np.kron(layout(config, head, blocks), np.ones((B, B))).astype(bool)
        assert (spec.mask(B * blocks, head=head) == meant).all()


def test_the_file_of_a_run_is_read() -> None:
    text = json.dumps({"train_batch_size": 8, "sparse_attention": {"mode": "local", "block": 8}})
    assert from_deepspeed(text) == from_deepspeed({"mode": "local", "block": 8})


def test_random_blocks_are_drawn_as_many() -> None:
    spec = from_deepspeed({"mode": "bigbird", "block": B, "num_random_blocks": 2})
    fixed = from_deepspeed({"mode": "bigbird", "block": B, "num_random_blocks": 0})
    drawn = (spec.mask(64) & ~fixed.mask(64))[::B, ::B].sum(1)
    assert 0 < drawn.max() <= 2


def test_the_diagonal_is_left_to_its_caller() -> None:
    config = {"mode": "local", "block": B}
    assert from_deepspeed(config).mask(8)[0, B - 1]
    assert not from_deepspeed(config, causal=True).mask(8)[0, B - 1]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "no JSON"),
        ({"mode": "bigbrid"}, "did you mean `bigbird`"),
        ({"mode": "fixed", "num_local_block": 3}, "did you mean `num_local_blocks`"),
        ({"mode": "fixed", "num_local_blocks": 5, "num_global_blocks": 2}, "divisible"),
        ({"mode": "fixed", "num_different_global_patterns": 2}, "different_layout_per_head"),
        (
            {
                "mode": "fixed",
                "num_different_global_patterns": 5,
                "different_layout_per_head": True,
            },
            "at most 4",
        ),
        (
            {
                "mode": "fixed",
                "attention": "unidirectional",
                "horizontal_global_attention": True,
            },
            "only bidirectional",
        ),
        ({"mode": "local", "attention": "sideways"}, "sideways"),
        ({"mode": "local", "block": 0}, "from 1 on"),
        ({"mode": "variable", "local_window_blocks": []}, "list of sizes"),
        ({"mode": "variable", "global_block_end_indices": [1, 2]}, "1 starts"),
        ({"mode": "bslongformer", "global_block_end_indices": [0]}, "from 1 on"),
        ({"mode": "dense", "rpe": 3}, "score bias"),
        ({"sparse_attention": 3}, "must be a mapping of options, got int"),
        ({"train_batch_size": 3}, "has no `sparse_attention`"),
        ({"mode": "bslongformer", "global_block_indices": "x"}, "list of blocks, got 'x'"),
        ({"mode": "bslongformer", "global_block_indices": None}, "list of blocks, got None"),
        ({"mode": "bslongformer", "global_block_indices": ["x"]}, "from 0 on, got 'x'"),
        ({"mode": "variable", "global_block_end_indices": 3}, "list of blocks, got 3"),
        ({"mode": "fixed", "horizontal_global_attention": "yes"}, "true or false, got 'yes'"),
    ],
)
def test_what_deepspeed_refuses_is_refused(config: Any, words: str) -> None:
    with pytest.raises(AttnSpecError, match=words):
        from_deepspeed(config)


def test_what_is_no_configuration_is_refused() -> None:
    with pytest.raises(TypeError, match="mapping"):
        from_deepspeed([1])  # type: ignore[arg-type]


def test_random_blocks_are_those_of_every_head_or_of_each() -> None:
    config = {"mode": "variable", "block": B, "num_random_blocks": 2, "num_heads": 3}
    for apart in (False, True):
        spec = from_deepspeed({**config, "different_layout_per_head": apart})
        masks = {spec.mask(64, head=head).tobytes() for head in range(3)}
        assert len(masks) == (3 if apart else 1)


@pytest.mark.parametrize("name", ["local_window_blocks", "global_block_indices"])
def test_a_list_has_counts_from_the_least(name: str) -> None:
    least = 1 if name == "local_window_blocks" else 0
    from_deepspeed({"mode": "variable", name: [least]})
    for value in (least - 1, True, "2"):
        with pytest.raises(AttnSpecError, match=f"`{name}` must be an integer from {least} on"):
            from_deepspeed({"mode": "variable", name: [value]})
