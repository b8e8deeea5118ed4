"""Large texts and large numbers are answered, or refused by the limit that they reach, at once."""

from __future__ import annotations

import random
import re
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
import zoo
from population import inputs_of, spec_of
from sweeps import few

from attnspec import Spec, load, parse
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import AttnSpecError, Diagnostic, SpecError


def codes(act: Callable[[], object]) -> list[str]:
    with pytest.raises(SpecError) as caught:
        act()
    return [d.code for d in caught.value.diagnostics]


def attend(text: str) -> str:
    return f"attention a {{ attend {text} }}"


LARGE = {
    "mistakes": ("@" * (1 << 20), ["A107"] * LIMITS.problems),
    "quotes": ("'a " * (1 << 18), ["A114"] * LIMITS.problems),
    "terminators": (";" * (1 << 20), ["A137"] * LIMITS.problems),
    "unknown names": (attend(" | ".join(f"y{i}" for i in range(5000))), ["A201"] * LIMITS.problems),
    **{
        f"nested {name}": (text, ["A191"])
        for name, text in {
            "brackets": attend("(" * 100_000 + "full" + ")" * 100_000),
            "calls": attend("f(" * 50_000 + ")" * 50_000),
            "complements": attend("~" * 100_000 + "full"),
            "signs": f"attention a {{ scale {'-' * 100_000}1 }}",
            "negations": f"attention a {{ let x = {'not ' * 100_000}y }}",
            "powers": f"attention a {{ scale {'2 ** ' * 19_000}2 }}",
            "scopes": f"attention a {{ {'layer 0 { ' * 1000}{'}' * 1000} }}",
            "operators": attend("(a or b and c | d & e + f * -" * 20 + "x" + ")" * 20),
            "braces": "{" * 100_000,
        }.items()
    },
    "token sets": (
        attend(f"global({' | '.join(f'positions({i})' for i in range(2000))})"),
        ["A196"],
    ),
    "a long size": (attend(f"window(radius = {' + '.join(['n'] * 2000)})"), ["A197"]),
    "a long union": (attend("|".join(["full"] * 1_000_000)), ["A190"]),
    "many words": (attend("full|" * 20_007 + "full"), ["A192"]),
    "one word": (attend("f" * 10_000_000), ["A190"]),
    "a comment": ("attention a { attend full } #" + "x" * 20_000_000, ["A190"]),
    "blanks": (" " * 20_000_000, ["A190"]),
    "a long number": (attend(f"window(radius = {'9' * 5000})"), ["A111"]),
    "layers and heads": (
        "attention a { layers 4096 heads 64 attend window(radius = head + layer) }",
        ["A196"],
    ),
}


def doubling(step: str, first: str, steps: int, used: str) -> str:
    """Definitions that each use the one before, of graphs before an attention or of lets in it."""
    lines = [first, *(step.replace("@1", str(i + 1)).replace("@", str(i)) for i in range(steps))]
    defined, used = "\n".join([*lines, ""]), used.replace("@", str(steps))
    return attend(used).replace("{", f"{{ {defined}") if "let" in step else defined + attend(used)


LARGE |= {
    f"multiplied {name}": (doubling(step, first, steps, used), [code])
    for name, code, step, first, steps, used in (
        ("graphs", "A196", "graph g@1 = g@ | transpose(g@)", "graph g0 = causal", 60, "g@"),
        ("calls", "A196", "graph g@1(x) = g@(g@(x))", "graph g0(x) = x", 60, "g@(full)"),
        ("lets", "A196", "let g@1 = g@ - transpose(g@)", "let g0 = causal", 60, "g@"),
        ("sizes", "A196", "let x@1 = x@ + x@", "let x0 = n", 60, "window(radius = x@)"),
        ("tokens", "A196", "let t@1 = t@ & first(@) | t@", "let t0 = first(n)", 60, "global(t@)"),
        ("deep", "A197", "let g@1 = g@ & ~window(radius = @) | full", "let g0 = self", 2000, "g@"),
        ("deep sizes", "A197", "let x@1 = 2 * x@", "let x0 = n", 2000, "window(radius = x@)"),
        ("nested calls", "A197", "graph g@1 = g@", "graph g0 = self", 100, "g@"),
    )
}


