"""In 16 bits no row is further from the definition than twice what torch's own call is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from population import inputs_of
from ranks_in_turn import Rank, in_turn
from torch.nn.functional import pad, scaled_dot_product_attention
from zoo import ATTENTIONS, IDS, loaded

from attnspec.backends.common.score_formula import Formula, scale_of, weigh
from attnspec.backends.factored.definitions import defined
from attnspec.compile.standalone import standalone_module
from attnspec.distributed import parallelize
from attnspec.graphs.relation import evaluate_pairs
from attnspec.lower.lower import bias_tables, decided_leaves
from attnspec.lower.work import MERGED, Call, Softcap, Work
from attnspec.runtime.module import CompiledAttention
from attnspec.spec import Spec, parse

HALF = (torch.bfloat16, torch.float16)

BODIES = (
    "causal attend window(before = 127, after = 0) | columns(first(1))",
    "causal attend window(before = 63, after = 0) | residue(step = 32)",
    "attend window(radius = 40) | rows(first(3)) | columns(first(3))",
    "attend block(size = 64) | columns(first(2))",
    "causal attend topk(blocks = 3, size = 32) | window(before = 40, after = 0)",
    "causal heads 2 head 0 { attend full } head 1 { attend residue(step = 16) | self }",
    "causal attend window(before = 127, after = 0) | columns(first(1)) score alibi()",
    "heads 1 attend window(radius = 40) score bias(buckets = 8)",
    "causal attend full score softcap(cap = 5)",
    "causal attend topk(blocks = 3, size = 32) scale 0.3",
    "attend random(keys = 9) normalize sigmoid",
    "attend window(radius = 40) normalize relu",
)

SUMS = (
    "attend linear(feature = exp)",
    "causal attend linear()",
    "causal attend taylor()",
    "causal attend favor(features = 32)",
    "attend rbf(features = 32)",
    "causal attend rfa(features = 16, gated = true)",
    "attend window(radius = 9) + favor(features = 32)",
    "causal attend (residue(step = 16) | columns(first(1))) + linear(feature = exp)",
    "attend nystrom(landmarks = 16)",
    "attend linformer(rank = 16, max_length = 300)",
)


def worst(found: torch.Tensor, true: torch.Tensor) -> float:
    """The greatest error of a row, relative to the row, or to a tenth of a mean one."""
    size = true.norm(dim=-1)
    # below its least normal number a type has fewer digits
    normal = math.sqrt(true.shape[-1]) * torch.finfo(found.dtype).tiny
    least = max(0.1 * float(size.mean()), normal)
    errors = (found.double() - true).norm(dim=-1) / size.clamp(min=least)
    return float(errors.max())


def run(
    attend: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor], grad: torch.Tensor
) -> list[torch.Tensor]:
    """The output, and the gradients of q, k, v and what is learned."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    out = attend(*leaves)
    total = (out * grad.to(out.dtype)).sum()
    return [out.detach(), *torch.autograd.grad(total, leaves, materialize_grads=True)]


def tensors(heads: int, n: int, kind: torch.dtype, batch: int = 1) -> list[torch.Tensor]:
    """q, k, v and a gradient of the output."""
    generator = torch.Generator().manual_seed(n)
    return [x.to(kind) for x in torch.randn(4, batch, heads, n, 64, generator=generator)]


