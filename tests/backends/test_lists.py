"""Lists of tiles against the dense definition: values, log-sum-exps and gradients."""

from __future__ import annotations

import itertools
import re
from dataclasses import fields, replace

import pytest
import torch
from attention_checks import ALONG
from listed_calls import CPU, a_call, agree, chosen, of_compositions, sorted_graphs
from sweeps import checkered

from attnspec.backends.decided.deciders import decide
from attnspec.backends.decided.given import Given
from attnspec.backends.dense.kernel import DenseKernel
from attnspec.backends.lists import attention, batches
from attnspec.backends.lists import backend as lists_backend
from attnspec.backends.lists.backend import ListsBackend
from attnspec.graphs.operators import Intersection, Union
from attnspec.graphs.patterns.causal import Causal
from attnspec.graphs.patterns.lsh import Lsh
from attnspec.graphs.patterns.topk import TopK
from attnspec.graphs.patterns.window import Window
from attnspec.graphs.relation import decided_in
from attnspec.lower.lower import stand_ins, works_of
from attnspec.lower.rates import Rates
from attnspec.lower.work import Alibi, Bias, Call, Softcap, Work, alibi_slopes
from attnspec.spec import parse
from benchmarks.accuracy.costs import peak_bytes

LENGTHS = (1, 63, 64, 65, 257)


