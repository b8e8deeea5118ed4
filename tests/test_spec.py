"""A spec in Python: its text, its identity, its pairs, and what it refuses."""

from __future__ import annotations

import copy
import os
import pickle
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import networkx
import numpy as np
import pytest
import scipy.sparse
import torch
import zoo
from click.testing import CliRunner

import attnspec
from attnspec.cli import main
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.relation import DataDependent
from attnspec.ir.program import leaves
from attnspec.limits import LIMITS
from attnspec.spec import Spec, load, parse
from attnspec.text.diagnostics import AttnSpecError, SpecError

EVERY = pytest.mark.parametrize(("path", "name"), zoo.ATTENTIONS, ids=zoo.IDS)


def has_pairs(spec: Spec, layer: int, head: int) -> bool:
    """Whether the pairs of a head are known before a module runs."""
    graph = spec.program.attend(layer, head).graph
    return graph is not None and not any(
        issubclass(pattern := BY_NAME[leaf.pattern], DataDependent) and not pattern.by_inputs
        for leaf in leaves(graph)
    )


def slots(spec: Spec) -> list[tuple[int, int]]:
    """The first layer and head that have each of the spec's meanings."""
    found: dict[int, tuple[int, int]] = {}
    for layer, row in enumerate(spec.program.slots):
        for head, attend in enumerate(row):
            found.setdefault(attend, (layer, head))
    return list(found.values())


# --- text --------------------------------------------------------------------------------------


@EVERY
def test_the_source_says_the_same(path: Path, name: str) -> None:
    spec = zoo.loaded(path, name)
    again = parse(spec.source)
    assert again == spec
    assert again.source == spec.source
    assert again.fingerprint == spec.fingerprint
    assert again.parameters == spec.parameters
    assert (again.name, again.layers, again.heads) == (spec.name, spec.layers, spec.heads)
    assert again.inputs == spec.inputs


@zoo.of_each_kind
def test_the_source_says_the_same_with_other_parameters(path: Path, name: str) -> None:
    spec = zoo.loaded(path, name)
    changed = 0
    for parameter, value in spec.parameters.items():
        if isinstance(value, bool):
            other: int | float | bool | str = not value
        elif isinstance(value, int | float):
            other = value * 2
        else:
            other = f"2 * ({value})"
        try:
            given = load(path, name=name, parameters={parameter: other})
        except SpecError:
            # an odd box, a layer count that scopes speak of
            continue
        changed += given != spec
        assert parse(given.source) == given
        if not isinstance(other, str):
            assert given.parameters[parameter] == other
    assert changed or not any(spec.parameters.values())


def test_the_source_is_canonical_text() -> None:
    spec = parse("#c\nattention  a(r=3){attend\twindow(radius=r)|self#d\n}", r=4)
    assert spec.source == (
        "#c\nattention a(r = 4) {\n    attend window(radius = r) | self  #d\n}\n"
    )
    assert repr(spec) == "<Spec a, r=4>"


def test_a_spec_is_about_one_attention() -> None:
    text = "graph g = full graph unused = self attention a { attend g } attention b { attend self }"
    spec = parse(text, name="a")
    assert "unused" not in spec.source
    assert "attention b" not in spec.source
    assert parse(spec.source) == spec


# --- identity ----------------------------------------------------------------------------------

BASE = "attention a { attend window(radius = 3) | global(first(2) | last(1)) }"

SAME = [
    "attention a { attend global(first(2) | last(1)) | window(radius = 3) }",
    "# a comment\nattention a {\n\n attend (window(radius = 1 + 2)) | (global(first(2)|last(1))) }",
    "attention a { attend ~~window(radius = 3) | global(first(count = 2) | last(1)) & full }",
    "graph g(r) = window(radius = r) attention a { attend g(3) | global(first(2) | last(1)) }",
    "attention a(r = 3) { let t = first(r - 1) | last(1) attend window(radius = r) | global(t) }",
]

