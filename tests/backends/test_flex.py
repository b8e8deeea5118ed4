"""FlexAttention: outputs and log-sum-exps as a GPU computes them, by torch's plain operations;
block lists that say what masks say; one compilation for all graphs and lengths; refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torchs
from population import BODIES, population, spec_of
from sweeps import few
from test_views import call_of, case_of
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask, create_mask
from views import Call, Case, errors

from attnspec.backends.flex import attention, steps
from attnspec.backends.flex.backend import FlexBackend
from attnspec.backends.flex.kernel import FlexKernel
from attnspec.ir.scalars import PAIR, Apply, Symbol
from attnspec.ir.scores import S
from attnspec.lower.work import Call as WorkCall
from attnspec.lower.work import Work, refusal_of
from attnspec.runtime import CompiledAttention

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

BLOCK = 128


def unlisted(counts: Any, columns: Any, shape: tuple[int, int]) -> Tensor:
    """Lists [b, h, rows] and [b, h, rows, columns] as bool [b, rows, columns]."""
    # FlexAttention's kernels read lists by their shape alone: of others, gradients are wrong
    assert counts.is_contiguous()
    assert columns.is_contiguous()
    assert tuple(columns.shape[2:]) == shape
    rank = torch.arange(shape[1]) < counts[:, 0, :, None]
    held = torch.zeros(rank.shape, dtype=torch.bool)
    for row, at, some in zip(
        held.view(-1, shape[1]), columns.view(-1, shape[1]), counts.view(-1).tolist(), strict=True
    ):
        assert (at[:some].diff() > 0).all()
        row[at[:some].long()] = True
    return held


def check_lists(mask: BlockMask, n_q: int, n_k: int) -> None:
    """A kernel visits every block that has a pair, and those without a mask whose pairs all are."""
    rows, columns = n_q // BLOCK, n_k // BLOCK
    batch = mask.kv_num_blocks.shape[0]
    held = create_mask(mask.mask_mod, batch, 1, n_q, n_k, device="cpu")[:, 0]
    tiles = held.view(batch, rows, BLOCK, columns, BLOCK)
    some = tiles.any(4).any(2)
    # of places where no query stands nothing is kept
    every = (tiles | ~held.any(2).view(batch, rows, BLOCK, 1, 1)).all(4).all(2)
    masked = unlisted(mask.kv_num_blocks, mask.kv_indices, (rows, columns))
    whole = unlisted(mask.full_kv_num_blocks, mask.full_kv_indices, (rows, columns))
    back = unlisted(mask.q_num_blocks, mask.q_indices, (columns, rows))
    assert torch.equal(masked, back.mT)
    back = unlisted(mask.full_q_num_blocks, mask.full_q_indices, (columns, rows))
    assert torch.equal(whole, back.mT)
    assert not (masked & whole).any()
    assert not (some & ~(masked | whole)).any()
    assert not (whole & ~every).any()
    # padding and inputs may leave nothing of a block that is visited
    assert batch > 1 or torch.equal(masked | whole, some)


class OnAGpu(FlexKernel):
    """FlexAttention in the steps of a GPU; the lists of its calls are examined."""

    def __init__(self, work: Work, heads: tuple[int, ...]) -> None:
        super().__init__(work, heads, torch.device("cpu"), steps.flex_steps(work, "cuda"))
        self.finds_lse = True

    def partial(self, q: Any, k: Any, v: Any, call: WorkCall) -> Any:
        for step in self.steps:
            blocks = step.blocks(call, len(q))
            kind = attention.Kind(1.0, padded=call.padding is not None, own=step.tiles.looks)
            mod, sizes = attention.mask_mod(kind, blocks), (step.q.places, step.k.places)
            make: Any = BlockMask
            check_lists(make(sizes, *blocks.lists, BLOCK_SIZE=BLOCK, mask_mod=mod), *sizes)
        return self._fast(q, k, v, call)


def on_a_gpu(module: CompiledAttention, call: Call) -> list[OnAGpu]:
    """The kernels that a call of the module runs from now on; none where one is refused."""
    engine, (q, k, _) = module.engine, call.tensors
    sizes = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    works = engine.binder.works(call.layer, sizes[0], *sizes[2:])
    if any(refusal_of(FlexBackend(), work, "cuda") for work, _ in works):
        return []
    made = [(OnAGpu(work, heads), work, heads) for work, heads in works]
    key = engine.binder.alike(call.layer), *sizes, "cpu", 0
    engine.prepared.get(key, lambda: engine.together(made, *sizes[:2], q.device))
    return [kernel for kernel, _, _ in made]


@pytest.fixture
def traced() -> Iterator[None]:
    """What is compiled is run by torch's plain operations, no machine code made."""
    # the limit of the compiled function is not that of one whose backend is forced
    limit = torch._dynamo.config.patch(recompile_limit=1 << 10)
    with torch.compiler.set_stance("default", force_backend="eager"), limit:
        yield


