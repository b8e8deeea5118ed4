"""What bounds memory changes no result: sizes of pieces, made small, against the definition."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
from attention_checks import (
    BACKEND_NAMES,
    GRAPHS,
    defined,
    module_of,
    spec_of,
    tensors,
    with_gradients,
)
from caches import forget
from pattern_samples import samples_of
from relation_checks import faults
from sweeps import in_turn

from attnspec.backends.factored.features.spans import Summing
from attnspec.graphs.patterns import PATTERNS
from attnspec.graphs.relation import Relation

LISTING = {
    "attnspec.graphs.counter_rng": {"_BATCH": 16, "_ROWS": 4},
    "attnspec.graphs.edge_table": {"_ROWS": 8, "_TILE": 2},
    "attnspec.graphs.relation": {"_CHUNK": 64, "_FEW": 3, "_LOOKED": 64, "_SIDE": 4, "_FANOUT": 2},
    "attnspec.graphs.token_sets": {"_LOOKED": 8},
}
"""Of what lists pairs, looks at them and draws them."""

COMPUTING = {
    "attnspec.backends.bands.attention": {"HELD": 64, "TALLEST": 16},
    "attnspec.backends.bands.blocks": {"PIECE": 256, "OWN": 64, "TALL": 1},
    "attnspec.backends.bands.views": {"WIDEST": 1, "KEPT": 64},
    "attnspec.backends.common.pieces": {"PIECE": 256},
    "attnspec.backends.decided.cluster": {"MOST": 64},
    "attnspec.backends.decided.hashes": {"MOST": 64},
    "attnspec.backends.decided.topk": {"MOST": 64},
    "attnspec.backends.factored.costs": {"PIECE": 64},
    "attnspec.backends.factored.features.taylor": {"CHUNK": 8},
    "attnspec.backends.factored.hybrid.pair_by_pair": {"PAIRS": 16},
    "attnspec.backends.factored.low_rank.mixing": {"LONG": 16},
    "attnspec.backends.factored.low_rank.nystrom": {"ROWS": 8},
    "attnspec.backends.lists.attention": {"CHUNK": 256, "PIECE": 64, "TALL": 4},
    "attnspec.backends.lists.batches": {"TILES": 2},
    "attnspec.backends.lists.kernel": {"TOGETHER": 2},
    "attnspec.backends.lists.parts": {"PART": 64},
    "attnspec.ir.mechanisms.declaration": {"BLOCK": 256, "FUSED": 16, "LANES": 1},
    "attnspec.layout.edge_list": {"_AT_ONCE": 16},
    "attnspec.layout.tile_layout": {"_LOOKED": 64},
    "attnspec.layout.tiling": {"_AT_ONCE": 16},
}
"""Of what lays pairs out and computes with them."""


@contextmanager
def small(sizes: Mapping[str, Mapping[str, int]]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if sizes is COMPUTING:
            # its chunk and its block
            patch.setattr(Summing.__init__, "__defaults__", (8, 256))
        for module, values in sizes.items():
            __import__(module)
            for name, value in values.items():
                whole = getattr(sys.modules[module], name)
                # who imports it has it by the same name
                for other, loaded in [*sys.modules.items()]:
                    if other.startswith("attnspec") and vars(loaded).get(name) is whole:
                        patch.setattr(loaded, name, value)
        # what was built of others, and what these are built of, serves nobody else
        forget("attnspec")
        yield
    forget("attnspec")


@pytest.fixture
def few_listed() -> Iterator[None]:
    with small(LISTING):
        yield


@pytest.fixture
def few_computed() -> Iterator[None]:
    with small(COMPUTING):
        yield


@pytest.mark.parametrize(
    "pattern", [p for p in PATTERNS if not p.data_dependent], ids=lambda pattern: pattern.name
)
def test_pairs_are_those_of_the_definition(few_listed: None, pattern: type[Relation]) -> None:
    samples = list(samples_of(pattern))
    some = samples[:: 1 + len(samples) // 6]
    found = [fault for sample in some for fault in faults(sample, 45, (3, 16))]
    assert found == []


@pytest.mark.parametrize(("body", "backend"), in_turn(GRAPHS.values(), BACKEND_NAMES))
def test_numbers_are_those_of_the_definition(few_computed: None, body: str, backend: str) -> None:
    torch.manual_seed(0)
    q, k, v = tensors(2, 2, 70, 70, key_heads=1, size=4)
    found = with_gradients(module_of(body, backend)(q, k, v), (q, k, v))
    meant = with_gradients(defined(spec_of(body), q, k, v), (q, k, v))
    for one, other in zip(found, meant, strict=True):
        torch.testing.assert_close(one, other)


COMPOSED = [
    "attend (window(radius = 5) | columns(first(40))) + linear()",
    "causal attend (window(radius = 20) | columns(first(40))) + favor(features = 8)",
    "attend (block(size = 8) | global(first(2))) + taylor()",
    "attend random(keys = 3) + rfa(features = 4)",
    "causal attend linear()",
    "causal attend rfa(features = 4, gated = true)",
    "attend rbf(features = 8)",
    "attend nystrom(landmarks = 7, conv = 5)",
    "attend linformer(rank = 7, projection = conv, max_length = 70)",
    "attend linformer(rank = 7, max_length = 70)",
    "causal attend synthesizer(max_length = 70, products = true)",
    "attend topk(keys = 5)",
    "causal attend topk(blocks = 2, size = 8, score = mean)",
    "attend lsh(buckets = 4, rounds = 2, chunk = 8, share_qk = false)",
    "attend cluster(count = 3)",
    "causal attend cluster(count = 3) | window(radius = 3)",
    "attend sinkhorn(size = 8)",
]


DECIDED = "topk", "lsh", "cluster", "sinkhorn"


@pytest.mark.parametrize("body", COMPOSED)
def test_numbers_are_those_of_the_whole(body: str) -> None:
    # on short sequences others would be chosen
    backend = "lists" if any(name in body for name in DECIDED) else "auto"
    torch.manual_seed(0)
    q, k, v = tensors(2, 2, 70, 70, size=4)
    module = module_of(body, backend).double()

    def now() -> list[torch.Tensor]:
        torch.manual_seed(1)
        other = module_of(body, backend).double()
        other.load_state_dict(module.state_dict())
        return with_gradients(other(q, k, v), (q, k, v))

    meant = now()
    with small(COMPUTING):
        found = now()
    for one, other in zip(found, meant, strict=True):
        torch.testing.assert_close(one, other)
