"""Static patterns and their predicates: whatever is asked, `where` says what the pattern says.

The table is the map from patterns to predicates. A pattern is known of by its predicate alone where
every test here holds, and its own closed forms are then nothing but quicker.
"""

from __future__ import annotations

import random
import re
from functools import cache

import numpy as np
import pytest
from package_map import MODULES
from pattern_samples import samples_of
from relation_checks import definition

from attnspec.analysis.counting.degrees import degrees_of
from attnspec.analysis.growth.order import order
from attnspec.analysis.growth.where_growth import predicate_growth
from attnspec.analysis.reach.chain import layers_of
from attnspec.analysis.reach.spread import period
from attnspec.backends.factored.hybrid.lag import _lagged
from attnspec.graphs.bind import Situation, bind
from attnspec.graphs.forms.conditions import Ends
from attnspec.graphs.forms.dnf import Place, _among, form_of
from attnspec.graphs.forms.prelude import PRELUDE, definitions, predicate_of, predicate_of_leaf
from attnspec.graphs.forms.properties import is_symmetric, never_reads_later, reads_itself
from attnspec.graphs.look_back import look_back
from attnspec.graphs.operators import Complement
from attnspec.graphs.patterns import BY_NAME, PATTERNS
from attnspec.graphs.patterns.where import Where
from attnspec.graphs.relation import Relation
from attnspec.graphs.token_sets import Data
from attnspec.ir.program import ArgumentValue, Compound, Leaf
from attnspec.ir.scalars import Apply, fold
from attnspec.layout.steps import bands_of
from attnspec.spec import Spec, parse

DISTANCES = ", ".join(["0", *(str(1 << power) for power in range(17))])

PREDICATES = {
    "full": "true",
    "causal": "k <= q",
    "self": "q == k",
    "window(radius = 9)": "abs(q - k) <= 9",
    "window(before = 70, after = 3)": "q - k <= 70 and k - q <= 3",
    "window(before = 12, after = 0)": "q - k <= 12 and k <= q",
    "dilated(radius = 512, step = 8)": "abs(q - k) <= 512 and (q - k) % 8 == 0",
    "residue(step = 64)": "(q - k) % 64 == 0",
    "strided(stride = 128)": "abs(q - k) < 128 or (q - k) % 128 == 0",
    "block(size = 64)": "q // 64 == k // 64",
    "block(size = 48, before = 2, after = 1)": "q // 48 - k // 48 <= 2 and k // 48 - q // 48 <= 1",
    "summary(stride = 64, cells = 4)": "k % 64 >= 64 - 4",
    "fixed(stride = 48, cells = 8)": "q // 48 == k // 48 or k % 48 >= 48 - 8",
    "global(first(16))": "q < 16 or k < 16",
    "global(every(1000))": "q % 1000 == 0 or k % 1000 == 0",
    "rows(first(16))": "q < 16",
    "rows(last(7))": "q >= n - 7",
    "columns(first(16))": "k < 16",
    "columns(last(5))": "k >= n - 5",
    "columns(positions(3, 20..30))": "k == 3 or k in 20..30",
    "prefix(100)": "k < 100",
    "strided(stride = isqrt(n))": "abs(q - k) < isqrt(n) or (q - k) % isqrt(n) == 0",
    "fixed(stride = isqrt(n), cells = 1)": (
        "q // isqrt(n) == k // isqrt(n) or k % isqrt(n) >= isqrt(n) - 1"
    ),
    "powers(base = 2)": f"abs(q - k) in {{{DISTANCES}}}",
}

OTHER_FORM = ("columns(positions(3, 20..30))", "powers(base = 2)")
"""Predicates that proofs do not know as the pattern that they are."""


pairs = pytest.mark.parametrize(("pattern", "predicate"), PREDICATES.items(), ids=PREDICATES)


@cache
def spec_of(graph: str, causal: bool = False) -> Spec:
    return parse(f"attention a {{ {'causal' if causal else ''} attend {graph} }}")


def both(pattern: str, predicate: str, n: int, causal: bool = False) -> tuple[Relation, Relation]:
    """The relation of a pattern and that of its predicate."""
    specs = spec_of(pattern, causal), spec_of(f"where({predicate})", causal)
    named, written = (spec.relation(n) for spec in specs)
    return named, written


def specs_of(pattern: str, predicate: str, causal: bool = False) -> tuple[Spec, Spec]:
    return spec_of(pattern, causal), spec_of(f"where({predicate})", causal)


def terms(pattern: str, predicate: str) -> list[Leaf]:
    found = [spec.program.attends[0].graph for spec in specs_of(pattern, predicate)]
    return [term for term in found if isinstance(term, Leaf)]


def scalar_of(predicate: str) -> Apply:
    """The scalar of a predicate's text."""
    found = dict(terms("full", predicate)[1].arguments)["predicate"]
    assert isinstance(found, Apply)
    return found