NAMES = [*population()]
QUICK = (
    *("causal", "softmax1", "by layer", "random", "shifted"),
    *("documents", "few marked tokens", "length", "times"),
)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("name", few(NAMES, QUICK))
def test_outputs_and_log_sum_exps_on_a_gpu(name: str) -> None:
    spec, turn = population()[name], NAMES.index(name)
    n = spec.program.fixed_length or (300, 130, 260)[turn % 3]
    # what is learned of blocks is of so many
    n = min(n, 250) if "sinkhorn" in name else n
    call = replace(call_of(Case(spec, n), turn), dtype=torch.float32)
    if any(attend.mechanism for attend in spec.program.attends):
        return
    module = call.learning(spec.compile("dense"))
    if not on_a_gpu(module, call):
        assert name not in QUICK
        return
    if not call.case.masks[call.layer].any((1, 2)).all():
        # heads without a pair are composed
        return
    with torch.no_grad():
        said = module(*call.tensors, **call.keywords, return_lse=True)
    kinds = torch.float64, torch.float32
    assert errors(list(said), *(call.meant(x, True)[:2] for x in kinds)) == []


@pytest.mark.parametrize("body", ["window(radius = 200)", "causal", "residue(step = 3) - self"])
def test_a_long_step_is_one_call_and_bands_are_runs(body: str) -> None:
    call = Call(Case(spec_of(f"attend {body}"), 600), "plain", torch.float32)
    (kernel,) = on_a_gpu(call.case.spec.compile("dense"), call)
    assert len(kernel.steps) == 1


def test_lists_that_are_wrong_are_found() -> None:
    mask = torchs.create_block_mask(lambda b, h, q, k: q - k < 200, 1, 1, 512, 512, "cpu")
    check_lists(mask, 512, 512)
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks"):
        wrong = torchs.create_block_mask(lambda b, h, q, k: q - k < 200, 1, 1, 512, 512, "cpu")
        getattr(wrong, name)[0, 0, -1] -= 1
        with pytest.raises(AssertionError):
            check_lists(wrong, 512, 512)


def check(body: str, n: int) -> None:
    call = Call(Case(spec_of(body), n), "grouped", torch.float32)
    with torch.no_grad():
        given = [x.detach() for x in call.tensors]
        out = spec_of(body).compile(backend="flex")(*given, **call.keywords)
    kinds = torch.float64, torch.float32
    assert errors([out], *(call.meant(x, False)[:1] for x in kinds)) == []


@pytest.mark.usefixtures("traced")
def test_one_compilation_serves_all_values_constants_and_lengths() -> None:
    attention._compiled.cache_clear()
    counters.clear()
    for n, most in ((300, 9), (129, 60), (700, 0), (1, 3)):
        # numbers of one spec, so that its shape is one
        check(f"input x: ids attend where(0 <= x(q) - x(k) <= {most}) | window(radius = {most})", n)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_few_compilations_serve_all_graphs_and_lengths() -> None:
    attention._compiled.cache_clear()
    counters.clear()
    bodies = [body for name, body in BODIES.items() if name in QUICK and "input" not in body]
    bodies = [x for x in bodies if not {"score", "layers", "grid", "softmax1"} & {*x.split()}]
    for at, n in enumerate((1, 2, 64, 127, 128, 129, 200, 255, 256, 257, 300, 384, 385, 511)):
        check(bodies[at % len(bodies)], n)
    for n in (100, 500, 640, 1000):
        check("attend residue(step = 3) - self", n)
    # two for each kind: keys of a query in one run, in two, or in masks; one more where sizes agree
    assert counters["stats"]["unique_graphs"] <= 7


@pytest.mark.slow
@pytest.mark.parametrize("name", ["documents", "few marked tokens", "both"])
def test_conditions_and_changes_compiled(name: str) -> None:
    case = case_of(name, 1)
    check(case.spec.source.partition("{")[2].rpartition("}")[0], case.n)


