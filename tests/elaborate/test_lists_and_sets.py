"""Lists by index, `every` in sets of layers and heads, and what is wrong with either."""

from __future__ import annotations

import numpy as np
import pytest

import attnspec
from attnspec.text.diagnostics import AttnSpecError, SpecError

RADII = "attention a(radii = [1, 3, 5]) { heads 3 attend window(radius = radii[head]) }"


def of(body: str, **parameters: object) -> attnspec.Spec:
    return attnspec.parse(f"attention a {{ {body} }}", **parameters)  # type: ignore[arg-type]


def problem(body: str) -> str:
    with pytest.raises(SpecError) as caught:
        of(body)
    return str(caught.value)


def band(radius: int, n: int = 12) -> np.ndarray:
    at = np.arange(n)
    return abs(at[:, None] - at) <= radius


# --- lists --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        "heads 3 attend window(radius = [1, 3, 5][head])",
        "heads 3 let radii = [1, 3, 5] attend window(radius = radii[head])",
        "heads 3 let r = 1 attend window(radius = [r, 3 * r, 4 + r][head])",
        "heads 3 attend where(abs(q - k) <= [1, 3, 5][head])",
        "heads 3 let radii = [5, 3, 1] attend window(radius = radii[heads - 1 - head])",
        "heads 3 attend full head 0..1 { attend window(radius = [1, 3][head]) }"
        " head 2 { attend window(radius = [5][0]) }",
    ],
)
def test_each_head_reads_its_number(body: str) -> None:
    spec = of(body)
    for head, radius in enumerate((1, 3, 5)):
        assert np.array_equal(spec.mask(12, head=head), band(radius))


def test_a_list_is_a_parameters_value() -> None:
    for given in ("[2, 4, 6]", [2, 4, 6], (2, 4, 6), np.array([2, 4, 6])):
        spec = attnspec.parse(RADII, radii=given)  # type: ignore[arg-type]
        assert spec.parameters == {"radii": "[2, 4, 6]"}
        assert attnspec.parse(spec.source) == spec
        assert np.array_equal(spec.mask(12, head=1), band(4))
    passed = "graph near(r, at) = window(radius = r[at]) attention a { attend near([2, 7], 1) }"
    assert np.array_equal(attnspec.parse(passed).mask(12), band(7))


@pytest.mark.parametrize("given", [["a"], [True], [None]])
def test_values_that_are_no_list_of_numbers(given: object) -> None:
    with pytest.raises(TypeError, match="`radii` must"):
        attnspec.parse(RADII, radii=given)  # type: ignore[arg-type]


def test_a_list_and_a_number_are_not_mixed_up() -> None:
    with pytest.raises(SpecError, match="must be a list, got a number"):
        attnspec.parse(RADII, radii=3)
    with pytest.raises(SpecError, match="must be a number, got a list"):
        attnspec.parse("attention a(r = 3) { attend window(radius = r) }", r="[3]")
    with pytest.raises(AttnSpecError, match="finite"):
        attnspec.parse(RADII, radii=[float("nan")])  # type: ignore[arg-type]


def test_an_index_outside_names_layer_and_head() -> None:
    text = problem("layers 2 heads 4 attend window(radius = [1, 3, 5][head])")
    assert "at layer 0, head 3: a list of 3 has no item 3: they count from 0, to 2" in text
    text = problem("layers 2 heads 4 attend window(radius = [1, 3, 5][head - 1])")
    assert "at layer 0, head 0: a list of 3 has no item -1" in text
    # without `heads` it is known when a head is asked for
    spec = of("attend window(radius = [1, 3][head])")
    assert np.array_equal(spec.mask(12, head=1), band(3))
    with pytest.raises(SpecError, match="at n = 12, head 2: a list of 2 has no item 2"):
        spec.mask(12, head=2)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("attend window(radius = [1, 3][2])", "a list of 2 has no item 2"),
        ("attend window(radius = [1, 3][-1])", "a list of 2 has no item -1"),
        ("attend window(radius = [1, 3][0.0])", "the index of a list must be an integer, got 0.0"),
        ("attend window(radius = [1, 2.5][1])", "`radius` must be an integer, got 2.5"),
        ("attend window(radius = [1, 3])", "must be a number, got a list"),
        ("attend window(radius = [1, full][0])", "what stands in a list must be a number"),
        ("attend window(radius = [1, 2 < 3][0])", "works on numbers, got a comparison"),
        ("attend window(radius = 3[0])", "takes a number of a list, got a number"),
        ("let r = [] attend full", "expected an expression, found `]`"),
        ("attend window(radius = [1, 3[0])", "expected `]` to close the `[`"),
    ],
)
def test_faults_of_lists(body: str, message: str) -> None:
    assert message in problem(body)