def by_formula(module: CompiledAttention, mask: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    """The dense formula of every head in the type of q: torch's own call for softmax and what is
    added to scores, else products in that type and weights in float32; of a mechanism its
    definition."""

    def attend(*leaves: torch.Tensor) -> torch.Tensor:
        names = [name for name, _ in module.named_parameters()]
        learned = dict(zip(names, leaves[3:], strict=True))
        heads, n = leaves[0].shape[1:3]
        outs = {}
        for work, members in module.engine.binder.works(0, heads, n, n):
            for head in members:
                one = [x[:, head : head + 1] for x in leaves[:3]]
                tables = {}
                for called, name in module.engine.tables_of(work):
                    rows = learned[name][0]
                    tables[called] = rows[head if len(rows) > 1 else 0]
                if work.mechanism is None:
                    held = mask if mask is None or mask.shape[1] == 1 else mask[:, head : head + 1]
                    outs[head] = of_graph(work, head, one, tables, held)
                else:
                    samples = zip(*one, strict=True)
                    found = [defined(work, head, q[0], k[0], v[0], tables) for q, k, v in samples]
                    outs[head] = torch.stack(found)[:, None]
        return torch.cat([outs[head] for head in range(heads)], 1)

    return attend


def of_graph(
    work: Work, head: int, parts: Sequence[torch.Tensor], tables: Any, mask: torch.Tensor | None
) -> torch.Tensor:
    """One head [B, 1, n, d] of a graph."""
    (q, k, v), kind = parts, parts[0].dtype
    wide, scale, at = torch.promote_types(kind, torch.float32), scale_of(work, 64), work.positions
    assert mask is not None
    if kind != torch.float64:
        # beside one that asks for gradients torch's call computes in float32
        tables = {name: table.detach() for name, table in tables.items()}
    call = Call(tables={name: table[None] for name, table in tables.items()})
    formula = Formula(work, (head,), q.device)
    distance = torch.from_numpy(at[0][:, None] - at[1])[None]

    def changed(scores: torch.Tensor) -> torch.Tensor:
        return formula.changed(scores[:, :, None, None], distance, call)[:, :, 0, 0]

    if work.normalize not in MERGED or any(isinstance(x, Softcap) for x in work.changes):
        weights = weigh(changed(((q * scale) @ k.mT).to(wide)), mask, work.normalize)
        return weights.to(kind) @ v
    none = ~mask.any(-1, keepdim=True)
    added = changed(torch.zeros(mask.shape, dtype=wide)).masked_fill(~(mask | none), -torch.inf)
    if work.normalize == "softmax1":
        k, v, added = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1)), pad(added, (0, 1))
    out = scaled_dot_product_attention(q, k, v, attn_mask=added, scale=scale)
    return out.masked_fill(none, 0.0)


def calling(module: torch.nn.Module, **given: Any) -> Callable[..., torch.Tensor]:
    """A call of a module, whose parameters follow q, k and v."""
    names = [name for name, _ in module.named_parameters()]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        learned = dict(zip(names, rest, strict=True))
        out: torch.Tensor = torch.func.functional_call(module, learned, (q, k, v), given)
        return out

    return call


def over_ranks(
    module: CompiledAttention, parts: Sequence[torch.Tensor], grad: torch.Tensor, ranks: int
) -> list[torch.Tensor]:
    """What `run` returns, of as many ranks."""

    def one(rank: Rank) -> list[torch.Tensor]:
        par = parallelize(module, cast(Any, rank))
        found = run(par, [par.shard(x) for x in parts], par.shard(grad))
        return [par.unshard(x) for x in found]

    return in_turn(ranks, one)[0]


def compare(
    spec: Spec, n: int, kind: torch.dtype, batch: int = 1, ranks: int = 1, **given: Any
) -> None:
    """Outputs, those of autocast too, and gradients beside those of the formulas in the same type,
    or of mechanisms as near as numbers of the type are."""
    module = spec.compile(head_size=64)
    torch.manual_seed(0)
    names = [name for name, _ in module.named_parameters()]
    for name, table in module.named_parameters():
        table.data = (torch.randn_like(table) if "bias" in name else table.data).to(kind)
    *parts, grad = tensors(spec.program.heads or 1, n, kind, batch)
    sums = all(each.mechanism for each in spec.program.attends)
    mask = None if sums else module.pairs(parts[0], parts[1], **given)

    leaves, attend = [*parts, *module.parameters()], by_formula(module, mask)
    found = (
        run(calling(module, **given), leaves, grad)
        if ranks == 1
        else over_ranks(module, parts, grad, ranks)
    )
    true = run(attend, [x.double() for x in leaves], grad)
    near = run(attend, leaves, grad) if not sums else found
    # mechanisms are rounded in the end alone; of a graph's tables gradients of all pairs cancel
    least = torch.finfo(kind).eps
    limits = [
        least if sums else 4 * least if number > 3 else 2 * worst(b, t)
        for number, (b, t) in enumerate(zip(near, true, strict=True))
    ]
    for name, a, t, limit in zip([*"oqkv", *names], found, true, limits, strict=True):
        assert worst(a, t) <= limit, name
    with torch.no_grad(), torch.autocast("cpu", kind):
        assert worst(module(*(x.float() for x in parts), **given), true[0]) <= limits[0]


