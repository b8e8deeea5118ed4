"""FlexAttention: masks that are the truth alone, block lists, one compilation for all graphs and
lengths, refusals. What only a GPU does is tried uncompiled."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_checks import GRAPHS, spec_of
from flex_checks import as_on_a_gpu, run_plainly
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask
from zoo import ATTENTIONS, every_attention, smaller

from attnspec.backends import BACKENDS
from attnspec.backends.dense.kernel import DenseKernel
from attnspec.backends.flex import attention, backend
from attnspec.backends.flex.attention import blocks_of, listed, mask_mod, run_mod
from attnspec.backends.flex.backend import FLEX, FlexBackend
from attnspec.backends.flex.block_lists import BLOCK, BlockLists, block_lists
from attnspec.backends.flex.kernel import FlexKernel
from attnspec.backends.planner import candidates, choose
from attnspec.graphs.relation import Relation, evaluate_pairs
from attnspec.layout.orders import NATURAL, orders_of, terms_of, without
from attnspec.layout.steps import Banded, banded, bands_of, layouts_of, whole_layouts_of
from attnspec.layout.tile_layout import StepLayout
from attnspec.lower.lower import stand_ins, works_of
from attnspec.lower.work import BackendError, Bias, Call, Work, refusal_of
from attnspec.spec import Spec

CPU = torch.device("cpu")

LENGTHS = (1, 127, 128, 129)
"""Below, at and above a block."""

LONG = 300

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def works(spec: Spec, n: int, n_q: int | None = None) -> list[tuple[Work, tuple[int, ...]]]:
    """What the first layer computes that FlexAttention takes and reads no input, with its heads."""
    program = spec.program
    if any(attend.mechanism for attend in program.attends):
        return []
    found = works_of(program, 0, program.heads or 1, n_q or n, n, stand_ins(program))
    able = [each for each in found if refusal_of(FlexBackend(), each[0], "cuda") is None]
    return [each for each in able if not each[0].reads]


def lists_of(work: Work) -> list[BlockLists]:
    """The blocks of every step, as on a GPU."""
    bands = bands_of(work.relation, work.n_q, work.n_k, FLEX)
    return [block_lists(layout) for layout in whole_layouts_of(bands, work.n_q, work.n_k)]


def pairs_of(found: BlockLists, work: Work) -> np.ndarray:
    """How often a mask alone holds each pair of positions, int [n_q, n_k]."""
    blocks = blocks_of(found, CPU)
    holds = mask_mod(blocks.numbers, blocks.width, blocks.bits)
    q, k = (torch.arange(len(at)) for at in (found.q_at, found.k_at))
    none = torch.tensor(0)
    held = holds(none, none, q[:, None], k[None]).numpy()
    if blocks.runs:
        in_runs = run_mod(blocks.runs)(none, none, q[:, None], k[None]).numpy()
        assert (in_runs == held).all()
    # places where nothing stands have no key, and what their queries read is cut off
    assert not held[:, found.k_at < 0].any()
    total = np.zeros((work.n_k, work.n_k), int)
    real = found.q_at >= 0
    rows, columns = np.nonzero(held[real])
    np.add.at(total, (found.q_at[real][rows], found.k_at[columns]), 1)
    return total[work.n_k - work.n_q :]


def meant(work: Work) -> np.ndarray:
    """The pairs of a work by its definition, int [n_q, n_k]."""
    q, k = np.arange(work.n_k - work.n_q, work.n_k)[:, None], np.arange(work.n_k)[None]
    held = evaluate_pairs(work.relation, q, k, work.n_k)
    return np.broadcast_to(held, (work.n_q, work.n_k)).astype(int)


# --- masks and lists -----------------------------------------------------------------------------


@every_attention
def test_the_masks_of_all_steps_are_the_relation(path: Path, name: str) -> None:
    spec = smaller(path, name)
    fixed = spec.program.fixed_length
    # every file at one of the lengths in turn, and at several blocks
    short = LENGTHS[ATTENTIONS.index((path, name)) % len(LENGTHS)]
    for n in (short, LONG) if fixed is None else (fixed,):
        if n <= spec.program.extra_tokens:
            continue
        for work, _ in works(spec, n):
            total = np.sum([pairs_of(found, work) for found in lists_of(work)], axis=0)
            assert (total == meant(work)).all(), f"n = {n}"


def test_lists_are_contiguous_and_bands_are_runs() -> None:
    # FlexAttention's kernels read lists by their shape alone: of others, gradients are wrong
    assert all(x.is_contiguous() for x in listed(torch.rand(2, 3, 5).mT > 0.5))
    for body, count in (
        ("attend window(radius = 200)", 1),
        ("causal attend full", 1),
        ("attend window(radius = 70) | global(first(9))", 2),
        ("attend random(keys = 4, seed = 0)", 0),
    ):
        (found,) = lists_of(works(spec_of(body), 1000)[0][0])
        assert len(blocks_of(found, CPU).runs) == 2 * count


@pytest.mark.parametrize("graph", GRAPHS)
def test_lists_are_what_the_masks_say(graph: str) -> None:
    for n, n_q in ((300, 300), (515, 200)):
        for work, _ in works(spec_of(GRAPHS[graph]), n, n_q):
            for layout in whole_layouts_of(bands_of(work.relation, n_q, n, FLEX), n_q, n):
                assert_listed(block_lists(layout))


def assert_listed(found: BlockLists) -> None:
    shape = len(found.q_at) // BLOCK, len(found.k_at) // BLOCK
    blocks = blocks_of(found, CPU)
    q, k = (torch.arange(BLOCK * count) for count in shape)
    holds = mask_mod(blocks.numbers, blocks.width, blocks.bits)
    held = holds(q[:1], q[:1], q[:, None], k[None])
    tiles = held.numpy().reshape(shape[0], BLOCK, shape[1], BLOCK)
    full, some = tiles.all(axis=(1, 3)), tiles.any(axis=(1, 3))
    listed = [
        unlisted(each, size) for each, size in zip(all_lists(found), sizes(shape), strict=True)
    ]
    masked, whole, q_masked, q_whole = listed
    assert (masked == q_masked.T).all()
    assert (whole == q_whole.T).all()
    assert not (masked & whole).any()
    assert ((masked | whole) == some).all()
    # what is visited without its mask is whole, whatever keys are missing
    assert not (whole & ~full).any()
    rows = [row for each in listed for row in each]
    ranges = [np.diff(np.flatnonzero(row)) for row in rows]
    assert found.contiguous == all((each == 1).all() for each in ranges)


def all_lists(found: BlockLists) -> list[tuple[np.ndarray, np.ndarray]]:
    return [found.masked, found.full, found.q_masked, found.q_full]


def sizes(shape: tuple[int, int]) -> list[tuple[int, int]]:
    return [shape, shape, shape[::-1], shape[::-1]]


def unlisted(lists: tuple[np.ndarray, np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    """Lists as bool [rows, columns]; each row must be ascending."""
    counts, found = lists
    assert found.shape == shape
    held = np.zeros(shape, bool)
    for row, count in enumerate(counts):
        assert (np.diff(found[row, :count]) > 0).all()
        held[row, found[row, :count]] = True
    return held


IN_ORDERS = {**GRAPHS, "grid": "sequence grid(15, 20) attend neighborhood(5, 7) | global(first(9))"}
"""Each of them in the last order of every term, listed tokens and boxes of a grid among them."""


def layouts_by_hand(work: Work) -> list[StepLayout]:
    """Every term in its last order, whatever it costs."""
    bands: list[Banded] = []
    earlier: tuple[Relation, ...] = ()
    for term in terms_of(work.relation):
        order = orders_of(term, work.n_k)[-1]
        bands.append(banded(without(term, earlier), work.n_q, work.n_k, order, BLOCK, FLEX))
        earlier = (*earlier, term)
    return whole_layouts_of(tuple(bands), work.n_q, work.n_k)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("graph", IN_ORDERS)
def test_any_order_of_tokens(graph: str) -> None:
    n = 300
    generator = torch.Generator().manual_seed(0)
    for work, heads in works(spec_of(IN_ORDERS[graph]), n):
        layouts = layouts_by_hand(work)
        total = np.sum([pairs_of(block_lists(layout), work) for layout in layouts], axis=0)
        assert (total == meant(work)).all()
        kernel = FlexKernel(work, heads, CPU, layouts)
        if not kernel.steps:
            continue
        kernel.finds_lse = True
        q, k, v = (torch.randn(1, 1, n, 16, generator=generator) for _ in range(3))
        out, lse = kernel._fast(q, k, v, Call())
        wide = q.double(), k.double(), v.double()
        expected, sums = DenseKernel(work, heads, CPU).partial(*wide, Call())
        assert sums is not None
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(lse.double(), sums, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("graph", ["window", "strided", "blocks", "random", "full", "empty rows"])
def test_lists_are_those_of_torch(graph: str) -> None:
    n = 1000
    for work, _ in works(spec_of(GRAPHS[graph]), n):
        band = banded(work.relation, n, n, NATURAL, BLOCK, FLEX)
        (layout,) = whole_layouts_of((band,), n, n)
        found = block_lists(layout)
        held = torch.from_numpy(meant(work).astype(bool))

        def holds(
            b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
        ) -> torch.Tensor:
            return held[q, k]  # noqa: B023

        theirs = create_block_mask(holds, 1, 1, n, n, "cpu")
        given = [
            (theirs.kv_num_blocks, theirs.kv_indices),
            (theirs.full_kv_num_blocks, theirs.full_kv_indices),
            (theirs.q_num_blocks, theirs.q_indices),
            (theirs.full_q_num_blocks, theirs.full_q_indices),
        ]
        pairs = [(counts[0, 0].numpy(), at[0, 0].numpy()) for counts, at in given]  # type: ignore[index]
        shape = len(found.q_at) // BLOCK, len(found.k_at) // BLOCK
        ours, torchs = (
            [unlisted(each, size) for each, size in zip(lists, sizes(shape), strict=True)]
            for lists in (all_lists(found), pairs)
        )
        # of the last queries, which fill no block, what is not there is nothing to leave out
        short = ours[1][-1] & torchs[0][-1]
        for lists in (ours, [part.T for part in (ours[2], ours[3])]):
            lists[0][-1] |= short
            lists[1][-1] &= ~short
        for one, other in zip(ours, torchs, strict=True):
            assert (one == other).all()


def test_a_step_is_one_call_at_any_length() -> None:
    # on the CPU's own way, masks of whole rows are kept, and large ones make two steps of one
    n = 1 << 16
    ((work, heads),) = works(spec_of("causal attend full"), n)
    bands = bands_of(work.relation, n, n, FLEX)
    assert len(bands) == 1
    assert len(layouts_of(bands, n, n)) > 1
    kernel = FlexBackend().build(work, heads, CPU)
    assert isinstance(kernel, FlexKernel)
    assert len(kernel.steps) == 1


def test_a_long_mask_stays_within_32_bits() -> None:
    # the pair of the last two positions of a million, in blocks whose mask is the last of many
    count = (1 << 20) // BLOCK
    width, masks = torch.tensor(count), torch.zeros(3 * BLOCK * 16, dtype=torch.uint8)
    masks[-1] = 1 << 7
    numbers = torch.zeros(count * count, dtype=torch.int32)
    numbers[-1] = 2
    place = torch.tensor(count * BLOCK - 1, dtype=torch.int32)
    holds = mask_mod(numbers, width.to(torch.int32), masks)
    assert holds(place, place, place, place)
    assert not holds(place, place, place, place - 1)


# --- uncompiled: what a GPU is asked for ---------------------------------------------------------


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention as a GPU runs it, with log-sum-exps, by torch's own plain operations."""
    run_plainly(monkeypatch)