def test_lists_read_by_position_and_by_length() -> None:
    at = np.arange(40)
    spec = of("attend where(k <= [1, 40, 9][q % 3])")
    expected = at <= np.array([1, 40, 9])[at % 3][:, None]
    assert np.array_equal(spec.mask(40), expected)
    assert np.array_equal(spec.adjacency(40).toarray(), expected)
    sized = of("attend window(radius = [1, 3][n % 2])")
    for n in (40, 41):
        assert np.array_equal(sized.mask(n), band([1, 3][n % 2], n))
        report = sized.analyse(n)
        assert report.edges == int(sized.mask(n).sum())
        # no figure of the report stumbles over it
        assert str(report)
    with pytest.raises(SpecError, match="a list of 2 is read outside"):
        of("attend where(k <= [1, 2][q])").mask(4)


def test_format_keeps_the_digits_of_a_list() -> None:
    from attnspec.grammar.parser import parse
    from attnspec.grammar.printer import print_file
    from attnspec.text.decoding import source_of

    text = (
        "attention a(x = [8, 1_024, 0.50, -1e-3, 2 * 3]) {\n    attend window(radius = x[0])\n}\n"
    )
    printed = print_file(parse(source_of(text)))
    assert printed == text
    assert parse(source_of(printed)) == parse(source_of(text.replace("1_024", "1024")))


def test_numbers_of_lists_are_in_emitted_modules() -> None:
    import torch

    spec = of("attend window(radius = [1, 3][head])")
    names: dict[str, object] = {}
    exec(compile(spec.emit(), "emitted", "exec"), names)
    q = torch.randn(1, 2, 9, 4)
    assert torch.equal(names["A"]()(q, q, q), spec.compile()(q, q, q))  # type: ignore[operator]


# --- every --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "members"),
    [
        ("every(3)", {0, 3, 6}),
        ("every(3, offset = 1)", {1, 4, 7}),
        ("every(step = 2, offset = 5)", {5, 7}),
        ("every(8)", {0}),
        ("every(3), 1", {0, 1, 3, 6}),
        ("2..3, every(7, offset = 7)", {2, 3, 7}),
        ("every(heads // 2)", {0, 4}),
        ("1, even", {0, 1, 2, 4, 6}),
        ("even, odd", set(range(8))),
        ("odd, every(4), 2..3", {0, 1, 2, 3, 4, 5, 7}),
        ("all, 3", set(range(8))),
    ],
)
@pytest.mark.parametrize("kind", ["layer", "head"])
def test_every(kind: str, scope: str, members: set[int]) -> None:
    text = f"layers 8 heads 8 attend full {kind} {scope} {{ attend self }}"
    spec = of(text)
    for at in range(8):
        layer, head = (at, 0) if kind == "layer" else (0, at)
        assert (spec.mask(3, layer, head).sum() == 3) == (at in members)
    assert f"{kind} {scope} {{" in spec.source


@pytest.mark.parametrize(
    ("scope", "message"),
    [
        ("every(0)", "at least 1, got 0"),
        ("every()", "`every` needs its `step`"),
        ("every(n)", "must be known when the spec is compiled"),
        ("every(2, offset = 8)", "`every` from 8 on is no head: the spec says `heads 8`"),
        ("every(2, ofset = 1)", "did you mean `offset`?"),
        ("every(2.0)", "must be an integer, got 2.0"),
        ("every", "`every` needs its arguments: `every(…)`"),
    ],
)
def test_faults_of_every(scope: str, message: str) -> None:
    assert message in problem(f"heads 8 attend full head {scope} {{ attend self }}")
