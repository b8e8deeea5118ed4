"""Cases of a sequence over ranks: partitions, ways, types, modes, the zoo, random compositions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

from local_ranks import Case
from random_specs import spec_text
from zoo import ATTENTIONS, EXAMPLES, SMALLER, smaller

WINDOW = "attention a { attend window(radius = 5) | global(first(3)) }"
SOME = 4


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
    cases = in_turns(partitioned(), 0)
    cases += [Case(n, 4, WINDOW) for n in (0, 1, 3, 5)]
    for text in (WINDOW, "attention a { input d: ids causal attend same(d) }"):
        cases += [Case(n, 3, text, batch=0, padding=True, lse=True) for n in (0, 2, 10)]
    cases += [Case(300, 2, WINDOW, heads=2, padding=True)]
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
    mixed = (
        "attention a { heads 4 head 0..2 { attend topk(keys = 5) }"
        " head 3 { attend window(radius = 3) } normalize softmax1 }"
    )
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
        # log-sum-exps go the way of outputs
        *(Case(43, ranks, mixed, lse=True, padding=ranks == 3) for ranks in (2, 3, 4)),
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
    cases += [Case(133, 3, both, padding=True)]
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
        Case(90, 2, heads + "attend chosen(x) & causal }", lists=4, grad="v"),
        Case(90, 3, plain, lists=1, kind="bfloat16", within=4 * HALVES["bfloat16"]),
        Case(90, 2, SELECTED + "attend chosen(x) + linear() }", lists=2),
    ]


def over_a_network() -> list[Case]:
    """Each way once, tensors of each kind, and what alone processes of their own can have."""
    decided = "attention a { attend topk(keys = 5) }"
    beside = "attention a { attend window(radius = 3) + linear(feature = relu) }"
    summed = "attention a { attend favor(features = 5) }"
    mixed = (
        "attention a { causal heads 4 head 0 { attend window(radius = 5) score alibi() }"
        " head 1..3 { attend linear(feature = elu1) } }"
    )
    tables = "attention a { attend window(radius = 9) score bias(buckets = 8, max_distance = 16) }"
    # torch loads much for the first DTensor in a process: two ranks of the four have them
    placed = (WINDOW, beside, summed, SELECTED + "attend chosen(x) & causal }")
    return [
        *(Case(40, 2, text, dtensor=True, lists=2 * ("x:" in text)) for text in placed),
        *(Case(n, 4, WINDOW, lse=True, padding=True) for n in (0, 1, 37)),
        *(Case(37, 3, WINDOW, kind=kind, within=4 * apart) for kind, apart in HALVES.items()),
        *(Case(37, 3, text, dropout=0.3, padding=True) for text in (WINDOW, decided)),
        Case(70, 4, tables.replace("{", "{ heads 4", 1), partition="head_tail", padding=True),
        Case(70, 4, summed, padding=True, more=[5]),
        Case(130, 4, mixed, padding=True),
        Case(60, 4, beside, partition="head_tail"),
        Case(153, 3, SELECTED + "attend chosen(x) }", lists=2),
        Case(41, 4, "attention a { attend topk(keys = 5, share = all) }", lse=True),
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


def at_random(seed: int) -> Case:
    """A random composition."""
    part = ("", "", "head_tail", "residue 4")[seed % 4]
    ranks = 4 if part == "residue 4" else 2 + seed % 3
    return Case(33 + seed % 20, ranks, spec_text(seed), heads=2, partition=part)


HERE = (*by_hand(), *of_zoo()[::12], *map(at_random, range(SOME)))
"""Cases of ranks within one process."""

NETWORK = over_a_network()
"""Cases of ranks in processes of their own."""


def check(said: list[list[dict[str, Any]]], cases: Sequence[Case]) -> None:
    for rank, answers in enumerate(said):
        assert len(answers) == sum(rank < case.ranks for case in cases), answers[-1:]
        for answer in answers:
            assert "error" not in answer, answer["trace"]
            assert answer["received"] == answer["planned"], answer
    for answer in said[0]:
        assert max(answer["apart"]) <= answer["within"], answer