CHANGED = (
    "attend window(radius = 30)",
    "causal attend window(before = isqrt(n), after = 0) | residue(step = isqrt(n))",
    "attend global(first(3)) | window(radius = 9)",
    "attend where(k < q // 2) normalize softmax1",
    "heads 4 causal attend window(before = 90, after = 0) score softcap(cap = 2.0)"
    " score alibi(slopes = [1, 0.1, 0, -0.1])",
    "causal input x: ids attend same(x)",
    "input x: ids input y: ids attend same(x) & same(y) & (window(radius = 9) | residue(step = 7))",
    "heads 4 attend block(size = 100) scale 0.3 score bias(buckets = 8, max_distance = 64)",
)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("body", "n", "n_q"),
    [(body, *sizes) for body, sizes in zip(CHANGED, cycle([(300, 300), (257, 100)]), strict=False)],
)
def test_steps_padding_changes_and_log_sum_exps(body: str, n: int, n_q: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, n_q, 16, generator=generator)
    k, v = (torch.randn(2, 2, n, 16, generator=generator) for _ in range(2))
    padding = torch.arange(n) < torch.tensor([[n], [n - 70]])
    program = spec_of(body).program
    ((work, _),) = works_of(program, 0, 4, n_q, n, stand_ins(program))
    heads = (0, 1, 2, 3)
    tables = {
        change.table: torch.randn(4, change.buckets, generator=generator)
        for change in work.changes
        if isinstance(change, Bias)
    }
    data = {
        "x": torch.stack([torch.arange(n) // 60, torch.arange(n) % 5]),
        "y": torch.ones(1, n).int(),
    }
    kernel, exact = as_on_a_gpu(work, heads), DenseKernel(work, heads, CPU)
    for mask in (None, padding):
        call = Call(mask, tables=tables, data=data)
        out, lse = kernel._fast(q, k, v, call)
        expected, sums = exact.partial(q.double(), k.double(), v.double(), call)
        assert sums is not None
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(lse.double(), sums, atol=2e-5, rtol=1e-5)


# --- compiled ------------------------------------------------------------------------------------


def compared(body: str, n: int) -> None:
    """Compiled, beside the definition in float64."""
    generator = torch.Generator().manual_seed(n)
    spec = spec_of(body)
    q = torch.randn(1, 4, n, 16, generator=generator)
    k, v = (torch.randn(1, 2, n, 16, generator=generator) for _ in range(2))
    with torch.no_grad():
        out = spec.compile(backend="flex")(q, k, v)
        exact = spec.compile(backend="dense")(q.double(), k.double(), v.double())
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)


def test_few_compilations_serve_all_graphs_and_lengths() -> None:
    counters.clear()
    for at, n in enumerate((1, 2, 64, 127, 128, 129, 200, 255, 256, 257, 300, 384, 385)):
        compared([*GRAPHS.values()][at % len(GRAPHS)], n)
    for n in (100, 500, 511, 512, 640, 700, 1000):
        compared("attend residue(step = 3) - self", n)
    # two for each kind: keys of a query in one run, in two, or in masks
    assert counters["stats"]["unique_graphs"] <= 6


def test_what_the_cpu_cannot_goes_the_composed_way() -> None:
    spec = spec_of("attend window(radius = 9)")
    module, exact = spec.compile(backend="flex"), spec.compile(backend="dense")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 50, 8, generator=generator).double() for _ in range(3))
    given = [x.requires_grad_() for x in (q, k, v)]
    found = torch.autograd.grad(module(*given).square().sum(), given)
    wanted = torch.autograd.grad(exact(*given).square().sum(), given)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    single = [x.float().detach().requires_grad_() for x in (q, k, v)]
    found = torch.autograd.grad(module(*single).square().sum(), single)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)
    out, lse = module(q, k, v, return_lse=True)
    for one, other in zip((out, lse), exact(q, k, v, return_lse=True), strict=True):
        torch.testing.assert_close(one, other)