@pairs
def test_how_far_back_it_reads(pattern: str, predicate: str) -> None:
    """No further than the pattern knows of itself."""
    named, written = both(pattern, predicate, 300)
    for first, second in ((named, written), (Complement(named), Complement(written))):
        known, found = look_back(first), look_back(second)
        if known is not None:
            assert found is not None
            assert found.first + found.before <= known.first + known.before
            assert found.before == known.before


@pairs
def test_after_how_much_it_repeats_itself(pattern: str, predicate: str) -> None:
    found = [period(layers_of(spec.stack(), 300)) for spec in specs_of(pattern, predicate, True)]
    assert found[0] == found[1]


@pairs
def test_its_latest_positions_without_a_gap(pattern: str, predicate: str) -> None:
    found = [_lagged(each, 300, 300)[0] for each in both(pattern, predicate, 300, True)]
    assert found[0] == found[1]


@pairs
def test_what_is_proven_from_its_text(pattern: str, predicate: str) -> None:
    named, written = terms(pattern, predicate)
    for prove in (is_symmetric, reads_itself, never_reads_later):
        assert prove(named) == prove(written), prove


@pairs
def test_the_form_for_proofs(pattern: str, predicate: str) -> None:
    named, written = terms(pattern, predicate)
    found = form_of(named, Place()), form_of(written, Place())
    assert (found[0] == found[1]) == (pattern not in OTHER_FORM)


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pairs
def test_the_growth(pattern: str, predicate: str, causal: bool) -> None:
    named, written = (
        order(spec.stack(), 300, spec.elaborated) for spec in specs_of(pattern, predicate, causal)
    )
    if pattern.startswith("powers"):
        # as many distances at every length
        assert written.value == "n"
        return
    assert (named.value, named.quality) == (written.value, written.quality)


@pytest.mark.parametrize("op", ["<", "<=", ">", ">=", "==", "!="])
def test_bounds_of_one_side_are_the_token_sets_that_proofs_take_them_for(op: str) -> None:
    known = 0
    for c in range(-3, 6):
        for left, right in (
            *((f"{p}", f"{c}") for p in "qk"),
            *((f"{c}", f"{p}") for p in "qk"),
            *((f"{p}", f"n - {c}") for p in "qk"),
            *((f"n - {p}", f"{c}") for p in "qk"),
            *((f"{c} - {p}", "1") for p in "qk"),
            *((f"{p} % 4", f"{c}") for p in "qk"),
            ("k % 4", f"4 - {c}"),
        ):
            predicate = terms("full", f"{left} {op} {right}")[1]
            found = _among(op, *scalar_of(f"{left} {op} {right}").args)
            if found is None:
                continue
            known += 1
            # the ends of strides are columns that have a name
            given: tuple[tuple[str, ArgumentValue], ...]
            if isinstance(found.members, Ends):
                name, given = "summary", tuple(sorted(vars(found.members).items()))
            else:
                name, given = "columns", (("tokens", found.members),)
            columns = Leaf(name, given)
            leaf = columns if found.side == "k" else Compound("transpose", (columns,))
            for n in (1, 2, 4, 9):
                at = Situation(n, BY_NAME)
                pairs = definition(bind(leaf, at), n) ^ (not found.wanted)
                assert np.array_equal(pairs, definition(bind(predicate, at), n)), (left, right, n)
    assert known


def test_another_predicate_is_told_apart() -> None:
    named, written = both("window(radius = 9)", "abs(q - k) <= 40", 37)
    assert not np.array_equal(definition(named, 37), definition(written, 37))
    assert bands_of(named, 4097, 4097)[0].amounts != bands_of(written, 4097, 4097)[0].amounts
    assert not np.array_equal(degrees_of(named, 4097), degrees_of(written, 4097))


PARTS = (
    "k <= q",
    "q < k",
    "k - q <= 3",
    "q - k <= isqrt(n)",
    "q - k >= 2",
    "abs(q - k) <= 5",
    "abs(q - k) < n // 4",
    "q // 6 == k // 6",
    "q // 4 - k // 4 >= 1",
    "q // isqrt(n) == k // isqrt(n)",
    "(q - k) % 4 == 0",
    "(q - k) % isqrt(n) == 0",
    "(q - k) % 5 < 2",
    "(q - k) % 6 == 1",
    "k % 8 >= 6",
    "k % isqrt(n) == 0",
    "q % 3 == 1",
    "k < 7",
    "k >= n - isqrt(n)",
    "q < n // 2",
    "abs(q - k) in {0, 3, 9}",
    "q - k in {1, 4}",
    "q * k % 3 == 0",
    "k in 3..9",
    "q != k",
)