@pytest.mark.parametrize("name", few(LARGE, 3))
def test_large_texts_are_refused_at_once(name: str) -> None:
    text, expected = LARGE[name]
    started = time.process_time()
    assert codes(lambda: parse(text)) == expected
    assert time.process_time() - started < 10


def test_deep_and_wide_graphs_within_the_limits_are_accepted() -> None:
    nested = doubling("graph g@1 = g@", "graph g0 = self", 60, "g@")
    assert parse(nested).mask(3).sum() == 3
    wide = " | ".join(f"window(before = {i}, after = 0)" for i in range(3000))
    assert len(spec_of(f"attend {wide}").program.attend().graph.terms) == 3000  # type: ignore[union-attr]
    assert spec_of(f"attend window(radius = {' + '.join(['n'] * 99)})").mask(3).all()


def wheres(count: int, operator: str) -> Spec:
    parts = (f"where(q * {i + 3} % {i + 7} == k % {i + 2})" for i in range(count))
    return spec_of(f"attend {f' {operator} '.join(parts)}")


@pytest.mark.parametrize("operator", ["|", "&"])
def test_graphs_of_many_patterns_are_refused_by_their_limit(operator: str) -> None:
    large = wheres(LIMITS.patterns + 1, operator)
    for work in (lambda: large.plan(8), large.compile, large.emit):
        assert codes(work) == ["A196"]
    # a pattern that is said again is none more
    spec_of(f"attend {' | '.join(['self'] * 2000)}").plan(8)
    report = large.analyse(64)
    for name in ("edges", "causal", "order", "depth", "spectral_gap", "kv_cache"):
        assert report.quality[name] is None
    (warning,) = parse(large.source.replace("}", "require degree <= 3 }")).check()
    assert warning.code == "A609"
    assert large.mask(9).shape == (9, 9)
    assert wheres(LIMITS.patterns, operator).analyse(8).edges is not None


@pytest.mark.parametrize(
    "steps", [(2**40, 6), (6, 2**62), tuple(range(50, 90)), (2**31 - 1, 2**31)]
)
def test_steps_beyond_every_sequence(steps: tuple[int, ...]) -> None:
    spec = spec_of(f"attend {' & '.join(f'residue(step = {step})' for step in steps)}")
    assert spec.analyse(97).edges == spec.mask(97).sum()


LONGEST, HUGE = 2**31 - 1, 2**62


@pytest.mark.parametrize(
    "graph",
    [
        f"columns(first({HUGE}))",
        f"global(last({HUGE}))",
        f"columns(every({HUGE}, offset = 3))",
        f"rows(positions(0..{HUGE}))",
        f"columns(~first({HUGE}) | last(5))",
        f"shift(window(radius = {HUGE}), by = 5)",
        "columns(every(2) | every(3))",
    ],
)
def test_token_sets_at_the_longest_length_take_no_memory(graph: str) -> None:
    spec = spec_of(f"attend {graph} require causal at n = {LONGEST}")
    tracemalloc.start()
    spec.check()
    assert spec.analyse(LONGEST).to_dict()["n"] == LONGEST
    for refused in (spec.adjacency, spec.mask, spec.plan, spec.graph):
        with pytest.raises(AttnSpecError):
            refused(LONGEST)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 30


def test_numbers_beyond_the_largest_real_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [d.code for d in spec_of("attend where(1e308 * q > 3)").check()] == ["A320"]


@pytest.mark.parametrize("body", ["scale 1e30 * n", "heads 2 scale 1e16 ** (head + 1)"])
def test_scales_beyond_float32_are_refused_as_soon_as_they_are_known(body: str) -> None:
    spec = spec_of(f"{body} attend full")
    for work in (lambda: spec.plan(64), lambda: spec.analyse(64).flops):
        with pytest.raises(SpecError) as caught:
            work()
        assert caught.value.diagnostics[0].span is not None


@pytest.mark.parametrize(
    "body",
    [
        "scale 2.0 ** 100 attend window(radius = 3)",
        "scale 1e4 attend residue(step = 3) + linear()",
        "scale 1e30 attend taylor(order = 2)",
        "attend full score softcap(cap = 1e-4)",
        "attend full score softcap(cap = 1e30)",
        "attend rbf(sigma = 1e-18)",
        "attend rfa(floor = 1e30)",
    ],
)
def test_large_numbers_of_formulas_are_verified(body: str) -> None:
    assert "class Sample" in spec_of(body).emit()


