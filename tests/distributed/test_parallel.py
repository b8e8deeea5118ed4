"""A sequence over local processes is what one computes: values, gradients, bytes, errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_ranks import Case, drawn_lists, run
from random_specs import spec_text
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from zoo import ATTENTIONS, EXAMPLES, SMALLER, smaller

import attnspec
from attnspec.distributed.partitions import Partition, contiguous
from attnspec.distributed.ranks import parallel
from attnspec.distributed.ranks.collectives import Mesh
from attnspec.distributed.ranks.parallel import parallelize
from attnspec.distributed.ranks.regions import Region

# the processes that the tests share start once
pytestmark = pytest.mark.xdist_group("ranks")

WINDOW = "attention a { attend window(radius = 5) | global(first(3)) }"
SOME = 4
MANY = 200


def in_turns(every: Sequence[Sequence[Case]], turn: int) -> list[Case]:
    """Of a table of cases the fields of one colour of a chessboard."""
    return [
        case
        for row, cases in enumerate(every)
        for column, case in enumerate(cases)
        if (row + column) % 2 == turn
    ]


def partitioned() -> list[list[Case]]:
    """Each number of ranks with each partition."""
    return [
        [
            Case(37, ranks, WINDOW, partition=part, lse=True, padding=ranks == 3)
            for part in ("", "head_tail", f"residue {ranks}")
        ]
        for ranks in (2, 3, 4)
    ]


def by_hand() -> list[Case]:
    """Lengths that do not divide, empty shards, each partition, each kind of call."""
    # torch loads much for the first DTensor in a process: two ranks of the four have them
    cases = in_turns(partitioned(), 0)
    cases += [Case(n, 4, WINDOW) for n in (0, 1, 3, 5)]
    for text in (WINDOW, "attention a { input d: ids causal attend same(d) }"):
        cases += [Case(n, 3, text, batch=0, padding=True, lse=True) for n in (0, 2, 10)]
    cases += [Case(40, 2, WINDOW, dtensor=True), Case(300, 2, WINDOW, heads=2, padding=True)]
    texts = (
        # rows that read nothing, anywhere or on some ranks alone
        "attention a { attend rows(positions(3, 4, 30..31)) }",
        "attention a { causal attend full score alibi() }",
        "attention a { heads 4 attend window(radius = 9)"
        " score bias(buckets = 8, max_distance = 16) }",
        "attention a { attend window(radius = 9) | global(first(1)) score softcap(cap = 3) }",
        "attention a { attend window(radius = 9) | global(last(2)) normalize softmax1 }",
        "attention a { attend window(radius = 9) | columns(first(2)) normalize relu }",
        "attention a { attend window(radius = 9) normalize sigmoid }",
        "attention a { causal attend linear(feature = elu1) }",
        "attention a { attend linear(feature = elu1) }",
        "attention a { attend topk(keys = 5) }",
        "attention a { heads 4 head 0..1 { attend window(radius = 3) }"
        " head 2 { attend residue(step = 5) } head 3 { attend global(first(2)) } }",
    )
    return [
        *cases,
        *(Case(40, ranks, text) for text, ranks in zip(texts, cycle((3, 4)), strict=False)),
        *in_turns(summed(), 0),
        *sums_over_keys(),
        *in_turns(of_types(), 0),
        *of_gradients(),
        *of_modes(),
        *of_choices(),
        *beside_mechanisms(),
        *decided_by_heads(),
        # random blocks and columns of shards that are longer than `SHORT`
        Case(551, 2, file=str(EXAMPLES / "bigbird.attn"), settings={"block": 8}, batch=1),
        Case(800, 3, file=str(EXAMPLES / "openai_fixed.attn"), name="openai_fixed", batch=1),
    ]


def beside_mechanisms() -> list[Case]:
    """Graphs beside sums of features: keys that travel and the sums over all others, with shards
    that are empty, have one position, or all of whose keys travel."""
    every = "attention a {{ {} }}"
    cases = [
        Case(130, 4, "causal attend window(radius = 5) + linear(feature = exp)", padding=True),
        Case(131, 3, "attend (window(radius = 5) | global(first(2))) + taylor()", padding=True),
        Case(99, 3, "attend residue(step = 7) + favor(features = 9)", partition="head_tail"),
        Case(131, 4, "causal attend window(radius = 9) + favor(features = 9) score alibi()"),
        Case(90, 2, "attend (window(radius = 9) | columns(last(3))) + rbf(features = 5)"),
        Case(60, 3, "layers 2 causal heads 4 attend window(radius = 3) + rfa(features = 5)"),
        Case(70, 3, "attend block(size = 30) + linear(feature = elu1)", kind="bfloat16"),
        Case(70, 2, "attend window(radius = 3) + linear(feature = relu)", dtensor=True),
    ]
    cases[0].more, cases[3].partition, cases[5].layer = [3, 0, 1], "uneven", 1
    cases[6].within = 8 * HALVES["bfloat16"]
    for case in cases:
        case.text = every.format(case.text)
    mixed = (
        "attention a { causal heads 4 head 0..1 { attend window(radius = 3) + linear() } head 2"
        " { attend window(radius = 5) score alibi() } head 3 { attend linear() } }"
    )
    return [*cases, Case(300, 4, mixed)]


def decided_by_heads() -> list[Case]:
    """What queries and keys decide goes by heads where these decide by themselves."""
    several = (
        "attention a { causal heads 4 head 0..1 { attend topk(keys = 4) | window(radius = 2) }"
        " head 2..3 { attend lsh(buckets = 2, rounds = 2, chunk = 4, seed = 0) } }"
    )
    together = "attention a { attend topk(keys = 5, share = all) }"
    plain = "attention a { attend topk(keys = 5) score alibi() }"
    scored = "attention a { causal input s: scores(size = 4) attend topk(blocks = 3, size = 4,"
    group = " queries = 1, score = s, share = group, always = self) }"
    return [
        *(
            Case(43, ranks, scored + rest, heads=8, key_heads=4, lists=lists, padding=lists == 8)
            for ranks, lists, rest in ((3, 4, group), (2, 8, ") }"), (4, 1, group))
        ),
        Case(43, 3, several, padding=True, more=[2, 0]),
        Case(41, 4, together, lse=True),
        Case(37, 2, plain, heads=8, grad="q"),
        Case(30, 4, "attention a { causal attend topk(keys = 3) + linear() }"),
    ]


HALVES = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""How far numbers of a type are apart, near 1."""