@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize("body", BODIES)
def test_rows_and_gradients_are_as_exact_as_those_of_torch(body: str, kind: torch.dtype) -> None:
    compare(parse(f"attention a {{ {body} }}"), 500, kind)


@pytest.mark.parametrize(
    ("body", "kind"), [(BODIES[0], HALF[0]), (BODIES[1], HALF[1]), (BODIES[7], HALF[0])]
)
def test_rows_of_two_thousand_are_as_exact_as_those_of_torch(body: str, kind: torch.dtype) -> None:
    compare(parse(f"attention a {{ heads 1 {body.removeprefix('heads 1 ')} }}"), 2048, kind)


@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize("body", SUMS)
def test_rows_and_gradients_of_mechanisms_are_rounded_once(body: str, kind: torch.dtype) -> None:
    compare(parse(f"attention a {{ {body} }}"), 300, kind)


@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize("body", ["causal attend full", BODIES[0], BODIES[4]])
def test_outputs_of_softmax1_are_rounded_once(body: str, kind: torch.dtype) -> None:
    # rows with few keys have gradients by cancellation: of one sample they are chance
    compare(parse(f"attention a {{ {body} normalize softmax1 }}"), 300, kind, batch=8)


@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize("body", [BODIES[0], "causal attend full normalize softmax1", *SUMS[:2]])
def test_ranks_are_as_exact_as_one(body: str, kind: torch.dtype) -> None:
    compare(parse(f"attention a {{ {body} }}"), 300, kind, batch=2, ranks=3)


@pytest.mark.parametrize("body", [BODIES[7], SUMS[1], SUMS[6]])
def test_backward_within_autocast_computes_in_the_types_of_the_call(body: str) -> None:
    module, grads = parse(f"attention a {{ {body} }}").compile(), []
    *parts, grad = tensors(1, 300, torch.float32)
    for cast_there in (False, True):
        leaves = [x.clone().requires_grad_() for x in parts]
        out = module(*leaves)
        with torch.autocast("cpu", enabled=cast_there):
            grads.append(torch.autograd.grad(out, leaves, grad))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("score", ["alibi()", "bias(buckets = 4)"])
def test_standalone_files_change_scores_in_float32(score: str) -> None:
    text = f"attention a {{ heads 1 causal attend full score {score} }}"
    space: dict[str, Any] = {"__name__": "alone"}
    exec(standalone_module(parse(text).program, "A"), space)
    results = []
    for kind in (torch.bfloat16, torch.float64):
        module = space["A"]()
        torch.manual_seed(0)
        for table in module.parameters():
            table.data = torch.randn_like(table).bfloat16().to(kind)
        *parts, grad = (x.to(kind) for x in tensors(1, 1500, torch.bfloat16))
        # of a single key errors of weights do not average out
        parts[2][:, :, 1:] = 0
        results.append(run(calling(module), [*parts, *module.parameters()], grad))
    for a, t in zip(*results, strict=True):
        assert worst(a, t) <= torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize("steps", [1, 70])
def test_a_step_is_as_exact_as_the_whole_pass(steps: int, kind: torch.dtype) -> None:
    module, n = parse(f"attention a {{ {BODIES[0]} }}").compile(), 700
    *parts, _ = tensors(1, n, kind)
    state, outs = None, []
    for q, k, v in zip(*(torch.split(x, steps, 2) for x in parts), strict=True):
        out, state = module.step(q, k, v, state)
        outs.append(out)
    mask = module.pairs(*parts[:2])
    wide = [x.double() for x in parts]
    true, own = (scaled_dot_product_attention(q, k, v, attn_mask=mask) for q, k, v in (wide, parts))
    for found in (torch.cat(outs, 2), module(*parts)):
        assert worst(found, true) <= 2 * worst(own, true)