@pytest.mark.parametrize(
    "seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 120))]
)
def test_no_predicate_grows_faster_than_its_bound(seed: int) -> None:
    source = random.Random(seed)
    chosen = source.sample(PARTS, source.choice((1, 2, 2, 3)))
    text = chosen[0]
    for part in chosen[1:]:
        text = f"({text}) {source.choice(('and', 'and', 'or'))} {part}"
    text = f"not ({text})" if source.random() < 0.15 else text
    most = predicate_growth(scalar_of(text))
    few, many = (int(definition(both("full", text, n)[1], n).sum()) for n in (400, 1600))
    assert many <= 4 ** float(most[0]) * 1.4 * max(few, 1), (text, few, many)


# --- the prelude ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS, ids=[pattern.name for pattern in PATTERNS])
def test_the_prelude_has_the_pairs_of_the_patterns(pattern: type[Relation]) -> None:
    for sample in samples_of(pattern):
        assert_prelude(sample)


def assert_prelude(sample: Relation) -> None:
    predicate = predicate_of(sample)
    if predicate is None:
        given = vars(sample).values()
        assert sample.name not in definitions() or any(isinstance(each, Data) for each in given)
        return
    if sample.name == "where":
        assert predicate == sample.predicate  # type: ignore[attr-defined]
        return
    for n in (0, 1, 2, 5, 37, 130, 521):
        assert np.array_equal(definition(sample, n), definition(Where(predicate), n)), (sample, n)


CALLS = (
    "full",
    "self",
    "causal",
    "window(radius = 3)",
    "window(before = 5, after = 2)",
    "dilated(radius = 9, step = 2)",
    "residue(step = 4)",
    "strided(stride = 6)",
    "block(size = 5, before = 1)",
    "summary(stride = 6, cells = 2)",
    "fixed(stride = 7, cells = 3)",
    "prefix(4)",
)


@pytest.mark.parametrize("call", CALLS)
def test_the_prelude_means_what_the_language_says(call: str) -> None:
    """Its lines, elaborated as graphs of a spec under other names."""
    text = re.sub(r"^graph (\w+)", r"graph my_\1", PRELUDE.read_text("utf-8"), flags=re.M)
    written = parse(f"{text}\nattention a {{ attend my_{call} }}").program.attends[0].graph
    named = spec_of(call).program.attends[0].graph
    assert isinstance(written, Leaf)
    assert isinstance(named, Leaf)
    said = predicate_of_leaf(named)
    assert said is not None
    assert fold(said, {}) == dict(written.arguments)["predicate"]


def test_every_line_of_the_prelude_is_called() -> None:
    assert {re.split(r"\W", call)[0] for call in CALLS} == set(definitions())


ROOMS = ("analysis", "check", "graphs", "layout", "runtime", "show", "spec", "verification")
"""Rooms that know patterns by their predicates, and by what each says of itself."""

NAMED = {
    # a mechanism and what the data decide are taken for every pair
    "attnspec.graphs.stack": {"full"},
    "attnspec.analysis.reach.leaks": {"full"},
    # any keys at all may be read so, those of another sequence too
    "attnspec.runtime.multihead": {"full"},
    # an argument, the size of a block
    "attnspec.spec": {"block"},
    "attnspec.analysis.approximation.approximation": {"full", "lsh"},
    # of two sequences, the positions that both have
    "attnspec.graphs.bind": {"causal", "rows", "columns"},
    # the statement, the claim, the figure, the backend, the rows of a table
    "attnspec.graphs.forms.dnf": {"causal"},
    "attnspec.check.other_differences": {"causal"},
    "attnspec.check.verdicts": {"causal"},
    "attnspec.analysis.counting.degrees": {"causal"},
    "attnspec.graphs.forms.stability": {"causal"},
    "attnspec.graphs.look_back": {"causal"},
    "attnspec.analysis.report.inquiry": {"causal"},
    "attnspec.analysis.report.report": {"causal"},
    "attnspec.runtime.call_checks": {"causal"},  # a keyword of other attentions
    "attnspec.analysis.cost.cost": {"rows"},
    "attnspec.show.html": {"rows"},
}
"""What is left, and why."""


def patterns_known(text: str) -> list[str]:
    """The static patterns that a module knows by their class or their name."""
    known = re.findall(r"attnspec\.graphs\.patterns\.(\w+)", text)
    known += re.findall(rf'"({"|".join(definitions())}|rows|columns|global)"', text)
    return [name for name in known if name != "where"]


def test_what_is_known_of_predicates_knows_no_pattern() -> None:
    looked = 0
    for module, path in MODULES.items():
        if module.startswith("attnspec.graphs.patterns") or "." not in module:
            continue
        if module.split(".")[1] in ROOMS:
            looked += 1
            known = set(patterns_known(path.read_text("utf-8")))
            assert known <= NAMED.get(module, set()), module
    assert looked > 100
    assert NAMED.keys() <= MODULES.keys()


def test_a_module_that_knows_a_pattern_is_seen() -> None:
    assert patterns_known("from attnspec.graphs.patterns.window import Window") == ["window"]
    assert patterns_known('if leaf.pattern == "block":') == ["block"]
    assert patterns_known('case "where":') == []