def test_flex_composes_the_gradients_and_types_that_its_cpu_kernel_lacks() -> None:
    spec = spec_of("attend window(radius = 9)")
    module, exact = spec.compile(backend="flex"), spec.compile(backend="dense")
    for kind in (torch.float64, torch.float32):
        given = [torch.randn(1, 2, 50, 8).to(kind).requires_grad_() for _ in range(3)]
        both = [torch.autograd.grad(x(*given).square().sum(), given) for x in (module, exact)]
        for one, other in zip(*both, strict=True):
            torch.testing.assert_close(one, other)
    with torch.no_grad():
        sums = [x(*given, return_lse=True) for x in (module, exact)]
    for one, other in zip(*sums, strict=True):
        torch.testing.assert_close(one, other)


def test_on_the_cpu_it_waits_for_its_name() -> None:
    spec = spec_of("attend window(radius = 9)")
    (step,) = spec.plan(4096).steps
    said = {each.backend.name: each.refusal for each in step.candidates}
    assert said["flex"] == "on this device it runs only if it is named"
    assert spec.plan(4096, backend="flex").steps[0].chosen.name == "flex"
    assert "no estimate" in str(spec.plan(512, backend="flex"))
    with pytest.raises(ValueError, match="gives no log-sum-exps, which `softmax1` needs"):
        spec_of("attend full normalize softmax1").plan(64, "cpu", backend="flex")
    (step,) = spec_of("attend window(radius = 200)").plan(16384, "cuda").steps
    assert {each.backend.name for each in step.candidates[:2]} == {"flex", "triton"}


def test_it_is_never_run_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = (
        spec_of("attend window(radius = 9)").compile(backend="flex"),
        torch.randn(1, 1, 64, 8),
    )
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        with pytest.raises(ValueError, match=r"torch\.compile is switched off"):
            module(x, x, x)
    monkeypatch.setattr(attention, "RECOMPILES", 0)
    attention._compiled.cache_clear()
    module = spec_of("attend window(radius = 9) scale 0.77").compile(backend="flex")
    try:
        with torch.no_grad(), pytest.raises(ValueError, match="compiled 0 times"):
            module(x, x, x)
    finally:
        attention._compiled.cache_clear()


def test_gradients_of_tables_are_the_same_bits_where_torch_is_told_so() -> None:
    # on a GPU FlexAttention adds them up by atomic operations
    spec = spec_of("heads 1 attend full score bias(buckets = 8, max_distance = 64)")
    engine = spec.compile(backend="flex").engine
    kernel: Any = engine.prepare(0, *torch.empty(2, 1, 1, 128, 1)).groups[0].kernel
    x = torch.empty(1, 1, 128, 16, device="meta", requires_grad=True)
    for learned in (True, False):
        table = torch.zeros(1, 8, device="meta", requires_grad=learned)
        call = WorkCall(tables=dict.fromkeys(kernel.work.changes.tables, table))
        assert kernel.goes_fast(x, x, x, call)
        torch.use_deterministic_algorithms(True)
        try:
            assert kernel.goes_fast(x, x, x, call) is not learned
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_inputs_of_scores_are_differentiated_at_pairs_alone() -> None:
    # FlexAttention has no backward on the CPU: what it is given is differentiated here
    body = "input near: pairs causal attend full score s * log(near(q, k))"
    mask, scores = torch.ones(1, 1, 6, 6).tril() > 0, torch.randn(1, 1, 6, 6)
    near, at = torch.where(mask, torch.rand(6, 6) + 1, 0.0), torch.arange(6)
    module, parts = spec_of(body).compile(backend="flex"), torch.randn(3, 1, 1, 6, 8)
    meant = spec_of(body).compile(backend="dense")(*parts, inputs={"near": near})
    torch.testing.assert_close(module(*parts, inputs={"near": near}), meant)
    changes = Apply("*", (S, Apply("log", (Symbol(f"near{PAIR}"),))))
    kind = attention.Kind(1.0, (changes,), (f"near{PAIR}",), bounded=True)
    none, one, six = torch.zeros(1), torch.tensor(1), torch.tensor(6)
    runs = torch.zeros_like(at), at + 1
    blocks = attention.Blocks((), one, one, none, none, none, at, at, runs)
    leaf = near.clone().requires_grad_()
    read = ((leaf.flatten(), one, six, six, one * 0, one * 0),)
    change = attention.score_mod(kind, blocks, (one, one), read)
    out = torch.where(mask, change(scores, one * 0, one * 0, at[:, None], at), 0.0)
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    torch.testing.assert_close(grad, torch.where(mask, scores / near, 0.0))