BIASED = "heads 1 attend full score bias(buckets = 8, max_distance = 64)"


def test_gradients_of_tables_are_the_same_bits_where_torch_is_told_so() -> None:
    # on a GPU FlexAttention adds them up by atomic operations
    elsewhere = torch.device("meta")
    ((work, heads),) = works(spec_of(BIASED), 128)
    kernel = FlexBackend().build(work, heads, elsewhere)
    assert isinstance(kernel, FlexKernel)
    x = torch.empty(1, 1, 128, 16, device=elsewhere, requires_grad=True)
    for learned in (True, False):
        table = torch.zeros(1, 8, device=elsewhere, requires_grad=learned)
        call = Call(tables={work.changes[0].table: table})  # type: ignore[union-attr]
        assert kernel.goes_fast(x, x, x, call)
        torch.use_deterministic_algorithms(True)
        try:
            assert kernel.goes_fast(x, x, x, call) is not learned
            with torch.no_grad():
                assert kernel.goes_fast(x, x, x, call)
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@every_attention
def test_every_static_file_of_the_zoo_compiled(path: Path, name: str) -> None:
    spec = smaller(path, name)
    n = spec.program.fixed_length or 300
    generator = torch.Generator().manual_seed(0)
    for work, heads in works(spec, n):
        if FlexBackend().refuses(work, "cpu") is not None:
            continue
        q, k, v = (torch.randn(1, len(heads), n, 16, generator=generator) for _ in range(3))
        tables = {
            change.table: torch.randn(len(heads), change.buckets, generator=generator)
            for change in work.changes
            if isinstance(change, Bias)
        }
        call = Call(tables=tables)
        out = FlexBackend().build(work, heads, CPU)(q, k, v, call)
        exact = DenseKernel(work, heads, CPU)(q.double(), k.double(), v.double(), call)
        torch.testing.assert_close(out.double(), exact, atol=2e-5, rtol=1e-5)


