"""A sequence over ranks is what one process computes: values, gradients, bytes; and all ranks say
what is wrong. Ranks are threads, or processes with a network between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_ranks import Found, Shards, cut, run
from population import BODIES, population, spec_of
from ranks_in_turn import Rank, in_turn
from sweeps import few
from test_views import kinds
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from views import numbers

import attnspec
from attnspec.distributed import LostRank, Partition, parallelize

# the processes that the tests share start once
pytestmark = pytest.mark.xdist_group("ranks")

NAMES = [*population()]
PARTITIONS = "", "head_tail", "residue", "uneven", "contiguous"
SHAPES = "plain", "grouped", "left", "right", "holes", "wide", "strided"
TYPES = torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16


KIND = torch.float64


def shards_of(name: str) -> Shards:
    """A spec of the population over ranks, which its place decides."""
    turn, program = NAMES.index(name), population()[name].program
    partition = PARTITIONS[turn % 5]
    ranks = 4 if partition in ("residue", "uneven") else 2 + turn % 3
    shape = SHAPES[turn % 7]
    if any(entry.kind == "numbers" for entry in program.inputs):
        # of padding the numbers are others than they are given
        shape = "plain"
    n = program.fixed_length or (33, 64, 130)[turn % 3]
    return Shards(name, n, ranks, partition, shape, TYPES[turn % 5], turn % (program.layers or 1))


def quick() -> set[str]:
    """Each 36th body, and those with a word of the language that none before has."""
    words, found = set[str](), set[str]()
    for turn, name in enumerate(NAMES):
        if name in BODIES and (turn % 36 == 1 or not kinds(population()[name]) <= words):
            words |= kinds(population()[name])
            found.add(name)
    return found


QUICK = quick()


def differing(shards: Shards) -> list[str]:
    return shards.differing(in_turn(shards.ranks, shards.on))


@pytest.mark.parametrize("name", few(NAMES, QUICK))
def test_ranks_together_compute_what_one_does(name: str) -> None:
    assert differing(shards_of(name)) == []


FOUR = "causal heads 4 "
CHOSEN = "heads 4 input x: choices(size = 4) "
SCORED = "heads 4 causal input s: scores(size = 4) attend topk(blocks = 3, size = 4, score = s"
WINDOW = "attend window(radius = 5) | global(first(3))"
NEAR = "heads 4 input near: pairs "
HALF = "head 0..1 { attend full score s + near(q, k) } head 2..3 { attend global(first(2)) }"

MORE = [
    # shards that are empty, or have a single position
    *(Shards(WINDOW, n, 4) for n in (1, 3, 5)),
    # rows that read nothing, anywhere or on some ranks alone
    Shards("attend rows(positions(3, 4, 30..31))", 40, 3),
    # heads of several graphs and tables
    Shards(
        "heads 4 head 0..1 { attend window(radius = 3) } head 2 { attend residue(step = 5) }"
        " head 3 { attend global(first(2)) }",
        40,
        4,
    ),
    Shards("heads 4 attend strided(stride = 7) score bias(buckets = 12)", 150, 4, shape="grouped"),
    # weights that can be merged beside weights that cannot
    Shards(
        "heads 4 head 0 { attend window(radius = 3) normalize relu } head 1..2 { attend full }"
        " head 3 { attend window(radius = 9) normalize softmax1 }",
        50,
        3,
    ),
    # sums over keys: alike, of several kinds, beside graphs, in frames, with gates
    *(
        Shards(f"{FOUR}attend {each}", n, ranks, partition, "left" if n > 130 else "grouped")
        for each, n, ranks, partition in (
            ("linear(feature = exp)", 139, 2, ""),
            ("favor(features = 5)", 130, 4, "uneven"),
            ("rfa(features = 4, floor = 0.5)", 130, 4, "uneven"),
            ("rfa(features = 4, gated = true, floor = 0.5)", 131, 4, ""),
            ("window(before = 9, after = 0) + favor(features = 9) score alibi()", 131, 4, ""),
            ("window(before = 3, after = 0) + rfa(features = 5)", 60, 3, ""),
        )
    ),
    Shards("heads 4 attend (window(radius = 5) | columns(last(3))) + taylor()", 90, 4, "uneven"),
    Shards(
        f"{FOUR}head 0..1 {{ attend linear(feature = elu1) }} head 2 {{ attend favor(features = 4)"
        " } head 3 { attend taylor(order = 1) }",
        133,
        3,
        shape="left",
    ),
    Shards(
        f"{FOUR}head 0 {{ attend window(radius = 5) score alibi() }} head 1 {{ attend linear() }}"
        " head 2 { attend window(radius = 2) } head 3 { attend window(radius = 3) + linear() }",
        130,
        4,
    ),
    # scores that read where a rank's positions stand, and what inputs say of them
    *(
        Shards(f"{WINDOW} score s + k / n + log(1 + q % 4 * k)", 65, 3, each)
        for each in ("contiguous", "head_tail")
    ),
    *(
        Shards(
            "input t: numbers input p: length attend window(radius = 9)"
            " score s - abs(t(q) - t(k)) / 9 + log(0.5 + (k < p))",
            65,
            4,
            each,
        )
        for each in ("contiguous", "uneven")
    ),
    # a number of each pair: own rows, beside graphs whose queries travel, and rows that all need
    *(
        Shards(f"{NEAR}{body}", 65, 4, partition, shape, dtype)
        for body, partition, shape, dtype in (
            (f"{WINDOW} score tanh(s) * near(q, k) score alibi()", "", "left", torch.float64),
            (f"causal {WINDOW} score s + near(q, k)", "uneven", "plain", torch.bfloat16),
            ("attend full score s + near(q, k) normalize sigmoid", "residue", "grouped", KIND),
            ("attend full score s + near(q, k) normalize softmax1", "head_tail", "grouped", KIND),
            (HALF, "contiguous", "grouped", KIND),
            ("attend topk(keys = 5) score s + near(q, k)", "", "grouped", KIND),
            ("attend topk(keys = 5, share = all) score s + near(q, k)", "uneven", "plain", KIND),
        )
    ),
    # what is learned of positions
    Shards("heads 4 attend linformer(rank = 3, max_length = 80, share = none)", 70, 3, "head_tail"),
    # what inputs choose, and what queries and keys decide
    Shards(f"{CHOSEN}attend chosen(x) & causal | window(radius = 2)", 157, 3, "head_tail", "left"),
    Shards(f"{CHOSEN}attend chosen(x) | rows(positions(3, 4)) normalize relu", 140, 4, "residue"),
    Shards(f"{CHOSEN}attend chosen(x) + linear()", 90, 2),
    Shards(f"{SCORED}, queries = 1, share = group, always = self)", 43, 3, shape="left"),
    Shards(
        f"{FOUR}head 0..1 {{ attend topk(keys = 4) | window(radius = 2) }}"
        " head 2..3 { attend lsh(buckets = 2, rounds = 2, chunk = 4) }",
        43,
        3,
        shape="left",
    ),
    # blocks and columns that are drawn over long shards
    Shards("attend random_blocks(size = 8, blocks = 2) | global(first(8))", 323, 2),
]


@pytest.mark.parametrize("shards", few(MORE, 3), ids=lambda each: f"{each.text[:50]} {each.n}")
def test_ways_of_rows_heads_and_sums(shards: Shards) -> None:
    assert differing(shards) == []


@pytest.mark.parametrize("body", ["attend full score alibi()", WINDOW, "attend topk(keys = 5)"])
def test_dropped_weights_are_the_same_in_gradients(body: str) -> None:
    shards = Shards(body, 37, 2)

    def call(rank: Rank) -> list[Tensor]:
        par = parallelize(shards.module(torch.float64), rank)
        torch.manual_seed(100 + rank.number)
        q, k, v = (par.shard(x.detach()).requires_grad_() for x in shards.tensors)
        out = par(q, k, v, dropout_p=0.3)
        weights = par.shard(numbers((*shards.tensors[0].shape[:3], v.shape[3]), 2))
        (grad,) = torch.autograd.grad((out * weights).sum(), v)
        # outputs are linear in values
        sums = torch.stack([(out * weights).sum().detach(), (grad * v).sum().detach()])
        return [sums, (out == 0).all(-1).double().mean()]

    (sums, empty), *others = in_turn(2, call)
    for more, other in others:
        sums, empty = sums + more, empty + other
    torch.testing.assert_close(sums[0], sums[1])
    assert empty < 1.8


def test_a_refusal_of_one_head_is_raised_on_every_rank() -> None:
    module = spec_of("heads 2 attend full head 1 { attend lsh(buckets = 4) }").compile()

    def call(rank: Rank) -> None:
        par = parallelize(module, rank)
        with pytest.raises(ValueError, match=r"queries as keys|rank 1 refused"):
            par(*(par.shard(numbers((1, 2, 40, 4), seed)) for seed in (3, 4, 5)))

    in_turn(2, call)


@pytest.mark.parametrize("body", [WINDOW, "causal attend full score alibi()", "attend linear()"])
def test_one_attention_takes_any_lengths_samples_types_and_gradients(body: str) -> None:
    module = spec_of(body).compile()
    calls = [(2, 37, "qkv"), (2, 42, "v"), (2, 1, "q"), (2, 0, ""), (0, 10, "k"), (2, 37, "")]

    def call(rank: Rank) -> list[list[Tensor]]:
        par = parallelize(module, rank)
        found = []
        for batch, n, names in calls:
            whole = [numbers((batch, 2, n, 4), seed) for seed in (3, 4, 5)]
            both = []
            for run_, share in ((par, par.shard), (module, lambda x: x)):
                leaves = [
                    share(x).requires_grad_(y in names) for x, y in zip(whole, "qkv", strict=True)
                ]
                with torch.set_grad_enabled(bool(names)):
                    out = run_(*leaves)
                wanted = [x for x in leaves if x.requires_grad]
                grads = torch.autograd.grad(out.sin().sum(), wanted) if names else ()
                both.append([out.detach(), *grads])
            found += [[par.unshard(x) for x in both[0]], both[1]]
        with torch.autocast("cpu", torch.bfloat16):
            q = numbers((1, 2, 40, 4), 1).float()
            found += [[par.unshard(par(*[par.shard(q)] * 3))], [module(q, q, q)]]
        return found

    found = in_turn(3, call)[0]
    for mine, meant in zip(found[::2], found[1::2], strict=True):
        for one, other in zip(mine, meant, strict=True):
            close = 1e-9 if one.dtype == torch.float64 else 2e-2
            torch.testing.assert_close(one, other, rtol=close, atol=close)


@pytest.mark.parametrize(
    "body",
    [
        "attend window(radius = 5) score bias(buckets = 12)",
        "attend linformer(rank = 3, max_length = 40, share = none)",
        "attend topk(keys = 5) score bias(buckets = 12)",
    ],
)
def test_layers_that_are_alike_have_learned_what_is_theirs(body: str) -> None:
    shards = Shards(f"layers 2 heads 2 {body}", 37, 2)
    module = shards.module(torch.float64)

    def call(rank: Rank) -> list[Tensor]:
        par, whole = parallelize(module, rank), shards.tensors
        here = [par(*map(par.shard, whole), layer=layer) for layer in (0, 1)]
        return [par.unshard(x) - module(*whole, layer=layer) for layer, x in enumerate(here)]

    for error in in_turn(2, call)[0]:
        assert error.abs().max() < 1e-9


@dataclass(frozen=True)
class Asked:
    """What one rank is called with."""

    spec: str = "layers 2 attend window(radius = 2)"
    batch: int = 2
    heads: int = 2
    key_heads: int = 2
    rows: int = 3
    size: int = 4
    values: int = 4
    kind: torch.dtype = torch.float64
    grad: str = ""
    padding: bool = False
    inputs: dict[str, Tensor] | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def of(self, rank: Rank) -> str:
        """What the rank says against it, or nothing."""
        attention = parallelize(spec_of(self.spec).compile(), rank)
        shapes = (self.heads, self.size), (self.key_heads, self.size), (self.key_heads, self.values)
        q, k, v = (
            torch.ones(self.batch, h, self.rows, d, dtype=self.kind, requires_grad=x in self.grad)
            for x, (h, d) in zip("qkv", shapes, strict=True)
        )
        real = torch.ones(self.batch, self.rows, dtype=torch.bool) if self.padding else None
        try:
            attention(q, k, v, key_padding_mask=real, inputs=self.inputs, **self.more)
        except ValueError as error:
            return str(error)
        return ""


def each_says(right: Asked, wrong: Asked) -> list[str]:
    """What each of four ranks says where the third is called otherwise than the others."""
    return in_turn(4, lambda rank: (wrong if rank.number == 2 else right).of(rank))


TOLD = "what is given, asked for and differentiated"


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("the spec", {"spec": "layers 2 attend window(radius = 3)"}),
        ("the batch", {"batch": 1}),
        ("the number of heads", {"heads": 4}),
        ("the number of key heads", {"key_heads": 1}),
        ("the size of heads", {"size": 5}),
        ("the size of values", {"values": 5}),
        ("the floating type", {"kind": torch.float32}),
        ("the layer", {"more": {"layer": 1}}),
        *((TOLD, {"grad": name}) for name in "qkv"),
        (TOLD, {"padding": True}),
        (TOLD, {"more": {"return_lse": True}}),
    ],
)
def test_all_ranks_say_in_what_their_calls_differ(what: str, change: dict[str, Any]) -> None:
    said = each_says(Asked(), Asked(**change))
    assert len(set(said)) == 1
    assert said[0].startswith(f"{what} must be the same on every rank, got [")


def test_dropout_is_the_same_and_what_is_drawn_is_not() -> None:
    torch.manual_seed(0)
    dropping = Asked(more={"dropout_p": 0.5})
    for said in each_says(dropping, dropping):
        assert "the random state must differ between ranks" in said

    def call(rank: Rank, chance: float) -> str:
        torch.manual_seed(rank.number)
        return Asked(more={"dropout_p": chance}).of(rank)

    assert in_turn(4, lambda rank: call(rank, 0.5)) == [""] * 4
    for said in in_turn(4, lambda rank: call(rank, 0.25 * (1 + rank.number % 2))):
        assert said.startswith("dropout_p must be the same on every rank")


def test_a_call_that_one_rank_refuses_fails_on_all_ranks() -> None:
    assert each_says(Asked(), Asked()) == [""] * 4
    for number, said in enumerate(each_says(Asked(), Asked(values=0))):
        assert ("at least 1" if number == 2 else "rank 2 refused its part of this call") in said
    # of the twelve positions of four ranks; those that compute a head look at its lists
    lists = [{"x": torch.full((1, 1, 3, 1), last)} for last in (11, 12)]
    right, wrong = (Asked("input x: choices attend chosen(x)", 1, inputs=each) for each in lists)
    assert each_says(right, right) == [""] * 4
    for number, said in enumerate(each_says(right, wrong)):
        assert (
            "`x` must hold indices of blocks" if number % 2 else "rank 1 refused its part"
        ) in said


def test_shards_of_other_lengths_and_sums_without_log_sum_exps_are_refused() -> None:
    for said in each_says(Asked(), Asked(rows=4)):
        assert "has the lengths [4, 4, 4, 1], got [3, 3, 4, 3]" in said
    # a number for each of the twelve keys of four ranks
    near = [torch.ones(2, heads, 3, keys) for heads, keys in ((2, 12), (1, 12), (2, 11))]
    right, shared, short = (
        Asked("input x: pairs attend full score s + x(q, k)", inputs={"x": x}) for x in near
    )
    assert each_says(right, right) == each_says(shared, shared) == [""] * 4
    for said in each_says(right, shared):
        assert said.startswith("the number of heads of the input `x` must be the same on every")
    for said in each_says(short, short):
        assert "`x` must have a number for each of the 12 keys, got [2, 2, 3, 11]" in said
    asked = Asked("causal attend linear()", rows=300, more={"return_lse": True})
    for said in each_says(asked, asked):
        assert "returns no log-sum-exps over several devices" in said


@pytest.mark.parametrize("after", ["forward", "nothing"])
def test_a_rank_that_ends_is_missed(after: str) -> None:
    module = spec_of(WINDOW).compile()

    def call(rank: Rank) -> str:
        attention = parallelize(module, rank, timeout=7)
        x = torch.ones(1, 1, 3, 4, requires_grad=True)
        if after == "nothing" and rank.number == 1:
            return "ended"
        try:
            out = attention(x, x, x)
            if rank.number == 1:
                return "ended"
            out.sum().backward()
        except LostRank as error:
            return str(error)
        return "none"

    said = in_turn(3, call)
    assert said[1] == "ended"
    for number in (0, 2):
        assert said[number] == (
            f"rank {number} of 3 waited for the others, at most 7 s: a rank has ended"
        )


def test_shards_that_are_wrong_are_found() -> None:
    shards = Shards(WINDOW, 37, 3)
    right = in_turn(3, shards.on)
    assert shards.differing(right) == []
    for at in range(5):
        whole = [x.clone() for x in right[0].whole]
        whole[at][0, 0, 7] += 1e-6
        assert shards.differing([right[0]._replace(whole=whole), *right[1:]])
    assert shards.differing([*right[:2], right[2]._replace(received=1)])


# torch loads much for the first DTensor in a process: two ranks of the four have them
NETWORK = [
    *(Shards(x, 40, 2, dtensor=True) for x in (WINDOW, f"{CHOSEN}attend chosen(x) & causal")),
    Shards(WINDOW, 1, 4),
    *(Shards(WINDOW, 37, 3, dtype=kind) for kind in (torch.bfloat16, torch.float16)),
    Shards("heads 4 attend window(radius = 9) score bias(buckets = 8)", 70, 4, "head_tail", "left"),
    Shards("heads 4 attend favor(features = 5)", 61, 4, shape="left"),
    Shards("heads 4 attend linformer(rank = 3, max_length = 80)", 30, 4),
    Shards("attend topk(keys = 5, share = all)", 41, 4),
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[Found]], list[Any]]:
    """What one start of four processes says."""
    return run(NETWORK, tmp_path_factory.mktemp("ranks"))


def test_processes_together_compute_what_one_does(
    ran: tuple[list[list[Found]], list[Any]], request: pytest.FixtureRequest
) -> None:
    # groups are a suffix of the names, which not every pytest lets be changed
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@ranks")
    for shards in NETWORK:
        each = [found.pop(0) for found in ran[0][: shards.ranks]]
        assert shards.differing(each) == [], shards
    assert not any(ran[0])


def test_every_process_says_what_is_wrong(ran: tuple[list[list[Found]], list[Any]]) -> None:
    assert [bool(each) for each in ran[1]] == [True, False, True, True]
    for rank in (0, 2, 3):
        fine, spec, hung, behind, lost = ran[1][rank]
        assert fine == ["none", ""]
        assert spec[0] == "ValueError"
        assert "the spec must be the same on every rank" in spec[1]
        # one that lives and sleeps until all others have told
        assert hung[0] == ("told" if rank == 2 else "LostRank"), hung
        assert behind[0] == lost[0] == "LostRank"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_lengths_axes_and_tensors_that_do_not_fit_are_refused(alone: DeviceMesh) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    attention = parallelize(spec_of(WINDOW).compile(), alone)
    x: Any = torch.randn(1, 1, 6, 2)
    for dim in (2, -2):
        assert torch.equal(attention.unshard(attention.shard(x, dim), dim), x)
    wrong: Any
    for wrong, kind in ((-1, ValueError), ("3", TypeError)):
        with pytest.raises(kind, match="must be"):
            attention.plan(wrong)
    for whole_or_part in (attention.shard, attention.unshard):
        with pytest.raises(ValueError, match=r"dim must be an axis of .*\[1, 1, 6, 2\], got 9"):
            whole_or_part(x, 9)
        with pytest.raises(TypeError, match="a tensor is needed, got list"):
            whole_or_part([1])  # type: ignore[arg-type]
    right = DTensor.from_local(x, alone, [Shard(2)])
    assert torch.equal(attention(right, right, right).to_local(), attention(x, x, x))
    for each in (x, *(DTensor.from_local(x, alone, [way]) for way in (Replicate(), Shard(1)))):
        with pytest.raises(ValueError, match=r"on this mesh and placed by Shard\(2\)"):
            attention(right, each, right)


def test_a_layer_turns_positions_as_the_whole_sequence_has_them(alone: DeviceMesh) -> None:
    turned = Partition("turned", 7, (((4, 7), (0, 4)),))
    spec = spec_of("causal attend window(before = 2, after = 0)")

    def rotary(q: Tensor, k: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        angle = at[:, None] / 3.0
        return q * angle.cos(), k * angle.cos()

    layer: Any = attnspec.SelfAttention(spec, 8, 2, rotary=rotary)
    x = torch.randn(2, 7, 8)
    whole = layer(x)
    layer.attention = par = parallelize(layer.attention, alone, partition=turned)
    shard = par.shard(x, dim=1)
    assert torch.equal(shard, x[:, [4, 5, 6, 0, 1, 2, 3]])
    torch.testing.assert_close(par.unshard(layer(shard), dim=1), whole)


def test_parallelize_refuses_other_modules_and_partitions(alone: DeviceMesh) -> None:
    wrong: Any
    spec = spec_of("extra_tokens 2 attend window(radius = 2)")
    layer: Any = attnspec.SelfAttention(spec, 8, 2)
    for wrong in (spec, layer):
        with pytest.raises(TypeError, match=r"`spec.compile\(\)` returns.*`layer\.attention`"):
            parallelize(wrong, alone)
    wrong = "contiguous"
    with pytest.raises(TypeError, match="partition must be that of a plan"):
        parallelize(layer.attention, alone, partition=wrong)
    two = cut("contiguous", 4, 2)
    with pytest.raises(ValueError, match="the partition is for 2 ranks, and the mesh has 1"):
        parallelize(layer.attention, alone, partition=two)
    both: Any = attnspec.MultiheadAttention(8, 2, spec=spec_of(WINDOW), batch_first=True)
    x = torch.randn(1, 6, 8)
    whole, _ = both(x, x, x, need_weights=False)
    both.attention = parallelize(both.attention, alone)
    torch.testing.assert_close(both(x, x, x, need_weights=False)[0], whole)
    for more in ({}, {"need_weights": False, "attn_mask": torch.zeros(6, 6, dtype=torch.bool)}):
        with pytest.raises(ValueError, match="a rank has a shard of the sequence"):
            both(x, x, x, **more)
    layer.attention = parallelize(layer.attention, alone)
    with pytest.raises(ValueError, match="has extra tokens before the whole"):
        layer(torch.randn(1, 6, 8))


def test_inputs_at_padding_and_promises_are_checked_as_in_one_process(alone: DeviceMesh) -> None:
    # numbers at padding are never read
    module = spec_of("input t: numbers attend where(6 / t(k) >= 3) | self").compile()
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    given: Any = {
        "key_padding_mask": torch.tensor([[True, True, True, False, True]]),
        "inputs": {"t": torch.tensor([[1, 2, 3, 0, 6]])},
    }
    torch.testing.assert_close(
        parallelize(module, alone)(x, x, x, **given), module(x, x, x, **given)
    )
    promising = spec_of("input t: tokens(at_most = 1) attend columns(t) | self").compile()
    marked = torch.tensor([[True, True, False, False, False]])
    with pytest.raises(ValueError, match="may mark at most 1"):
        parallelize(promising, alone)(x, x, x, inputs={"t": marked})
    wrong = x.index_fill(2, torch.tensor(3), torch.inf)
    for graph in ("window(radius = 1)", "full", "linear()", "topk(keys = 2)"):
        attention = parallelize(spec_of(f"attend {graph}").compile(check_finite=True), alone)
        assert attention(x, x, x).isfinite().all()
        with pytest.raises(ValueError, match="v must be finite, got inf at sample 0, head 0, pos"):
            attention(x, x, wrong)
