"""Which numbers arguments take: what the language promises about each of them."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from attnspec.graphs.patterns import PATTERNS
from attnspec.ir.mechanisms import MECHANISMS
from attnspec.ir.parameters import Parameter

FROM_0 = """
window.radius window.before window.after dilated.radius block.before block.after random.keys
random_blocks.blocks prefix.length lsh.look sinkhorn.temperature favor.redraw rfa.floor rbf.sigma
nystrom.iterations nystrom.conv
"""
FROM_1 = """
dilated.step residue.step strided.stride block.size summary.stride summary.cells fixed.stride
fixed.cells random_blocks.size neighborhood.extents topk.keys topk.blocks topk.size topk.queries
lsh.rounds lsh.chunk cluster.count sinkhorn.size sinkhorn.iterations sinkhorn.max_blocks
sinkhorn.cut favor.features rfa.features rbf.features linformer.rank linformer.max_length
nystrom.landmarks synthesizer.max_length synthesizer.rank mixer.hidden mixer.max_length
gmlp.max_length
"""
SEEDS = "random random_blocks expander lsh cluster favor rfa rbf"
RANGES: dict[str, tuple[int | None, int | None]] = {
    **dict.fromkeys(FROM_0.split(), (0, None)),
    **dict.fromkeys(FROM_1.split(), (1, None)),
    **dict.fromkeys((f"{name}.seed" for name in SEEDS.split()), (0, 2**64 - 1)),
    "powers.base": (2, None),
    "expander.degree": (2, 4096),
    "lsh.buckets": (2, None),
    "taylor.order": (1, 2),
    # a share above 0 and at most 1, and any logit: the pattern says so itself
    "topk.mass": (None, None),
    "topk.above": (None, None),
}
DEFAULTS: dict[str, object] = {
    "block.before": 0,
    "block.after": 0,
    "powers.base": 2,
    "lsh.rounds": 8,
    "lsh.chunk": 64,
    "lsh.scale": "root",
    "lsh.share_qk": True,
    "lsh.look": 1,
    "lsh.cut": "order",
    "lsh.multiplicity": False,
    "lsh.combine": "union",
    "lsh.bucket_mask": True,
    "lsh.hash": "cross_polytope",
    "cluster.assign": "nearest",
    "cluster.of": "qk",
    "sinkhorn.iterations": 7,
    "sinkhorn.temperature": 0.75,
    "sinkhorn.max_blocks": 64,
    **{f"{name}.seed": 0 for name in ("random", "random_blocks", "expander", "lsh", "cluster")},
    **{f"{name}.per_head": True for name in ("random", "random_blocks", "expander")},
}
"""What arguments of patterns are where they are not said; others are needed, or have none."""

UNSAID: dict[str, object] = {
    "layer": 0,
    "head": 0,
    "causal": False,
    "grid": (),
    "extra_tokens": 0,
}
"""What stands around a pattern where nothing is said."""

POSITIONAL = """
global.tokens rows.tokens columns.tokens neighborhood.extents same.ids prefix.length
where.predicate where_inputs.predicate chosen.choices lsh.given cluster.labels
"""
DECLARATIONS: list[Any] = [*PATTERNS, *MECHANISMS]
DECLARED: dict[str, Parameter] = {
    f"{declaration.name}.{entry.name}": entry.metadata["parameter"]
    for declaration in DECLARATIONS
    for entry in fields(declaration)
    if not entry.metadata["parameter"].context
}


def test_ranges_are_those_that_are_promised() -> None:
    numbers = ("integer", "real", "extents", "length")
    asked = {name: one for name, one in DECLARED.items() if one.kind in numbers}
    assert {name: (one.least, one.most) for name, one in asked.items()} == RANGES
    assert [name for name, one in asked.items() if one.odd] == ["neighborhood.extents"]
    assert [name for name, one in asked.items() if one.even] == ["expander.degree", "lsh.buckets"]


def test_one_thing_that_a_pattern_is_about_needs_no_name() -> None:
    assert {name for name, one in DECLARED.items() if one.positional} == {*POSITIONAL.split()}


def test_what_is_not_said_is_what_is_promised() -> None:
    found: dict[str, object] = {}
    patterns: list[Any] = [*PATTERNS]
    for declaration in patterns:
        for entry in fields(declaration):
            one: Parameter = entry.metadata["parameter"]
            if one.context:
                assert entry.default == UNSAID[one.context], (declaration.name, entry.name)
            elif entry.default is not MISSING and entry.default is not None:
                found[f"{declaration.name}.{entry.name}"] = entry.default
    assert found == DEFAULTS