WAYS = (
    (37, 4, WINDOW),
    (40, 2, "attention a { causal attend full score alibi() }"),
    (70, 3, "attention a { attend linear(feature = elu1) }"),
)
"""By rows, with everything and by states."""


def of_types() -> list[list[Case]]:
    """Half types, autocast, and a second and third length of one attention, each way."""
    return [
        [
            # a sum over keys or ranks is rounded a few times
            *(Case(*of, kind=kind, within=4 * apart) for kind, apart in HALVES.items()),
            Case(*of, kind="float32", autocast=True, within=2.0**-6),
            Case(*of, more=[of[0] + 5, 1, 0, of[0], 2]),
        ]
        for of in WAYS
    ]


def of_gradients() -> list[Case]:
    """Gradients of some tensors alone and of none, each way."""
    return [Case(*of, grad=grad) for of in WAYS for grad in ("", "q", "v")]


def of_modes() -> list[Case]:
    """Dropout, and what queries and keys decide, by heads and with everything."""
    whole = "attention a { causal attend full score alibi() }"
    decided = "attention a { attend topk(keys = 5) }"
    cases = [Case(37, 2, text, dropout=0.3) for text in (WINDOW, whole)]
    cases += [Case(37, 3, decided, dropout=0.3), Case(37, 3, decided, grad="", more=[4])]
    return cases


SUMS = (
    "linear(feature = elu1)",
    "linear(feature = exp)",
    "linear(feature = identity, normalize = none)",
    "taylor(order = 1)",
    "taylor(order = 2)",
    "favor(features = 5)",
    "favor(features = 9, kind = hyperbolic)",
    "rbf(features = 5)",
    "rfa(features = 4)",
)
"""Mechanisms whose sums over keys are fewer bytes than the positions of a few heads."""