OTHER = [
    "attention b { attend window(radius = 3) | global(first(2) | last(1)) }",
    "attention a { attend window(radius = 4) | global(first(2) | last(1)) }",
    "attention a { attend window(radius = 3) & global(first(2) | last(1)) }",
    "attention a { attend window(radius = 3) | rows(first(2) | last(1)) }",
    "attention a { attend window(radius = 3) | global(first(2) & last(1)) }",
    "attention a { attend window(radius = 3) | global(first(2)) }",
    "attention a { causal attend window(radius = 3) | global(first(2) | last(1)) }",
    "attention a { layers 2 attend window(radius = 3) | global(first(2) | last(1)) }",
    "attention a { heads 1 attend window(radius = 3) | global(first(2) | last(1)) }",
    "attention a { attend window(radius = 3) | global(first(2) | last(1)) scale 2 }",
    "attention a { attend window(radius = 3) | global(first(2) | last(1)) score alibi() }",
    "attention a { attend window(radius = 3) | global(first(2) | last(1)) normalize relu }",
    "attention a { extra_tokens 1 attend window(radius = 3) | global(first(2) | last(1)) }",
    "attention a { input x: ids attend window(radius = 3) | global(first(2) | last(1)) }",
    "attention a { attend (window(radius = 3) | global(first(2) | last(1))) + linear() }",
]


def test_equal_meanings_are_equal_specs() -> None:
    base = parse(BASE)
    for text in SAME:
        spec = parse(text)
        assert spec == base
        assert spec.fingerprint == base.fingerprint
        assert hash(spec) == hash(base)
    assert len({base, *map(parse, SAME)}) == 1


def test_other_meanings_are_other_specs() -> None:
    specs = [parse(text) for text in (BASE, *OTHER)]
    assert len({spec.fingerprint for spec in specs}) == len(specs)
    assert len(set(specs)) == len(specs)
    assert parse(BASE) != BASE


def test_equal_specs_make_equal_claims_whatever_the_words() -> None:
    text = "attention a { attend full require %s }"
    assert parse(text % "self subset (self | full)") == parse(text % "self subset (full | self)")
    assert parse(text % "degree <= 2 * 4") == parse(text % "8 >= degree")
    assert parse(text % "degree <= 8") != parse(text % "degree <= 9")
    assert parse(text % "degree <= 8") != parse(text % "degree <= 8 at n = 9")


LARGER = """
attention b(r = isqrt(n)) {
    causal
    heads 2
    attend residue(step = r)
    scale 0.5
    head 1 { attend window(before = r, after = 0) - self  score softcap(cap = 30) }
}
"""

GOLDEN = {
    BASE: "136f834b016051f2210ed975e6bb41974f861f132550dfdf4e21ab8576e33148",
    LARGER: "a31fca00a4e222a565f2cbbfb4c9ef1755dfcc3e42c0df055d4cfa843361fce2",
}
"""Fingerprints are part of what emitted modules say: a change of them is a change of version."""


def test_fingerprints_do_not_change() -> None:
    found = {text: parse(text).fingerprint for text in GOLDEN}
    assert found == GOLDEN
    assert all(re.fullmatch("[0-9a-f]{64}", fingerprint) for fingerprint in found.values())


def test_fingerprints_do_not_depend_on_the_process() -> None:
    script = (
        "import sys; from attnspec import load, parse\n"
        "print([load(path).fingerprint for path in sys.argv[2:]], parse(sys.argv[1]).fingerprint)"
    )
    paths = [str(path) for path in zoo.FILES if path.stem in ("bigbird", "swin", "longformer")]
    answers = set()
    for seed in ("0", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", script, BASE, *paths],
            env=environment,
            cwd=zoo.EXAMPLES.parent,
            capture_output=True,
            text=True,
            check=True,
        )
        answers.add(done.stdout)
    (answer,) = answers
    assert parse(BASE).fingerprint in answer