def test_sizes_are_evaluated_when_n_is_known() -> None:
    spec = spec_of("attend residue(step = n - 5)")
    assert spec.mask(7).sum() == 25
    assert codes(lambda: spec.mask(3)) == ["A320"]


TOKEN = re.compile(r"[A-Za-z_]\w*|[0-9][\w.]*|\.\.|//|\*\*|[<>=!]=|\S")
PIECES = (
    *("0", "1", "-1", "2", "7", "2.5", "1000000007", "4611686018427387904", "n", "head", "layer"),
    *("full", "q", "k", "true", "first(2)", "window(radius = 1)", "linear()", "x", "q.row", "0..3"),
    *"(){}=,:.|&-~+*/%<>!^;'\"#@$[]?\\\n\t 0159_aé\0\u202e\u00a0",
    *("..", "**", "//", "==", "<=", "&&", "=>", " in ", " and ", " not ", " subset ", " at n = "),
    *(" attend ", " causal ", " layer ", " require ", " let ", " graph ", " attention ", " from "),
    *("1e400", "0x1", "1_", ".5", "9" * 30, " { ", " } ", "{1, 2}", "f(x = 1)"),
)


def damaged(text: str, draw: random.Random, by_words: bool) -> bytes:
    """The text with one to three words, or some letters and bytes, deleted, replaced or doubled."""

    def span() -> tuple[int, int]:
        start = draw.randrange(len(text) + 1)
        if not by_words:
            return start, min(len(text), start + draw.choice([0, 0, 1, 1, 2, 8, 40]))
        found = TOKEN.search(text, start)
        return found.span() if found else (start, start)

    for _ in range(draw.randint(1, 3)):
        (first, last), (start, end) = span(), span()
        blank = " " * by_words
        word, other = text[first:last], text[start:end]
        piece = draw.choice(("", draw.choice(PIECES), other, word.swapcase(), word * 2))
        text = f"{text[:first]}{blank}{piece}{blank}{text[last:]}"
    data = bytearray(text.encode())
    for _ in range(0 if by_words else draw.randint(0, 1)):
        at = draw.randrange(len(data) + 1)
        data[at : at + draw.randint(0, 2)] = draw.randbytes(draw.randint(0, 2))
    return bytes(data)


def stands_in_its_source(diagnostic: Diagnostic) -> bool:
    spans = [diagnostic.span, *(span for _, span in diagnostic.related)]
    return all(s is None or 0 <= s.start <= s.end <= len(s.source.text) for s in spans)


def answer(act: Callable[[], object]) -> Sequence[Diagnostic] | None:
    """The diagnostics with which something is refused, None where it is done."""
    try:
        act()
    except SpecError as error:
        return error.diagnostics
    except AttnSpecError:
        return ()
    return None


def masks(spec: Spec) -> None:
    fixed = [extent for extent in spec.program.grid or () if isinstance(extent, int)]
    n = 16 if len(fixed) < 2 else fixed[0] * fixed[1]
    n = n if n <= 64 else 16
    spec.mask(n, inputs=inputs_of(spec, n))


@pytest.mark.parametrize(("seed", "by_words"), few(product(range(4), [True, False]), 8))
def test_any_damage_is_compiled_or_explained(seed: int, by_words: bool, tmp_path: Path) -> None:
    draw, path = random.Random(seed), tmp_path / "damaged.attn"
    texts = [each.read_text(encoding="utf-8") for each in zoo.FILES]
    seen: Counter[str] = Counter()
    for turn in range(150):
        path.write_bytes(data := damaged(draw.choice(texts), draw, by_words))
        specs: list[Spec] = []
        refused = answer(lambda specs=specs: specs.append(load(path)))  # type: ignore[misc]
        if refused is not None:
            assert refused
            seen.update(each.code for each in refused)
            assert all(stands_in_its_source(d) for d in refused), data
            continue
        (spec,) = specs
        seen["good"] += 1
        assert parse(spec.source) == spec, data
        refused = answer(lambda spec=spec: masks(spec))  # type: ignore[misc]
        seen["shown"] += refused is None
        assert all(stands_in_its_source(d) for d in refused or ())
        if turn < 40:
            assert all(stands_in_its_source(d) for d in spec.check())
    assert 15 < seen["good"] < 135
    assert seen["shown"] > 9
    assert by_words or {"A101", "A102", "A132"} <= seen.keys()