def summed() -> list[list[Case]]:
    """Each of `SUMS` over all keys and over those before, with padding and without, longer than a
    chunk of 64, with shards that are empty or have one position, and partitions in which sums of
    all keys alone can be merged."""
    ways = cycle([(161, 2, "", True), (99, 3, "", False), (130, 4, "uneven", True)])
    return [
        [
            Case(n, ranks, f"attention a {{ {causal}attend {each} }}", partition=part, padding=real)
            for causal, (n, ranks, part, real) in zip(("", "causal "), ways, strict=False)
        ]
        for each in SUMS
    ]


def sums_over_keys() -> list[Case]:
    """Heads that sum in several ways, and sums that tables or gates go into."""
    cases = []
    both = (
        "attention a { causal heads 4 head 0..1 { attend linear(feature = elu1) }"
        " head 2 { attend favor(features = 4) } head 3 { attend taylor(order = 1) } }"
    )
    plain = "attention a { attend favor(features = 5) }"
    # a floor under sums that may cancel, so that they are as exact as others
    gated = "attention a { causal attend rfa(features = 4, gated = true, floor = 0.5) }"
    cases += [Case(133, 3, both, padding=True), Case(40, 2, plain, dtensor=True)]
    cases += [Case(80, 4, text, partition="head_tail") for text in (plain, both)]
    mixed = (
        "attention a { causal heads 4 head 0 { attend window(radius = 5) score alibi() }"
        " head 1 { attend linear(feature = elu1) } head 2 { attend window(radius = 2) }"
        " head 3 { attend window(radius = 3) + linear() } }"
    )
    cases += [Case(130, ranks, mixed, padding=ranks == 4, more=[3, 0]) for ranks in (2, 4)]
    for ranks, rest in ((2, ""), (3, ", share = none"), (4, ", share = head")):
        text = f"attention a {{ heads 4 attend linformer(rank = 3, max_length = 80{rest}) }}"
        if ranks == 3:
            cases.append(Case(70, ranks, text, partition="head_tail", padding=True))
        else:
            cases.append(Case(70, ranks, text, more=[5]))
    cases += [Case(80, 3, gated), Case(131, 4, gated, padding=True, more=[2, 0])]
    return [*cases, Case(80, 4, gated, partition="head_tail")]


SELECTED = "attention a { input x: choices(size = 4) "
ONCE = [
    Case(151, 2, SELECTED + "attend chosen(x) }", lists=2),
    Case(153, 3, SELECTED + "causal attend chosen(x) }", lists=4),
    Case(155, 3, SELECTED + "attend chosen(x) | window(radius = 20) }", lists=1),
]
"""Lists of few keys, of each key head, of each query head and of all."""


def of_choices() -> list[Case]:
    """Keys that inputs list, alone and beside other graphs, of which few or most are read."""
    plain = SELECTED + "attend chosen(x) }"
    heads = SELECTED + "heads 4 "
    several = (
        "attention a { heads 4 input x: choices(size = 3) input y: choices input t: tokens attend"
        " (chosen(x) & window(radius = 9)) | chosen(y) | columns(t) & window(radius = 6)"
        " score bias(buckets = 8, max_distance = 16) }"
    )
    beside = SELECTED + "attend chosen(x) & causal | window(radius = 2) normalize softmax1 }"
    apart = heads + "head 0..2 { attend chosen(x) } head 3 { attend window(radius = 3) } }"
    summed = SELECTED + "attend chosen(x) | rows(positions(3, 4)) normalize relu score alibi() }"
    return [
        *ONCE,
        # lists of all blocks: most of everything is read, and sent unasked
        Case(45, 3, plain, padding=True),
        Case(157, 4, plain, lists=2, padding=True, lse=True, more=[0, 1, 3, 5]),
        Case(157, 3, beside, lists=1, padding=True, partition="head_tail"),
        Case(140, 4, several, lists=4, padding=True),
        Case(140, 4, summed, lists=2, partition="residue 4"),
        Case(140, 4, apart, lists=4, partition="uneven"),
        Case(90, 2, heads + "attend chosen(x) | self }", lists=4, grad="", more=[9]),
        Case(90, 2, heads + "attend chosen(x) & causal }", lists=4, grad="v", dtensor=True),
        Case(90, 3, plain, lists=1, kind="bfloat16", within=4 * HALVES["bfloat16"]),
        Case(90, 2, SELECTED + "attend chosen(x) + linear() }", lists=2),
    ]