@EVERY
def test_specs_are_values(path: Path, name: str) -> None:
    spec = zoo.loaded(path, name)
    for other in (copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert other == spec
        assert hash(other) == hash(spec)
        assert other.source == spec.source
    other.parameters["x"] = 1
    other.inputs.clear()
    assert other == spec
    assert "x" not in other.parameters
    with pytest.raises(AttributeError):
        other.name = "b"  # type: ignore[misc]


def test_errors_survive_pickling() -> None:
    with pytest.raises(SpecError) as caught:
        parse("attention a { attend ful }")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.diagnostics[0].code == "A201"


# --- pairs -------------------------------------------------------------------------------------


def agree(spec: Spec, n: int, layer: int, head: int, one_by_one: bool) -> None:
    """Compare every way to ask for pairs with the definition."""
    inputs = zoo.sample(spec, n)
    if n == 0:
        # nothing is evaluated: a size may have no value here
        wanted = np.zeros((0, 0), bool)
    elif one_by_one:
        relation = spec.relation(n, layer, head, inputs)
        wanted = np.zeros((n, n), bool)
        for q in range(n):
            for k in range(n):
                wanted[q, k] = bool(relation.holds(q, k, n))
    else:
        i = np.arange(n)
        relation = spec.relation(n, layer, head, inputs)
        held = np.asarray(relation.holds(i[:, None], i[None, :], n), bool)
        wanted = np.broadcast_to(held, (n, n))
    mask = spec.mask(n, layer, head, inputs)
    assert mask.dtype == bool
    assert mask.shape == (n, n)
    assert np.array_equal(mask, wanted)
    adjacency = spec.adjacency(n, layer, head, inputs)
    assert isinstance(adjacency, scipy.sparse.csr_array)
    assert adjacency.dtype == bool
    assert adjacency.indices.dtype == np.int32
    assert adjacency.has_canonical_format
    assert adjacency.data.all()
    assert np.array_equal(adjacency.toarray(), wanted)
    if spec.program.cross:
        # no graph has the positions of two sequences as its nodes
        return
    graph = spec.graph(n, layer, head, inputs)
    assert isinstance(graph, networkx.DiGraph)
    assert sorted(graph.nodes) == list(range(n))
    assert sorted(graph.edges) == list(
        zip(*map(np.ndarray.tolist, np.nonzero(wanted)), strict=True)
    )


@zoo.of_each_kind
def test_the_pairs_of_the_zoo(path: Path, name: str) -> None:
    spec = zoo.loaded(path, name)
    seen = 0
    for n in (0, 1, 2, 7, 33):
        for layer, head in slots(spec)[:4]:
            if n and not has_pairs(spec, layer, head):
                with pytest.raises(SpecError, match=r"A70[67]"):
                    spec.mask(n, layer, head, zoo.sample(spec, n))
                seen += 1
                continue
            try:
                agree(spec, n, layer, head, one_by_one=True)
            except AttnSpecError as error:
                if "the grid of" not in str(error):
                    raise
            else:
                seen += 1
    assert seen or spec.program.grid is not None


@pytest.mark.parametrize(
    "body",
    [
        "attend ~window(radius = 2) & causal | global(positions(0, 3..4))",
        "attend transpose(block(size = 3, before = 1)) - shift(residue(step = 2), by = -3)",
        "causal attend ~(random(keys = 2) | shift(strided(stride = 3), by = 2))",
        "attend where(q * k % 7 < 3) & ~transpose(where(q * k % 7 < 3))",
        "input x: ids input y: tokens input z: length"
        " attend same(x) - columns(y) | transpose(prefix(z)) & global(~y)",
        "layers 3 heads 2 attend shift(powers(base = 3), by = layer) | columns(positions(head))",
        "attend full & full - full",
        "attend self - self | (expander(degree = 4) & window(before = 5, after = 0))",
    ],
)
@pytest.mark.parametrize("n", [0, 1, 2, 7, 33])
def test_the_pairs_of_compositions(body: str, n: int) -> None:
    spec = parse(f"attention a {{ {body} }}")
    for layer, head in slots(spec):
        agree(spec, n, layer, head, one_by_one=True)


@pytest.mark.parametrize("stem", ["local_2d", "neighborhood_2d", "axial", "swin"])
def test_the_pairs_of_grids(stem: str) -> None:
    spec = load(zoo.EXAMPLES / f"{stem}.attn")
    extents = [extent for extent in spec.program.grid or () if isinstance(extent, int)]
    n = int(np.prod(extents)) + spec.program.extra_tokens
    for layer, head in slots(spec):
        agree(spec, n, layer, head, one_by_one=False)


def test_masks_are_fresh() -> None:
    spec = parse(BASE)
    spec.mask(5)[:] = False
    assert spec.mask(5).any()


def test_eight_threads_see_the_same() -> None:
    specs = [load(zoo.EXAMPLES / f"{stem}.attn") for stem in ("bigbird", "random", "expander")]
    jobs = [(spec, n) for spec in specs for n in (65, 130, 200)] * 8
    random.Random(0).shuffle(jobs)
    alone = {(spec.name, n): spec.mask(n) for spec, n in jobs[:20]}
    fresh = {spec.name: parse(spec.source) for spec in specs}
    with ThreadPoolExecutor(8) as pool:
        masks = list(pool.map(lambda job: fresh[job[0].name].mask(job[1]), jobs))
        again = list(pool.map(lambda job: parse(job[0].source).fingerprint, jobs))
    for (spec, n), mask, fingerprint in zip(jobs, masks, again, strict=True):
        assert fingerprint == spec.fingerprint
        if (spec.name, n) in alone:
            assert np.array_equal(mask, alone[spec.name, n])


# --- arguments ---------------------------------------------------------------------------------

SPEC = parse("attention a { layers 2 heads 3 attend window(radius = 1 + head + layer) }")


@pytest.mark.parametrize(
    ("n", "layer", "head"),
    [
        (9, 1, 2),
        (np.int64(9), np.int64(1), np.int8(2)),
        (np.uint8(9), np.uint64(1), 2),
        (torch.tensor(9), torch.tensor(1), torch.tensor(2)),
    ],
)
def test_lengths_layers_and_heads_are_integers(n: int, layer: int, head: int) -> None:
    assert np.array_equal(SPEC.mask(n, layer, head), SPEC.mask(9, 1, 2))
    assert SPEC.adjacency(n).shape == (9, 9)
    assert len(SPEC.graph(n)) == 9


@pytest.mark.parametrize(
    ("n", "kind"),
    [
        (True, "a boolean"),
        (np.True_, "a boolean"),
        (4.0, "float"),
        (np.float32(4), "float32"),
        ("4", "str"),
        (None, "NoneType"),
        ([4], "list"),
    ],
)
def test_lengths_of_other_types_are_refused(n: int, kind: str) -> None:
    for ask in (SPEC.mask, SPEC.adjacency, SPEC.graph, SPEC.relation):
        with pytest.raises(TypeError, match=f"n must be an integer, got {kind}"):
            ask(n)
    for what in ("layer", "head"):
        with pytest.raises(TypeError, match=f"{what} must be an integer, got {kind}"):
            SPEC.mask(4, layer=n) if what == "layer" else SPEC.mask(4, head=n)


@pytest.mark.parametrize("n", [-1, 2**31, 2**63, 10**40])
def test_lengths_have_limits(n: int) -> None:
    for ask in (SPEC.mask, SPEC.adjacency, SPEC.graph, SPEC.relation):
        with pytest.raises(AttnSpecError, match=r"n must be between 0 and 2\*\*31 - 1, got -?\d"):
            ask(n)


def test_what_is_too_large_is_refused_with_a_way_out() -> None:
    with pytest.raises(AttnSpecError, match="up to n = 32,768, got 32,769: use `adjacency`"):
        SPEC.mask(LIMITS.mask + 1)
    with pytest.raises(AttnSpecError, match="up to n = 4,096, got 4,097: use `adjacency`"):
        SPEC.graph(LIMITS.matrix + 1)
    full = parse("attention a { attend full }")
    with pytest.raises(AttnSpecError, match=r"up to 2,147,483,647 edges, .* 10,000,000,000"):
        full.adjacency(100_000)
    assert SPEC.adjacency(100_000).nnz == 299_998


@pytest.mark.parametrize("n", [0, 1, 5])
def test_layers_and_heads_have_limits(n: int) -> None:
    for ask in (SPEC.mask, SPEC.adjacency, SPEC.graph, SPEC.relation):
        with pytest.raises(AttnSpecError, match="`layer` must be between 0 and 1, got 2"):
            ask(n, layer=2)
        with pytest.raises(AttnSpecError, match="`head` must be between 0 and 2, got -1"):
            ask(n, head=-1)
    free = parse("attention a { attend window(radius = head) }")
    assert free.mask(9, head=3)[0].sum() == 4
    with pytest.raises(AttnSpecError, match="`head` must be at least 0"):
        free.mask(n, head=-1)


@pytest.mark.parametrize("size", ["n", "4 // n", "n - 1"])
def test_no_positions_have_no_pairs_whatever_the_sizes_are_worth(size: str) -> None:
    spec = parse(f"attention a {{ attend window(radius = {size}) | residue(step = {size}) }}")
    assert spec.mask(0).shape == spec.adjacency(0).shape == (0, 0)
    assert len(spec.graph(0)) == 0
    data = spec.analyse(0).to_dict()["figures"]
    assert data["edges"]["value"] == data["empty_rows"]["value"] == 0
    assert not spec.analyse(0).per_head


def test_a_grid_has_its_cells_at_every_request() -> None:
    spec = parse("attention a { sequence grid(4, 4) attend axial }")
    for ask in (spec.mask, spec.adjacency, spec.graph, spec.analyse, spec.plan):
        with pytest.raises(AttnSpecError, match="16 cells, got n = 0"):
            ask(0)


INPUTS = parse(
    "attention a { input t: tokens(at_most = 3) input i: ids input l: length"
    " heads 3 attend columns(t) head 1 { attend same(i) } head 2 { attend prefix(l) } }"
)


@pytest.mark.parametrize(
    ("head", "values", "keys"),
    [
        (0, {"t": np.arange(6) == 4}, 6),
        (0, {"t": [False] * 5 + [True]}, 6),
        (0, {"t": torch.arange(6) < 2}, 12),
        (0, {"t": [4, 0]}, 12),
        (0, {"t": np.zeros(0, int)}, 0),
        (0, {"t": 2}, 12),
        (1, {"i": [0, 0, 1, 1, 1, -7]}, 4 + 9 + 1),
        (1, {"i": np.zeros(6, np.uint8)}, 36),
        (2, {"l": 2}, 12),
        (2, {"l": np.int8(0)}, 0),
        (2, {"l": 100}, 36),
    ],
)
def test_inputs_of_one_sample(head: int, values: dict[str, object], keys: int) -> None:
    assert INPUTS.mask(6, head=head, inputs=values).sum() == keys  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("head", "values", "message"),
    [
        (0, None, r"`a` needs its input `t` \(tokens\)"),
        (0, {"i": [0] * 6}, "needs its input `t`"),
        (0, {"t": 1, "x": 1}, "`a` declares no input `x`, its inputs are t, i, l"),
        (0, {"T": 1}, "no input `T`, .*: did you mean `t`"),
        (0, {"t": [True] * 5}, r"`t` must be bool \[6\], got bool \[5\]"),
        (0, {"t": [[True] * 6]}, "must be bool"),
        (0, {"t": [1.0] * 6}, r"got float64 \[6\]"),
        (0, {"t": [0, 1, 0, 0, 0, 0]}, "6 integers could be positions or marks"),
        (0, {"t": [6]}, "`t` must be positions between 0 and 5 at n = 6"),
        (0, {"t": [-1]}, "`t` must be positions between 0 and 5"),
        (0, {"t": -1}, "`t` must be a count between 0 and 6"),
        (0, {"t": [True] * 6}, "promises at most 3 tokens, got 6"),
        (0, {"t": 4}, "promises at most 3 tokens, got 4"),
        (0, {"t": [[1], [1, 2]]}, "`t` must be an array"),
        (0, {"t": None}, "must be bool"),
        (1, {"i": [0.5] * 6}, r"`i` must be int \[6\], got float64"),
        (1, {"i": [True] * 6}, "got bool"),
        (1, {"i": 3}, r"got int64 \[\]"),
        (2, {"l": 2.0}, "a length: one integer is needed"),
        (2, {"l": [2]}, "a length: one integer is needed"),
        (2, {"l": True}, "a length: one integer is needed"),
    ],
)
def test_other_inputs_are_refused(
    head: int, values: dict[str, object] | None, message: str
) -> None:
    with pytest.raises(AttnSpecError, match=message):
        INPUTS.mask(6, head=head, inputs=values)  # type: ignore[arg-type]


