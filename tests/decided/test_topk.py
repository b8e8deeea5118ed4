"""`topk` and `chosen` against plain loops: pairs, values, gradients, ties, padding, decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from oracle.decided import Pairs, Sample, TopK, topk
from torch.utils._python_dispatch import TorchDispatchMode

import attnspec
from attnspec.backends.decided import block_scores, ranking
from attnspec.backends.decided.block_scores import Scores
from attnspec.graphs.patterns import BY_NAME
from attnspec.runtime.module import CompiledAttention

SIZES = (1, 5, 23)


def module_of(body: str) -> CompiledAttention:
    return attnspec.parse(f"attention a {{ {body} }}").compile()


def near(q: int, k: int) -> bool:
    return abs(q - k) <= 4


def sinks(q: int, k: int) -> bool:
    return k < 2 or 0 <= q - k <= 3


FAR = "always = columns(first(2)) | window(before = 3, after = 0), within = window(radius = 4)"

CASES: dict[str, TopK] = {
    "topk(keys = 3)": TopK(1, 1, "dot", "count", 3),
    "topk(keys = 2, queries = 3)": TopK(1, 3, "dot", "count", 2),
    "topk(blocks = 2, size = 4)": TopK(4, 4, "mean", "count", 2),
    "topk(blocks = 3, size = 4, queries = 1)": TopK(4, 1, "mean", "count", 3),
    "topk(blocks = 2, size = 4, queries = 3, score = max)": TopK(4, 3, "max", "count", 2),
    "topk(blocks = 2, size = 4, score = bound)": TopK(4, 4, "bound", "count", 2),
    "topk(blocks = 2, size = 4, queries = 2, score = mass)": TopK(4, 2, "mass", "count", 2),
    "topk(mass = 0.6, size = 4, queries = 1)": TopK(4, 1, "mean", "mass", 0.6),
    "topk(mass = 0.6, size = 4, score = bound)": TopK(4, 4, "bound", "mass", 0.6),
    "topk(mass = 0.7, size = 4, score = mass)": TopK(4, 4, "mass", "mass", 0.7),
    "topk(mass = 0.5, size = 1)": TopK(1, 1, "dot", "mass", 0.5),
    "topk(mass = 1, size = 4)": TopK(4, 4, "mean", "mass", 1.0),
    "topk(above = 0.2, size = 4, score = max)": TopK(4, 4, "max", "above", 0.2),
    "topk(blocks = 3, size = 4, always = columns(first(2)) | window(before = 3, after = 0))": TopK(
        4, 4, "mean", "count", 3, always=sinks
    ),
    "topk(blocks = 3, size = 2, queries = 3)": TopK(2, 3, "mean", "count", 3),
    "topk(blocks = 4, size = 3, queries = 5)": TopK(3, 5, "mean", "count", 4),
    # a block that is not over is no candidate, and nothing forces the own one here
    "topk(blocks = 2, size = 4, queries = 1, always = columns(first(2)))": TopK(
        4, 1, "mean", "count", 2, always=lambda q, k: k < 2
    ),
    "topk(above = 0.1, size = 3, queries = 2, always = columns(first(2)))": TopK(
        3, 2, "mean", "above", 0.1, always=lambda q, k: k < 2
    ),
    "topk(keys = 3, within = window(radius = 4))": TopK(1, 1, "dot", "count", 3, within=near),
    "topk(blocks = 2, size = 3, score = bound, within = window(radius = 4))": TopK(
        3, 3, "bound", "count", 2, within=near
    ),
    "topk(mass = 0.4, size = 3, queries = 2, within = window(radius = 4))": TopK(
        3, 2, "mean", "mass", 0.4, within=near
    ),
    # what is forced and no candidate has no mass
    f"topk(mass = 0.5, size = 1, queries = 2, score = mass, {FAR})": TopK(
        1, 2, "mass", "mass", 0.5, always=sinks, within=near
    ),
}


def tensors(n: int, n_q: int, heads: int, key_heads: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(7 * n + n_q)
    shapes = (heads, n_q, 6), (key_heads, n, 6), (key_heads, n, 5)
    return tuple(
        torch.randn(2, *shape, generator=generator, dtype=torch.float64) for shape in shapes
    )


def paddings(n: int) -> list[torch.Tensor | None]:
    left = torch.arange(n).expand(2, n) >= torch.tensor([[n // 3], [0]])
    holes = (torch.arange(n) % 5 != 2).expand(2, n) & (torch.arange(n) < n - n // 4)
    return [None, left, holes]


def expected(
    one: TopK,
    q: torch.Tensor,
    k: torch.Tensor,
    padding: torch.Tensor | None,
    causal: bool,
    share: str,
) -> torch.Tensor:
    """bool [B, H, n_q, n_k], head by head."""
    heads, ratio = q.shape[1], q.shape[1] // k.shape[1]
    held = torch.zeros(2, heads, q.shape[2], k.shape[2], dtype=torch.bool)
    for batch in range(2):
        real = [True] * k.shape[2] if padding is None else padding[batch].tolist()
        wide = k[batch].repeat_interleave(ratio, 0).numpy()
        sample = Sample(q[batch].numpy(), wide, real, causal, q.shape[3] ** -0.5)
        for head in range(heads):
            group = [x for x in range(heads) if x // ratio == head // ratio]
            those = {"head": [head], "group": group, "all": list(range(heads))}[share]
            mark(held[batch, head], topk(sample, those, one), q.shape[2])
    return held


def mark(held: torch.Tensor, pairs: Pairs, n_q: int) -> None:
    for q, k in pairs:
        held[q - (held.shape[1] - n_q), k] = True


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    ratio = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(ratio, 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * q.shape[3] ** -0.5).masked_fill(~held, -torch.inf)
    weights = torch.softmax(scores, -1)
    return torch.where(held.any(-1, keepdim=True), weights, 0.0) @ v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("call", CASES)
def test_pairs_are_those_of_plain_loops(call: str, causal: bool) -> None:
    module = module_of(("causal " if causal else "") + f"attend {call}")
    for n in SIZES:
        none, left, holes = paddings(n)
        for n_q, tried in ((n, (none, left, holes)), (1, (left,)), (min(n, 6), (none, holes))):
            q, k, _ = tensors(n, n_q, 2, 2)
            for padding in tried:
                found = module.pairs(q, k, key_padding_mask=padding)
                wanted = expected(CASES[call], q, k, padding, causal, "head")
                assert torch.equal(found, wanted), (n, n_q, padding)


@pytest.mark.parametrize("share", ["", "head", "group", "all"])
@pytest.mark.parametrize("score", ["mean", "mass", "bound"])
def test_heads_share_scores(share: str, score: str) -> None:
    given = f", share = {share}" if share else ""
    module = module_of(f"causal attend topk(blocks = 3, size = 3, score = {score}{given})")
    q, k, _ = tensors(20, 20, 4, 2)
    one = TopK(3, 3, score, "count", 3)
    wanted = expected(one, q, k, None, True, share or "group")
    assert torch.equal(module.pairs(q, k), wanted)


@pytest.mark.parametrize("call", ["topk(keys = 4)", "topk(blocks = 2, size = 4) | self"])
def test_values_and_gradients_are_those_of_the_pairs(call: str) -> None:
    module = module_of(f"causal attend {call}")
    leaves = [x.requires_grad_() for x in tensors(19, 19, 4, 2)]
    held = module.pairs(*leaves[:2])
    outs = module(*leaves), dense(leaves[0], leaves[1], leaves[2], held)
    assert (outs[0] - outs[1]).abs().max() < 1e-12
    upstream = torch.randn_like(outs[0])
    found, wanted = (torch.autograd.grad(out, leaves, upstream) for out in outs)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() < 1e-12


def test_heads_of_a_group_may_change_places() -> None:
    module = module_of("attend topk(blocks = 2, size = 4, queries = 1, share = group)")
    q, k, _ = tensors(21, 21, 4, 2)
    found = module.pairs(q, k)
    assert torch.equal(module.pairs(q[:, [1, 0, 3, 2]], k), found)
    assert not torch.equal(found[:, 0], found[:, 2])


def test_what_is_always_read_goes_beyond_the_budget_alone() -> None:
    body = "attend topk(keys = 2, always = columns(first(5)))"
    q, k, _ = tensors(21, 21, 2, 2)
    first = torch.arange(21) < 5
    assert torch.equal(module_of(body).pairs(q, k), first.expand(2, 2, 21, 21))
    more = module_of(body.replace("keys = 2", "keys = 7")).pairs(q, k)
    assert more[..., :5].all()
    assert (more.sum(-1) == 7).all()


@pytest.mark.parametrize("scope", ["", "causal"])
@pytest.mark.parametrize(
    "sizes", [{"size": 4}, {"size": 4, "queries": 3}, {"size": 3, "queries": 7}], ids=str
)
@pytest.mark.parametrize("always", [None, "columns(first(5))", "window(before = 9, after = 1)"])
def test_so_many_blocks_are_forced(always: str | None, sizes: dict[str, int], scope: str) -> None:
    for n in (1, 5, 24, 41):
        near = None if always is None else attnspec.parse(f"attention a {{ attend {always} }}")
        pattern: Any = BY_NAME["topk"]
        leaf = pattern(
            blocks=9, always=None if near is None else near.relation(n), causal=bool(scope), **sizes
        )
        shared, size = leaf.shared_by, leaf.block
        # without others the blocks of the queries themselves are, where later keys are not read
        graph = always or ("self" if scope else "window(radius = 3) - full")
        pairs = attnspec.parse(f"attention a {{ attend {graph} }}").mask(n)
        many = []
        for first in range(0, n, shared):
            keys = np.flatnonzero(pairs[first : first + shared].any(axis=0))
            blocks = {k // size for k in keys.tolist()}
            many.append(sum(b * size < first + shared or not scope for b in blocks))
        if always is None:
            assert max(many) <= leaf.forced(n) <= -(-shared // size) + 1
        else:
            assert leaf.forced(n) == max(many), n


def test_scores_may_be_an_input() -> None:
    body = "input s: scores(size = 4) causal attend topk(blocks = 2, size = 4, score = s)"
    module = module_of(body)
    for n, n_q in ((18, 18), (18, 7)):
        q, k, _ = tensors(n, n_q, 2, 2)
        scores = torch.randn(2, 2, 6, 6)
        scores[0, 0, 0, 0], scores[1, 1, 2, 1] = torch.nan, -torch.inf
        for padding in paddings(n):
            found = module.pairs(q, k, inputs={"s": scores}, key_padding_mask=padding)
            for batch in range(2):
                one = TopK(4, 4, "", "count", 2, given=scores[batch].numpy())
                part = expected(one, q, k, padding, True, "head")
                assert torch.equal(found[batch], part[batch])


def test_a_mass_of_scores_that_are_given() -> None:
    module = module_of(
        "input s: scores(size = 4) attend topk(mass = 0.9, size = 4, queries = 1, score = s)"
    )
    q, k, _ = tensors(17, 17, 2, 2)
    scores = 2 * torch.randn(2, 1, 17, 5)
    found = module.pairs(q, k, inputs={"s": scores})
    for batch in range(2):
        given = scores[batch].expand(2, -1, -1).numpy()
        one = TopK(4, 1, "", "mass", 0.9, given=given)
        assert torch.equal(found[batch], expected(one, q, k, None, False, "head")[batch])


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_ties_go_to_the_lower_position(kind: torch.dtype) -> None:
    module = module_of("attend topk(keys = 3)")
    q, k = torch.zeros(1, 1, 9, 4, dtype=kind), torch.ones(1, 1, 9, 4, dtype=kind)
    assert module.pairs(q, k)[0, 0].nonzero()[:, 1].view(9, 3).tolist() == [[0, 1, 2]] * 9
    k[0, 0, 4] = torch.nan
    k[0, 0, 1] = -1
    found = module.pairs(q + 1, k)[0, 0, 0].nonzero().flatten().tolist()
    assert found == [0, 2, 3]
    assert module.pairs(q[:, :, :5] + 1, k[:, :, :5])[0, 0, 0].sum() == 3


def test_infinities_are_no_candidates_and_nan_is_the_last_one() -> None:
    module = module_of("input s: scores attend topk(keys = 3, score = s)")
    q = torch.zeros(1, 1, 4, 2)
    rows = [[torch.nan, 1.0, -3e38, -torch.inf], [-torch.inf] * 4, [0.0, -0.0, 0.0, 0.0]]
    scores = torch.tensor([*rows, [torch.inf, torch.nan, torch.nan, 5.0]])[None, None]
    found = module.pairs(q, q, inputs={"s": scores})[0, 0].tolist()
    assert [[k for k in range(4) if row[k]] for row in found] == [
        [0, 1, 2],
        [],
        [0, 1, 2],
        [0, 1, 3],
    ]


IDENTITIES = {
    "topk(blocks = 6, size = 4)": "full",
    "topk(mass = 1, size = 4)": "full",
    "topk(keys = 9, within = window(radius = 4))": "window(radius = 4)",
    "topk(keys = 4, score = max)": "topk(keys = 4)",
    "topk(keys = 4) & causal": "causal & topk(keys = 4)",
}


@pytest.mark.parametrize("call", IDENTITIES)
def test_identities(call: str) -> None:
    q, k, _ = tensors(21, 21, 2, 2)
    one, other = (module_of(f"attend {text}").pairs(q, k) for text in (call, IDENTITIES[call]))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    "call",
    [
        "topk(keys = 4)",
        "topk(blocks = 3, size = 4, queries = 1)",
        "topk(blocks = 2, size = 4, queries = 1) | self",
    ],
)
def test_a_row_of_decoding_is_a_row_of_the_whole(call: str) -> None:
    module = module_of(f"causal attend {call}")
    q, k, v = tensors(22, 22, 2, 2)
    whole = module(q, k, v)
    for t in (0, 3, 12, 21):
        step = module(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1])
        assert (step - whole[:, :, t : t + 1]).abs().max() < 1e-12


@pytest.mark.parametrize("call", [call for call in CASES if "always" not in call])
def test_left_padding_changes_nothing(call: str) -> None:
    module = module_of(f"causal attend {call}")
    q, k, v = tensors(17, 17, 2, 2)
    padded = [torch.nn.functional.pad(x, (0, 0, 6, 0), value=3.0) for x in (q, k, v)]
    mask = (torch.arange(23) >= 6).expand(2, 23)
    found = module(*padded, key_padding_mask=mask)[:, :, 6:]
    assert (found - module(q, k, v)).abs().max() < 1e-12


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_chosen_reads_what_is_listed(size: int, heads: int) -> None:
    body = f"input sel: choices(size = {size}) causal attend chosen(sel) | self"
    module, count = module_of(body), -(-18 // size)
    for n_q in (18, 5):
        q, k, v = tensors(18, n_q, 4, 2)
        choices = torch.randint(-1, count, (2, heads, n_q, 3))
        for padding in paddings(18):
            inputs = {"sel": choices}
            found = module.pairs(q, k, inputs=inputs, key_padding_mask=padding)
            block = torch.arange(18) // size
            listed = (choices[..., None, :] == block[:, None]).any(-1)
            listed = listed.repeat_interleave(4 // heads, 1)
            at = torch.arange(18 - n_q, 18)[:, None]
            wanted = (listed | (at == torch.arange(18))) & (torch.arange(18) <= at)
            wanted = wanted if padding is None else wanted & padding[:, None, None]
            assert torch.equal(found, wanted)
            out = module(q, k, v, inputs=inputs, key_padding_mask=padding)
            assert (out - dense(q, k, v, wanted)).abs().max() < 1e-12


@pytest.mark.parametrize("wrong", [-2, 5])
def test_a_choice_beyond_the_blocks_is_refused(wrong: int) -> None:
    module = module_of("input sel: choices(size = 4) attend chosen(sel)")
    q = torch.zeros(1, 1, 18, 2)
    with pytest.raises(ValueError, match="must name key blocks 0 … 4, 4 of 18 keys each"):
        module(q, q, q, inputs={"sel": torch.full((1, 1, 18, 2), wrong)})


@pytest.mark.parametrize("graph", ["", ", within = window(radius = 40)"])
@pytest.mark.parametrize("scorer", ["mean", "max", "mass", "bound"])
def test_no_more_numbers_are_looked_at_together_than_said(
    scorer: str, graph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(f"attend topk(blocks = 2, size = 2, queries = 1, score = {scorer}{graph})")
    q, k, _ = tensors(64, 64, 2, 2)
    largest: list[tuple[int, int]] = []

    class Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and not func.is_view:
                self.most = max(self.most, found.numel())
            return found

    class Seen(Scores):
        def __call__(self, *given: Any) -> torch.Tensor:
            with Watched() as watched:  # type: ignore[no-untyped-call]
                found = super().__call__(*given)
            largest.append((watched.most, found.shape[:3].numel() * self.width))
            return found

    monkeypatch.setattr(block_scores, "Scores", Seen)
    module.pairs(q, k)
    assert largest
    assert all(most <= said for most, said in largest)


STEPPED = {
    "topk(keys = 4)": {},
    "topk(blocks = 3, size = 4, queries = 1) | window(before = 2, after = 0)": {},
    "chosen(x) | same(l)": {"x": "choices(size = 4)", "l": "ids"},
    "topk(blocks = 2, size = 4, queries = 1, score = s, always = global(t))": {
        "s": "scores(size = 4)",
        "t": "tokens",
    },
}


def inputs_of(kinds: dict[str, str], n: int) -> dict[str, torch.Tensor]:
    made = {
        "x": torch.randint(-1, 4, (2, 2, n, 2)),
        "l": torch.randint(0, 3, (2, n)),
        "s": torch.randn(2, 1, n, -(-n // 4)),
        "t": torch.rand(2, n) < 0.2,
    }
    return {name: made[name] for name in kinds}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("call", STEPPED)
def test_steps_are_the_rows_of_one_call(call: str, padded: bool) -> None:
    kinds = STEPPED[call]
    said = " ".join(f"input {name}: {kind}" for name, kind in kinds.items())
    module, n = module_of(f"{said} causal heads 4 attend {call} head 0 {{ attend self }}"), 14
    q, k, v = (torch.randn(2, h, n, 6, dtype=torch.float64) for h in (4, 2, 2))
    inputs = inputs_of(kinds, n)
    if "x" in inputs:
        # blocks that there are not yet cannot be named
        inputs["x"] = torch.minimum(inputs["x"], (torch.arange(n) // 4)[:, None])
    # rows of scores begin where a sample does
    padded = padded and "s" not in inputs
    padding = (torch.arange(n) >= torch.tensor([[3], [0]])) if padded else None
    whole = module(q, k, v, inputs=inputs, key_padding_mask=padding)
    state, outs = None, []
    for low, high in ((0, 1), (1, 5), (5, 6), (6, n)):
        at = slice(low, high)
        here = {
            name: x[:, :, at, : -(-high // 4) if name == "s" else None]
            if x.dim() == 4
            else x[:, at]
            for name, x in inputs.items()
        }
        mask = None if padding is None else padding[:, at]
        out, state = module.step(
            q[:, :, at], k[:, :, at], v[:, :, at], state, inputs=here, key_padding_mask=mask
        )
        outs.append(out)
    assert (torch.cat(outs, 2) - whole).abs().max() < 1e-12


@pytest.mark.parametrize(
    "call",
    [
        "topk(blocks = 2, size = 4)",
        "topk(keys = n // 2)",
        "topk(keys = 4, always = columns(last(2)))",
        "lsh()",
        "cluster()",
        "topk(keys = 2) + linear()",
    ],
)
def test_what_cannot_go_on_says_so(call: str) -> None:
    module = module_of(f"causal attend {call}")
    q = torch.zeros(1, 1, 3, 4)
    with pytest.raises(ValueError, match=r"at every n|to go on from"):
        module.step(q, q, q)


@pytest.mark.parametrize("kind", ["distinct", "ties", "all equal", "NaN", "few", "none"])
@pytest.mark.parametrize(("width", "budget"), [(400, 1), (401, 5), (1024, 9), (64, 9), (37, 2)])
def test_the_best_of_many_are_found_by_their_groups(kind: str, width: int, budget: int) -> None:
    torch.manual_seed(width)
    scores = torch.randn(3, 50, width)
    match kind:
        case "ties":
            scores = (scores * 2).round()
        case "all equal":
            scores = torch.zeros_like(scores)
        case "NaN":
            scores.masked_fill_(torch.rand(scores.shape) < 0.1, torch.nan)
        case "few":
            scores.masked_fill_(torch.rand(scores.shape) < 0.99, -torch.inf)
        case "none":
            scores.fill_(-torch.inf)
    for forced in (None, torch.rand(scores.shape) < 0.01):
        ranked = ranking._ranked_best(ranking.ranks(scores, forced), budget)
        found = ranking.best(scores, forced, budget)
        wide = max(found.shape[-1], ranked.shape[-1])
        pad = torch.nn.functional.pad
        both = (pad(x, (wide - x.shape[-1], 0), value=-1) for x in (found, ranked))
        assert torch.equal(*both)


@pytest.mark.parametrize("score", ["mean", "bound", "max"])
def test_padding_alone_chooses_nothing(score: str) -> None:
    spec = attnspec.parse(f"attention a {{ attend topk(blocks = 2, size = 4, score = {score}) }}")
    q = torch.ones(2, 1, 9, 4, requires_grad=True)
    for real in (torch.zeros(2, 9, dtype=torch.bool), torch.tensor([[False], [True]]).repeat(1, 9)):
        out = spec.compile()(q, q, q, key_padding_mask=real)
        assert torch.equal(out[~real.any(1)], torch.zeros_like(out[~real.any(1)]))
        assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()


def test_an_infinite_key_bounds_its_block() -> None:
    text = "attention a { attend topk(blocks = 1, size = 4, queries = 1, score = bound) }"
    k = torch.zeros(1, 1, 12, 2)
    k[..., 4:8, 1], k[..., 9, :] = 1.0, torch.inf
    read = attnspec.parse(text).compile().pairs(torch.tensor([-1.0, 1.0]).expand(1, 1, 12, 2), k)
    assert read[0, 0, 0].nonzero()[:, 0].tolist() == [8, 9, 10, 11]