@pytest.mark.slow
def test_labels_and_padding_compiled() -> None:
    generator = torch.Generator().manual_seed(0)
    spec, n = spec_of("causal input x: ids attend same(x)"), 700
    ids = {"x": torch.stack([torch.arange(n) // 150, torch.arange(n) // 9 % 4])}
    padding = torch.arange(n) < torch.tensor([[n], [500]])
    q, k, v = (torch.randn(2, heads, n, 16, generator=generator) for heads in (4, 2, 2))
    for mask in (None, padding):
        with torch.no_grad():
            out = spec.compile(backend="flex")(q, k, v, inputs=ids, key_padding_mask=mask)
            wide = q.double(), k.double(), v.double()
            exact = spec.compile(backend="dense")(*wide, inputs=ids, key_padding_mask=mask)
        torch.testing.assert_close(out.double(), exact, atol=2e-5, rtol=1e-5)


# --- who is refused, and what is never silent ----------------------------------------------------


def test_on_the_cpu_it_waits_for_its_name() -> None:
    ((work, _),) = works(spec_of("attend window(radius = 9)"), 4096)
    assert choose(work, "cpu").name != "flex"
    (mine,) = [each for each in candidates(work, "cpu") if each.backend.name == "flex"]
    assert mine.refusal == "here it runs where it is asked for by name"
    assert choose(work, "cpu", "flex").name == "flex"
    ((long, _),) = works(spec_of("attend window(radius = 200)"), 16384)
    assert {each.backend.name for each in candidates(long, "cuda")[:2]} == {"flex", "triton"}
    assert "no estimate" in str(spec_of("attend window(radius = 9)").plan(512, backend="flex"))


@pytest.mark.parametrize(
    ("body", "device", "n", "said"),
    [
        ("attend full", "mps", 64, "compiled for CUDA and the CPU, not for mps"),
        ("attend full normalize relu", "cuda", 64, "`relu` normalises are not merged"),
        ("attend full normalize softmax1", "cpu", 64, "gives no log-sum-exps"),
        ("attend window(radius = 9)", "cuda", 1 << 20, "are 1,342,177,280 bytes, and at most"),
    ],
)
def test_refusals(body: str, device: str, n: int, said: str) -> None:
    program = spec_of(body).program
    ((work, _),) = works_of(program, 0, 1, n, n, stand_ins(program))
    reason = FlexBackend().refuses(work, device)
    assert reason is not None
    assert said in reason


@pytest.mark.parametrize(("less", "refused"), [(0, False), (1, True)])
def test_block_lists_may_be_as_large_as_is_said(
    less: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((work, _),) = works(spec_of("attend window(radius = 9)"), 4096)
    monkeypatch.setattr(backend, "LARGEST", 0)
    said = str(FlexBackend().refuses(work, "cuda"))
    taken = int(said.split("are ")[1].split(" bytes")[0].replace(",", ""))
    monkeypatch.setattr(backend, "LARGEST", taken - less)
    assert (FlexBackend().refuses(work, "cuda") is not None) == refused


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ((work, _),) = works(spec_of("attend full"), 64)
    monkeypatch.setattr(backend, "_is_new_enough", lambda: False)
    said = "on the CPU it needs torch 2.13, which is not installed"
    assert FlexBackend().refuses(work, "cpu") == said
    assert FlexBackend().refuses(work, "cuda") is None


def test_it_is_never_run_uncompiled() -> None:
    module = spec_of("attend window(radius = 9)").compile(backend="flex")
    x = torch.randn(1, 1, 64, 8)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        with pytest.raises(BackendError, match=r"torch\.compile is switched off"):
            module(x, x, x)


def test_too_many_compilations_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "RECOMPILES", 0)
    attention._compiled.cache_clear()
    module = spec_of("attend window(radius = 9) scale 0.77").compile(backend="flex")
    x = torch.randn(1, 1, 64, 8)
    try:
        with torch.no_grad(), pytest.raises(BackendError, match="compiled 0 times"):
            module(x, x, x)
    finally:
        attention._compiled.cache_clear()


def test_it_stands_among_the_backends() -> None:
    assert [each.name for each in BACKENDS].count("flex") == 1