def test_a_length_below_0_is_one_of_0() -> None:
    """As in a call, which would have to wait for the numbers to refuse them."""
    spec = parse("attention a { input p: length attend prefix(p) | self }")
    q = torch.randn(3, 1, 5, 4)
    given = torch.tensor([-7, 0, 2])
    pairs = spec.compile().pairs(q, q, inputs={"p": given}).numpy()
    for sample, length in enumerate(given.tolist()):
        assert (spec.mask(5, inputs={"p": length}) == pairs[sample, 0]).all()
        assert spec.analyse(5, inputs={"p": length}).edges == pairs[sample].sum()
    assert (pairs[0] == pairs[1]).all()


def test_inputs_map_names_to_arrays() -> None:
    for wrong in (3, [1], "t"):
        with pytest.raises(TypeError, match="inputs must map names to arrays, got"):
            INPUTS.mask(6, inputs=wrong)  # type: ignore[arg-type]


def test_only_the_inputs_of_the_head_are_needed() -> None:
    assert INPUTS.adjacency(4, head=2, inputs={"l": 1}).nnz == 4
    assert INPUTS.graph(4, head=1, inputs={"i": [1, 2, 3, 4]}).number_of_edges() == 4


def test_texts_and_paths_are_not_confused(tmp_path: Path) -> None:
    for wrong in (None, b"attention a { attend full }", 3, Path("a.attn")):
        with pytest.raises(TypeError, match="the text of a spec is needed"):
            parse(wrong)  # type: ignore[arg-type]
    for none in (None, 3, ["a.attn"]):
        with pytest.raises(TypeError, match="a path is needed"):
            load(none)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="A180"):
        load("attention a { attend full }")
    with pytest.raises(SpecError, match="A131"):
        parse("a.attn")
    with pytest.raises(SpecError, match="A182"):
        load(tmp_path)
    path = tmp_path / "a.attn"
    path.write_text(BASE, encoding="utf-8")
    assert load(path) == load(str(path)) == parse(BASE)