@pytest.mark.parametrize(
    ("n", "grouped", "of"),
    checkered(LENGTHS, [(2, 1), (2, 2), (4, 4), (4, 2)], ["head", "group", "one"]),
)
def test_chosen_blocks(n: int, grouped: tuple[int, int], of: str) -> None:
    heads, shared = grouped
    torch.manual_seed(n)
    leaf, data = chosen(n, n, 16, 5, {"head": heads, "group": heads // shared, "one": 1}[of])
    if of == "group":
        data["sel"] = data["sel"].repeat_interleave(shared, 1)
    work = Work(Intersection((Causal(), leaf)), n, n)
    tensors, call = a_call(work, heads, shared, None, data)
    agree(work, heads, tensors, call)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("n_q", [1, 40, 130])
def test_padding_and_fewer_queries(side: str, n_q: int) -> None:
    torch.manual_seed(0)
    leaf, data = chosen(n_q, 130, 24, 3, 2)
    real = torch.arange(130) < torch.tensor([130, 71])[:, None]
    padding = real if side == "right" else real.flip(1)
    work = Work(Union((Intersection((Causal(), leaf)), Window(3, 0))), n_q, 130)
    tensors, call = a_call(work, 2, 1, padding, data)
    agree(work, 2, tensors, call)


@pytest.mark.parametrize(
    ("call", "tiles"),
    [
        ("topk(keys = 3)", 1),
        ("topk(keys = 64)", 1),
        ("topk(keys = 65)", 2),
        ("topk(blocks = 50, size = 4)", 4),
        ("topk(blocks = 500, size = 4)", 5),
    ],
)
def test_a_row_is_merged_once_for_each_tile_of_its_keys(
    call: str, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = Rates(**dict.fromkeys((each.name for each in fields(Rates)), 0.0))
    monkeypatch.setattr(lists_backend, "current", lambda: replace(free, bands_merge=1.0))
    program = parse(f"attention a {{ attend {call} }}").program
    ((work, _),) = works_of(program, 0, 1, 260, 260, stand_ins(program))
    assert ListsBackend().cost(work) == 260 * tiles


@pytest.mark.parametrize("name", of_compositions())
def test_compositions(name: str) -> None:
    torch.manual_seed(0)
    n, relation = 100, of_compositions()[name]
    data = {"sel": torch.randint(-1, 7, (2, 2, n, 4)), "other": torch.randint(-1, 13, (2, 1, n, 3))}
    work = Work(relation, n, n)
    tensors, call = a_call(work, 2, 1, None, data)
    agree(work, 2, tensors, call)


def changed_works() -> dict[str, dict[str, object]]:
    return {
        "softcap": {"changes": (Softcap(2.0),)},
        "alibi": {"changes": (Alibi(alibi_slopes(4)),)},
        "bias": {"changes": (Bias(8, 20, True, "bias_0"), Softcap(3.0))},
        "softmax1": {"normalize": "softmax1"},
        "scale": {"scale": 0.7},
    }


@pytest.mark.parametrize("name", changed_works())
@pytest.mark.parametrize("shared", [1, 2])
def test_changed_scores(name: str, shared: int) -> None:
    torch.manual_seed(0)
    leaf, data = chosen(70, 70, 8, 4, 1)
    work = Work(Union((leaf, Window(2, 0))), 70, 70, **changed_works()[name])  # type: ignore[arg-type]
    tensors, call = a_call(work, 4, shared, None, data)
    call = replace(call, tables={"bias_0": torch.randn(4, 8).double()} if name == "bias" else {})
    agree(work, 4, tensors, call)


@pytest.mark.parametrize(
    "leaf",
    [
        TopK(blocks=3, size=16, queries=1),
        TopK(blocks=3, size=16),
        TopK(blocks=2, size=64),
        TopK(keys=5),
        TopK(mass=0.5, size=8),
        TopK(blocks=2, size=16, queries=1, causal=True),
        TopK(blocks=2, size=16, queries=1, within=Window(50, 50)),
    ],
    ids=str,
)
@pytest.mark.parametrize("shared", [1, 2])
def test_topk(leaf: TopK, shared: int) -> None:
    torch.manual_seed(0)
    real = torch.arange(150) >= torch.tensor([0, 37])[:, None]
    relation = Intersection((Causal(), leaf)) if leaf.causal else leaf
    work = Work(relation, 150, 150)
    for padding in (None, real):
        tensors, call = a_call(work, 4, shared, padding, {})
        agree(work, 4, tensors, call)


@pytest.mark.parametrize(
    ("name", "padded", "n"), checkered(sorted_graphs(), [False, True], [1, 65, 150])
)
def test_sorted(name: str, padded: bool, n: int) -> None:
    torch.manual_seed(0)
    padding = torch.arange(n) >= torch.tensor([0, n // 3])[:, None] if padded else None
    leaf = sorted_graphs()[name]
    leaves = decided_in(leaf)
    hashed = any(isinstance(x, Lsh) and x.share_qk for x in leaves)
    for n_q in {n, n // 2 + 1}:
        work = Work(leaf, n_q, n, unit_keys=hashed)
        tensors, call = a_call(work, 2, 1, padding, {})
        agree(work, 2, tensors, call)


@pytest.mark.limits("", "tiny")
def test_pieces_and_chunks() -> None:
    """The same however small the pieces are."""
    torch.manual_seed(0)
    leaf, data = chosen(90, 90, 16, 5, 2)
    work = Work(Intersection((Causal(), leaf)), 90, 90)
    tensors, call = a_call(work, 2, 1, None, data)
    agree(work, 2, tensors, call)


@pytest.mark.limits("", "tiny")
def test_a_piece_of_nothing_but_rows_that_fill_up_leaves_the_others_alone() -> None:
    torch.manual_seed(2)
    leaf, data = chosen(70, 70, 8, 3, 2)
    work = Work(Intersection((Causal(), leaf)), 70, 70)
    tensors, call = a_call(work, 2, 1, None, data)
    agree(work, 2, tensors, call)


@pytest.mark.parametrize("name", ["lsh, multiplied", "lsh, beside", "lsh, in buckets"])
@pytest.mark.limits("", "tiny")
def test_layouts_are_merged_some_at_a_time(name: str) -> None:
    torch.manual_seed(0)
    work = Work(sorted_graphs()[name], 40, 65, unit_keys=True)
    padding = torch.arange(65) >= torch.tensor([0, 20])[:, None]
    tensors, call = a_call(work, 2, 1, padding, {})
    agree(work, 2, tensors, call)


@pytest.mark.limits("", "tiny")
def test_a_query_without_keys_takes_nothing_of_others() -> None:
    """Not even where what others read is infinite."""
    torch.manual_seed(0)
    leaf, data = chosen(40, 40, 8, 3, 1)
    data["sel"][0, 0, 0] = 0
    work = Work(leaf, 40, 40)
    (q, k, v), call = a_call(work, 1, 1, None, data)
    v[0, 0, :8] = torch.inf
    out, lse = ListsBackend().build(work, (0,), CPU).partial(q, k, v, call)  # type: ignore[attr-defined]
    assert not out[0, 0, 0].isfinite().any()
    # the one row that `chosen` leaves empty
    assert not out[0, 0, 20].any()
    assert lse[0, 0, 20] == -torch.inf


@pytest.mark.limits("", "tiny")
def test_without_any_key_nothing_is_left_of_an_earlier_call() -> None:
    """Whose numbers, here NaN, still stand in the buffers."""
    leaf, data = chosen(40, 40, 8, 3, 1)
    work = Work(leaf, 40, 40)
    kernel = ListsBackend().build(work, (0,), CPU)
    data["sel"][:] = 0
    for number in (torch.nan, 1.0):
        tensors, call = a_call(work, 1, 1, None, data)
        q, k, v = ((x * number).requires_grad_() for x in tensors)
        out = kernel(q, k, v, call)
        found = (out, *torch.autograd.grad(out.sum(), (q, k, v)))
        data["sel"][:] = -1
    assert not any(x.any() for x in found)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_shorter_types(kind: torch.dtype) -> None:
    """No further from the definition in float64 than the dense kernel of the type, twice."""
    torch.manual_seed(0)
    leaf, data = chosen(130, 130, 16, 4, 2)
    work = Work(Union((Intersection((Causal(), leaf)), Window(3, 0))), 130, 130)
    tensors, call = a_call(work, 2, 1, None, data)
    short = [x.to(kind) for x in tensors]
    q, k, v = (x.double() for x in short)
    members = (0, 1)
    exact = DenseKernel(work, members, CPU)(q, k, v, call)
    errors = []
    for kernel in (ListsBackend().build(work, members, CPU), DenseKernel(work, members, CPU)):
        out = kernel(short[0], short[1], short[2], call)
        assert out.dtype == kind
        errors.append(float((out.double() - exact).abs().max()))
    assert errors[0] <= 2 * errors[1] + 1e-6


def test_derivatives_of_derivatives_are_those_of_the_definition() -> None:
    torch.manual_seed(0)
    leaf, data = chosen(13, 13, 4, 2, 1)
    work = Work(Intersection((Causal(), leaf)), 13, 13)
    tensors, call = a_call(work, 2, 1, None, data)
    kernel = ListsBackend().build(work, (0, 1), CPU)
    leaves = [x[:1, :, :, :2].clone().requires_grad_() for x in tensors]
    q, k = (x.detach() for x in leaves[:2])
    part = Given(q, k, (0, 1), (0, 1), (0.7, 0.7), data={"sel": data["sel"][:1]})
    call = Call(data={leaf: decide(leaf, part)})

    def attend(*given: torch.Tensor) -> torch.Tensor:
        return kernel(given[0], given[1], given[2], call)

    assert torch.autograd.gradgradcheck(attend, leaves, **ALONG)


@pytest.mark.parametrize(
    "body",
    [
        "attend topk(blocks = 2, size = 16, queries = 1)",
        "causal attend topk(blocks = 2, size = 16, queries = 1) | window(before = 3, after = 0)",
        "attend lsh(rounds = 2, chunk = 16)",
        "attend lsh(rounds = 3, chunk = 16, combine = mean)",
        "attend cluster(count = 4)",
        "attend cluster(count = 4, assign = balanced)",
    ],
)
@pytest.mark.parametrize("n", [0, 1, 100])
def test_modules(body: str, n: int) -> None:
    """The backend by its name gives what the dense one gives."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 8).double() for _ in range(3))
    k = q if "lsh" in body else k
    outs = []
    for backend in ("lists", "dense"):
        module = parse(f"attention decided {{ {body} }}").compile(backend=backend)
        outs.append(module(q, k, v))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-9, atol=1e-11)


WEIGHTED = (
    "attend sinkhorn(size = 8)",
    "causal attend sinkhorn(size = 7) score alibi() normalize softmax1",
    "attend sinkhorn(size = 8, cut = 2) score softcap(cap = 3)",
    "attend sinkhorn(size = 64)",
    "attend cluster(of = q)",
    "attend cluster(of = q, count = 3) score softcap(cap = 3) normalize softmax1",
)


@pytest.mark.parametrize(
    ("body", "shape"),
    checkered(
        WEIGHTED,
        [(1, None), (8, "left"), (65, None), (65, "right"), (150, "left"), (150, "right")],
    ),
)
def test_matched_blocks_and_means_of_queries(body: str, shape: tuple[int, str | None]) -> None:
    """With what they learn, for heads that share keys, and for fewer queries than keys."""
    n, padded = shape
    padding = None
    if padded:
        real = torch.arange(n) >= torch.tensor([0, n // 3])[:, None]
        padding = real if padded == "left" else real.flip(1)
    spec = parse(f"attention decided {{ heads 4 {body} }}")
    modules = [spec.compile(backend=name, head_size=8).double() for name in ("lists", "dense")]
    for n_q, keys in ((n, 4), (n, 2), (n // 2 + 1, 4)):
        torch.manual_seed(n)
        for one, other in zip(*(module.parameters() for module in modules), strict=True):
            torch.nn.init.normal_(one, std=0.3)
            other.data.copy_(one)
        # memory that does not follow its axes
        tensors = [
            torch.randn(2, rows, heads, 8).double().transpose(1, 2).requires_grad_()
            for rows, heads in ((n_q, 4), (n, keys), (n, keys))
        ]
        upper = torch.randn(2, 4, n_q, 9).double()
        found = []
        for module in modules:
            out, lse = module(*tensors, key_padding_mask=padding, return_lse=True)
            there = lse > -torch.inf
            total = (out * upper[..., :8]).sum() + (lse * upper[..., 8])[there].sum()
            asked = [*tensors, *module.parameters()]
            found.append((out, lse, *torch.autograd.grad(total, asked, materialize_grads=True)))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("body", ["sinkhorn(size = 4)", "cluster(of = q, count = 3)"])
def test_what_is_learned_is_differentiated_twice(body: str) -> None:
    torch.manual_seed(0)
    module = parse(f"attention decided {{ attend {body} }}").compile("lists", head_size=2)
    given = [torch.randn(1, 1, 11, 2).double().requires_grad_() for _ in range(3)]
    module = module.double()
    grads = []
    for each in ("lists", "dense"):
        other = parse(f"attention decided {{ attend {body} }}").compile(each, head_size=2).double()
        other.load_state_dict(module.state_dict())
        asked = [*given, *other.parameters()]
        out = other(*given)
        first = torch.autograd.grad((out**2).sum(), asked, create_graph=True)
        second = torch.cat([x.flatten() for x in first]).square().sum()
        grads.append(torch.autograd.grad(second, asked))
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "body",
    [
        "attend sinkhorn(size = 128)",
        "causal attend sinkhorn(size = 128)",
        "attend sinkhorn(size = 128, cut = 2)",
        "attend cluster(of = q)",
        "attend topk(keys = 16)",
    ],
)
def test_memory_is_that_of_a_few_tensors(body: str) -> None:
    n, size = 4096, 32
    module = parse(f"attention decided {{ {body} }}").compile("lists", head_size=size)
    given = [torch.randn(1, 1, n, size, requires_grad=True) for _ in range(3)]

    def step() -> None:
        module(*given).sum().backward()

    # what is made once for a length is not of the step
    step()
    # n x n numbers of one byte are 32 times one of the tensors
    assert peak_bytes(step) < 24 * 4 * n * size


READING = (
    "causal attend (chosen(sel) | window(before = 9, after = 0)) & same(doc)",
    "attend chosen(sel) & same(doc)",
    "attend chosen(sel) | window(radius = 5) & same(doc) score alibi() score bias(buckets = 8)",
    "attend topk(blocks = 2, size = 16, queries = 1) | columns(marks) | window(radius = 3)",
    "attend lsh(rounds = 2, chunk = 16) & same(doc) | window(radius = 3) normalize softmax1",
    "attend chosen(sel) | prefix(start)",
)


@pytest.mark.parametrize("body", READING)
def test_inputs_beside_what_is_decided(body: str) -> None:
    """Documents, marks and lengths of each sample, with padding and for fewer queries."""
    torch.manual_seed(0)
    n = 130
    kinds = {"sel": "choices(size = 16)", "doc": "ids", "marks": "tokens", "start": "length"}
    names = [name for name in kinds if re.search(rf"\b{name}\b", body)]
    inputs = {
        "sel": torch.randint(-1, 9, (3, 2, n, 3)),
        "doc": (torch.rand(3, n) < 0.05).cumsum(1),
        "marks": torch.rand(3, n) < 0.1,
        "start": torch.tensor([5, 80, 0]),
    }
    declared = " ".join(f"input {name}: {kinds[name]}" for name in names)
    spec = parse(f"attention decided {{ heads 2 {declared} {body} }}")
    modules = [spec.compile(name).double() for name in ("lists", "dense")]
    modules[1].load_state_dict(modules[0].state_dict())
    padding = torch.arange(n) >= torch.tensor([[0], [20], [60]])
    for n_q, real in ((n, None), (n, padding), (50, padding)):
        tensors = [torch.randn(3, 2, n, 8).double() for _ in range(3)]
        tensors[0] = tensors["lsh" in body][:, :, n - n_q :]
        given = {name: inputs[name] for name in names}
        if "sel" in names:
            given["sel"] = given["sel"][:, :, n - n_q :]
        found = []
        for module in modules:
            asked = [*(x.clone().requires_grad_() for x in tensors), *module.parameters()]
            out = module(*asked[:3], inputs=given, key_padding_mask=real)
            found.append((out, *torch.autograd.grad(out.square().sum(), asked)))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_what_is_refused() -> None:
    """The reason says what is in the way, and the definition runs it."""
    for body, reason in (
        ("attend cluster(of = q) score alibi()", "means of queries have none"),
        ("attend sinkhorn(size = 8) | window(radius = 3)", "another graph stands beside it"),
        ("attend topk(keys = 3) normalize relu", "not merged by log-sum-exps"),
        ("attend window(radius = 3)", "nothing of the graph is decided"),
    ):
        spec = parse(f"attention decided {{ {body} }}")
        refusals = {each.backend.name: each.refusal for each in spec.plan(256).steps[0].candidates}
        assert reason in str(refusals["lists"])


def test_long_sequences_are_planned_for_lists() -> None:
    spec = parse("attention decided { attend topk(blocks = 4, size = 64, queries = 1) }")
    assert spec.plan(4096).steps[0].chosen.name == "lists"
    assert spec.plan(32).steps[0].chosen.name != "lists"


@pytest.mark.parametrize("height", [1, 5])
@pytest.mark.parametrize(
    "index",
    [
        [[4]],
        [[2, 3, 4]],
        [[0], [1], [2]],
        [[0, 1], [1, 2], [2, 3]],
        [[0, 1], [3, 4], [6, 7]],
        [[0, 1], [1, 2], [2, 4]],
        [[2, 1], [3, 2]],
        [[3], [3], [3]],
        [[5], [3], [1]],
        [[0, 2], [1, 3]],
    ],
    ids=str,
)
def test_tiles_are_taken_where_they_lie_or_gathered(index: list[list[int]], height: int) -> None:
    for x in (torch.randn(9, height, 3), torch.randn(9, height), torch.randn(9, 3, height).mT):
        which = torch.tensor(index)
        found = attention._taken(x, which, batches.step_of(which), "test")
        assert torch.equal(found, x[which].flatten(1, 2))
        steps = [row[0] for row in index]
        runs = all(row == list(range(row[0], row[0] + len(row))) for row in index)
        even = len({b - a for a, b in itertools.pairwise(steps)}) < 2
        lies = runs and even and (len(steps) == 1 or steps[1] > steps[0]) and x.is_contiguous()
        assert (found.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == lies


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_are_added_as_bits(dtype: torch.dtype) -> None:
    held = torch.rand(3, 7, 5) < 0.5
    for each in (held, held.mT, held[:, ::2]):
        wanted = torch.zeros(each.shape, dtype=dtype).masked_fill(~each, -torch.inf)
        found = attention._put_bias(torch.empty(each.shape, dtype=dtype), each)
        assert torch.equal(found, wanted)
    counts = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64).log()
    found = attention._put_bias(torch.empty(3, dtype=dtype), counts)
    assert found.tolist() == [0.0, 1.0, -torch.inf]