def of_zoo() -> list[Case]:
    """Every attention that ships within one sequence, at a small length."""
    cases = []
    for (path, name), ranks in zip(ATTENTIONS, cycle((2, 3, 4)), strict=False):
        program = smaller(path, name).program
        if program.cross:
            continue
        n = program.fixed_length or 45
        cases.append(Case(n, ranks, file=str(path), name=name, settings=SMALLER.get(path.stem, {})))
    return cases


def at_random(seeds: range) -> list[Case]:
    """Random compositions."""
    partitions = cycle(("", "", "head_tail", "residue 4"))
    return [
        Case(
            33 + seed % 20,
            2 + seed % 3 if part != "residue 4" else 4,
            spec_text(seed),
            heads=2,
            partition=part,
        )
        for seed, part in zip(seeds, partitions, strict=False)
    ]


def check(said: list[list[dict[str, Any]]], cases: Sequence[Case]) -> None:
    for rank, answers in enumerate(said):
        assert len(answers) == sum(rank < case.ranks for case in cases), answers[-1:]
        for answer in answers:
            assert "error" not in answer, answer["trace"]
            if "choices" in answer["how"]:
                both = zip(answer["received"], answer["planned"], strict=True)
                assert all(came <= most for came, most in both), answer
            else:
                assert answer["received"] == answer["planned"], answer
    for answer in said[0]:
        assert max(answer["apart"]) <= answer["within"], answer


CASES = (*by_hand(), *of_zoo()[::12], *at_random(range(SOME)))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[Any]], list[list[Any]]]:
    """What one start of four processes says."""
    return run(CASES, tmp_path_factory.mktemp("ranks"))


def test_one_worker_runs_what_shares_processes(request: pytest.FixtureRequest) -> None:
    # groups are a suffix of the names, which not every pytest lets be changed
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@ranks")


def test_ranks_together_compute_what_one_process_does(
    ran: tuple[list[list[Any]], list[list[Any]]],
) -> None:
    said, _ = ran
    check(said, CASES)
    ways = {how for answer in said[0] for how in answer["how"]}
    assert ways == {"rows", "states", "both", "heads", "all", "mixed", "choices"}