def test_a_formula_has_no_pairs() -> None:
    with pytest.raises(SpecError, match="A707"):
        parse("attention a { attend linear() }").mask(4)
    hybrid = parse("attention a { attend window(radius = 1) + linear() }")
    assert hybrid.mask(4).sum() == 10


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("attend full scale 1", "attend full scale 1.0"),
        ("attend full scale 0", "attend full scale -0.0"),
        ("attend full score softcap(cap = 30)", "attend full score softcap(cap = 30.0)"),
        ("attend rbf(sigma = 2)", "attend rbf(sigma = 2.0)"),
        ("heads 2 attend full scale [1, 2][head]", "heads 2 attend full scale [1.0, 2][head]"),
        ("attend full scale n * 2", "attend full scale n * 2.0"),
        ("attend where(q < 2) | where(q < 1.5)", "attend where(q < 2.0) | where(q < 1.5)"),
        ("attend where(q in {1, 1e3})", "attend where(q in {1.0, 1000})"),
        ("attend full require degree <= 10", "attend full require degree <= 10.0"),
    ],
)
def test_equal_specs_hash_and_fingerprint_alike(one: str, other: str) -> None:
    a, b = (parse(f"attention a {{ {body} }}") for body in (one, other))
    assert a == b
    assert hash(a) == hash(b)
    assert a.fingerprint == b.fingerprint