@pytest.mark.parametrize("backend", ["auto", "tables"])
def test_a_small_share_is_not_rounded_away(backend: str) -> None:
    text = "attention a { causal attend window(before = 2047, after = 0) | columns(first(1)) }"
    q = torch.zeros(1, 1, 4096, 16, dtype=torch.bfloat16)
    v = torch.zeros_like(q)
    v[:, :, 0] = 1000.0
    out = parse(text).compile(backend=backend)(q, q, v)
    assert out[0, 0, -1, 0].item() == pytest.approx(1000 / 2049, rel=2**-8)


def test_gradients_of_tables_are_sums_in_float32() -> None:
    text = "attention a { heads 1 attend window(radius = 200) score bias(buckets = 4) }"
    grads = []
    for kind in (torch.float64, torch.bfloat16):
        module = parse(text).compile().to(kind)
        *parts, grad = (x.to(kind) for x in tensors(1, 1500, torch.bfloat16))
        # values of one sign, of which the gradients of a bucket do not cancel
        at = torch.arange(1500)[:, None] / 1500
        (found,) = torch.autograd.grad(
            module(parts[0], parts[1], at.to(kind).expand(1, 1, -1, 64)),
            [*module.parameters()],
            grad.abs(),
        )
        grads.append(found.flatten())
    assert worst(grads[1], grads[0].double()) < 0.02


POPULATION = [
    pytest.param(*each, id=label)
    for each, label in zip(ATTENTIONS, IDS, strict=True)
    if not loaded(*each).program.cross
    # these have no dense formula of q and k alone
    and not (
        decided_leaves(loaded(*each).program)
        and any(part.mechanism for part in loaded(*each).program.attends)
    )
    and not any(
        word in each[1] for word in ("reformer", "clustered", "routing", "sort", "sinkhorn")
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize(("path", "name"), POPULATION)
def test_the_zoo_is_as_exact_as_torch(path: Path, name: str, kind: torch.dtype) -> None:
    spec = loaded(path, name)
    sums = any(each.mechanism for each in spec.program.attends)
    # rows with few keys have gradients by cancellation: of one sample they are chance
    few = any(each.normalize == "softmax1" for each in spec.program.attends)
    n = spec.program.fixed_length or (300 if sums or few else 1500)
    n = min(n, int(spec.parameters.get("max_length", n)))
    if n > 4096:
        pytest.skip("the dense reference takes too much memory")
    data = {x: torch.as_tensor(y)[None] for x, y in inputs_of(spec, n).items()}
    given: dict[str, Any] = {"inputs": data} if data else {}
    compare(spec, n, kind, 8 if few else 1, **given)


@pytest.mark.slow
@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize(("path", "name"), POPULATION)
def test_rows_of_long_sequences_are_as_exact_as_those_of_torch(
    path: Path, name: str, kind: torch.dtype
) -> None:
    spec = loaded(path, name)
    heads = spec.program.heads or 1
    if spec.inputs or spec.program.grid or decided_leaves(spec.program):
        pytest.skip("its pairs are not those of positions alone, or its length is its own")
    module = spec.compile(head_size=64).to(kind)
    mechanisms = [work.mechanism for work, _ in module.engine.binder.works(0, heads, 1, 1)]
    # a learned bias of all pairs takes minutes
    most = 4096 if bias_tables(spec.program) else 16_384
    n = min([most, *(each.longest for each in mechanisms if each and each.longest)])
    q, k, v, _ = tensors(heads, n, kind)
    with torch.no_grad():
        out = module(q, k, v)
        if not all(work.plain for work, _ in module.engine.binder.works(0, heads, n, n)):
            wide = module.float()(q.float(), k.float(), v.float())
            assert worst(out, wide.double()) <= 2 * torch.finfo(kind).eps
            return
    at = torch.arange(3, n, 97)
    for head in range(heads):
        relation = spec.relation(n, 0, head)
        held = evaluate_pairs(relation, at.numpy()[:, None], np.arange(n)[None], n)
        mask = torch.from_numpy(np.broadcast_to(held, (len(at), n)).copy())
        some = mask.any(-1)
        one = slice(head, head + 1)
        parts = q[:, one, at[some]], k[:, one], v[:, one]
        true, own = (
            scaled_dot_product_attention(a, b, c, attn_mask=mask[some])
            for a, b, c in ([x.double() for x in parts], parts)
        )
        assert worst(out[:, one, at[some]], true) <= 2 * worst(own, true), head