@pytest.mark.parametrize("case", ONCE, ids=("key heads", "causal", "beside"))
def test_a_chosen_row_travels_once(
    ran: tuple[list[list[Any]], list[list[Any]]], case: Case
) -> None:
    said, _ = ran
    lists = drawn_lists(attnspec.parse(case.text), case.n, case.lists)["x"]
    own = [set(contiguous(case.n, case.ranks).positions(r).tolist()) for r in range(case.ranks)]
    asked = [[0] * case.ranks for _ in own]
    heads = range(case.lists)
    for sample, key_head in product(range(2), range(case.key_heads)):
        each = [h for h in heads if h * case.key_heads // case.lists == key_head] or [0]
        for reader, mine in enumerate(own):
            blocks = {int(x) for q in mine for h in each for x in lists[sample, h, q] if x >= 0}
            keys = {key for block in blocks for key in range(4 * block, min(case.n, 4 * block + 4))}
            if "causal" in case.text:
                keys = {key for key in keys if key <= max(mine)}
            if "window" in case.text:
                keys |= set(range(min(mine) - 20, max(mine) + 21))
            for owner, theirs in enumerate(own):
                asked[reader][owner] += len(keys & theirs) if owner != reader else 0
    row, number = 2 * 6 * 8, 8
    for rank in range(case.ranks):
        (answer,) = (each for each in said[rank] if each["case"] == case.label)
        came, gave = sum(asked[rank]), sum(each[rank] for each in asked)
        assert answer["received"] == [came * row + gave * number]
        assert came + gave


@pytest.mark.slow
def test_the_other_ways_over_ranks(tmp_path: Path) -> None:
    cases = [case for every in (partitioned, of_types, summed) for case in in_turns(every(), 1)]
    check(run(cases, tmp_path)[0], cases)


@pytest.mark.slow
def test_the_whole_zoo_over_ranks(tmp_path: Path) -> None:
    cases = of_zoo()
    check(run(cases, tmp_path)[0], cases)


@pytest.mark.slow
def test_random_compositions_over_ranks(tmp_path: Path) -> None:
    cases = at_random(range(SOME, SOME + MANY))
    check(run(cases, tmp_path)[0], cases)


def test_every_rank_says_what_is_wrong(ran: tuple[list[list[Any]], list[list[Any]]]) -> None:
    _, said = ran
    assert [bool(each) for each in said] == [True, False, True, True]
    for rank in (0, 2, 3):
        fine, spec, length, shapes, graded, listed, alike, summed, *rest = said[rank]
        hung, behind, lost = rest
        assert fine == ["none", ""]
        assert spec[0] == "ValueError"
        assert "the spec must be the same on every rank" in spec[1]
        assert length[0] == "ValueError"
        assert "has the lengths [4, 4, 4, 1], got [3, 4, 3, 3]" in length[1]
        assert shapes[0] == "ValueError"
        own = "at least 1" if rank == 3 else "rank 3 refused its part"
        assert own in shapes[1]
        assert graded[0] == "ValueError"
        assert "differentiated must be the same on every rank" in graded[1]
        assert listed[0] == "ValueError"
        assert ("`x` must name key blocks" if rank == 2 else "rank 2 refused its part") in listed[1]
        assert alike[0] == "ValueError"
        assert "random states must be others on every rank" in alike[1]
        assert summed[0] == "ValueError"
        assert "come without log-sum-exps over several devices" in summed[1]
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
    attention = parallelize(attnspec.parse(WINDOW).compile(), alone)
    x: Any = torch.randn(1, 1, 6, 2)
    for dim in (2, -2):
        assert torch.equal(attention.unshard(attention.shard(x, dim), dim), x)
    wrong: Any
    for wrong, error, words in (
        (-1, ValueError, "n must be between 0 and"),
        ("3", TypeError, "`?n`? must be an integer"),
    ):
        with pytest.raises(error, match=words):
            attention.plan(wrong)
    for cut in (attention.shard, attention.unshard):
        with pytest.raises(ValueError, match=r"dim must be an axis of .*\[1, 1, 6, 2\], got 9"):
            cut(x, 9)
        with pytest.raises(TypeError, match="a tensor is needed, got list"):
            cut([1])  # type: ignore[arg-type]


def test_tensors_over_devices_that_are_not_cut_along_positions_are_refused(
    alone: DeviceMesh,
) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    attention = parallelize(attnspec.parse(WINDOW).compile(), alone)
    x: Any = torch.randn(1, 1, 6, 2)
    right = DTensor.from_local(x, alone, [Shard(2)])
    assert torch.equal(attention(right, right, right).to_local(), attention(x, x, x))
    for each in (x, *(DTensor.from_local(x, alone, [way]) for way in (Replicate(), Shard(1)))):
        with pytest.raises(ValueError, match=r"on this mesh and placed by Shard\(2\)"):
            attention(right, each, right)


def test_own_keys_are_weighed_while_rows_travel_and_a_plan_is_compared_once(
    alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[str] = []

    def noting(owner: Any, name: str, word: str) -> None:
        whole = getattr(owner, name)

        def called(*args: Any, **more: Any) -> Any:
            noted.append(word)
            return whole(*args, **more)

        monkeypatch.setattr(owner, name, called)

    noting(Mesh, "swap", "send")
    noting(Mesh, "finish", "wait")
    noting(Region, "partial", "weigh")
    noting(parallel, "plan", "plan")
    attention = parallelize(attnspec.parse(WINDOW).compile(), alone)
    x = torch.randn(1, 2, 9, 4)
    calls = []
    for _ in range(2):
        noted.clear()
        attention(x, x, x)
        calls.append(noted.copy())
    rows, answers = ["send", "weigh", "wait"], ["send", "wait"]
    said, partition, planned = ["send", "wait"], ["plan"], ["plan"]
    # what ranks say of the call, and once what they planned
    assert calls[0] == [*said, *partition, *planned, *said, *rows, *answers]
    assert calls[1] == [*said, *rows, *answers]


def test_a_layer_turns_positions_as_the_whole_sequence_has_them(alone: DeviceMesh) -> None:
    turned = Partition("turned", 7, (((4, 7), (0, 4)),))
    spec = attnspec.parse("attention a { causal attend window(before = 2, after = 0) }")

    def rotary(
        q: torch.Tensor, k: torch.Tensor, at: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        angle = at[:, None] / 3.0
        return q * angle.cos(), k * angle.cos()

    layer: Any = attnspec.SelfAttention(spec, 8, 2, rotary=rotary)
    x = torch.randn(2, 7, 8)
    whole = layer(x)
    layer.attention = run = parallelize(layer.attention, alone, partition=turned)
    shard = run.shard(x, dim=1)
    assert torch.equal(shard, x[:, [4, 5, 6, 0, 1, 2, 3]])
    torch.testing.assert_close(run.unshard(layer(shard), dim=1), whole)


def test_what_is_no_module_or_partition_is_refused(alone: DeviceMesh) -> None:
    wrong: Any
    spec = attnspec.parse("attention a { extra_tokens 2 attend window(radius = 2) }")
    layer: Any = attnspec.SelfAttention(spec, 8, 2)
    for wrong in (spec, layer):
        with pytest.raises(TypeError, match=r"`spec.compile\(\)`, got .*`layer.attention`"):
            parallelize(wrong, alone)
    wrong = "contiguous"
    with pytest.raises(TypeError, match="partition must be that of a plan"):
        parallelize(layer.attention, alone, partition=wrong)
    two = Partition("two", 4, (((0, 2),), ((2, 4),)))
    with pytest.raises(ValueError, match="the partition is one of 2 ranks, the mesh has 1"):
        parallelize(layer.attention, alone, partition=two)
    both: Any = attnspec.MultiheadAttention(8, 2, spec=attnspec.parse(WINDOW), batch_first=True)
    x = torch.randn(1, 6, 8)
    whole, _ = both(x, x, x, need_weights=False)
    both.attention = parallelize(both.attention, alone)
    torch.testing.assert_close(both(x, x, x, need_weights=False)[0], whole)
    for more in ({}, {"need_weights": False, "attn_mask": torch.zeros(6, 6, dtype=torch.bool)}):
        with pytest.raises(ValueError, match="a rank has a shard of the sequence"):
            both(x, x, x, **more)
    layer.attention = parallelize(layer.attention, alone)
    with pytest.raises(ValueError, match="has extra tokens, which stand before the whole"):
        layer(torch.randn(1, 6, 8))


def test_numbers_at_padding_are_never_read(alone: DeviceMesh) -> None:
    text = "attention a { input t: numbers attend where(6 / t(k) >= 3) | self }"
    module = attnspec.parse(text).compile()
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    given: Any = {
        "key_padding_mask": torch.tensor([[True, True, True, False, True]]),
        "inputs": {"t": torch.tensor([[1, 2, 3, 0, 6]])},
    }
    found = parallelize(module, alone)(x, x, x, **given)
    assert (found - module(x, x, x, **given)).abs().max() < 1e-12


def test_inputs_keep_their_promise(alone: DeviceMesh) -> None:
    text = "attention a { input t: tokens(at_most = 1) attend columns(t) | self }"
    attention = parallelize(attnspec.parse(text).compile(), alone)
    x = torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match="promises at most 1"):
        attention(x, x, x, inputs={"t": torch.tensor([[True, True, False, False, False]])})


@pytest.mark.parametrize("graph", ["window(radius = 1)", "full", "linear()", "topk(keys = 2)"])
def test_numbers_are_looked_at_if_that_is_asked_for(alone: DeviceMesh, graph: str) -> None:
    module = attnspec.parse(f"attention a {{ attend {graph} }}").compile(check_finite=True)
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    wrong = x.index_fill(2, torch.tensor(3), torch.inf)
    attention = parallelize(module, alone)
    assert (attention(x, x, x) - module(x, x, x)).abs().max() < 1e-12
    with pytest.raises(ValueError, match="v must be finite, got inf at sample 0, head 0, posit"):
        attention(x, x, wrong)