def test_a_parameter_of_any_name_can_be_set(tmp_path: Path) -> None:
    names = ("text", "path", "name", "parameters", "entry", "source", "self")
    head = ", ".join(f"{name} = 1" for name in names)
    text = f"attention a({head}) {{ attend window(radius = {' + '.join(names)}) }}"
    file = tmp_path / "a.attn"
    file.write_text(text, encoding="utf-8")
    for read, first in ((parse, text), (load, str(file))):
        for name in names:
            assert read(first, parameters={name: 3}).parameters[name] == 3
        spec = read(first, name="a", parameters={"name": 2, "parameters": 5}, text=4, self=6)
        assert [spec.parameters[name] for name in names] == [4, 1, 2, 5, 1, 1, 6]
        with pytest.raises(TypeError, match="`text` is set twice"):
            read(first, parameters={"text": 2}, text=3)
        with pytest.raises(TypeError, match="maps names to values, got list"):
            read(first, parameters=[1])  # type: ignore[arg-type]
    assert attnspec.zoo("bigbird", parameters={"block": 32}) == attnspec.zoo("bigbird", block=32)
    settings = [f"--set={name}=3" for name in names]
    shown = CliRunner().invoke(main, ["show", str(file), "-n", "30", *settings])
    assert shown.exit_code == 0, shown.output
