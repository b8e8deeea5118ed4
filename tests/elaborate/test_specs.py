"""From text to meaning: scopes, parameters, names, lists, two sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from goldens import Golden
from population import spec_of

import attnspec
from attnspec import Diagnostic, Spec, SpecError, load, parse
from attnspec.graphs.patterns import PATTERNS


def refused(text: str, **keywords: Any) -> tuple[Diagnostic, ...]:
    with pytest.raises(SpecError) as caught:
        parse(text, **keywords)
    return caught.value.diagnostics


def errors(text: str, given: Mapping[str, Any]) -> list[str]:
    """`CODE place` of each error, the place being the text at fault."""
    found = refused(text, parameters=given)
    return [f"{d.code} {d.span.text if d.span else None}" for d in found]


def radii(body: str) -> list[list[int]]:
    """The radius of every layer and head of a spec of windows."""
    spec = spec_of(body)
    return [
        [int(spec.mask(40, layer, head)[0].sum()) - 1 for head in range(spec.heads or 1)]
        for layer in range(spec.layers)
    ]


def window(radius: object) -> str:
    return f"attend window(radius = {radius})"


def same_again(spec: Spec) -> bool:
    """Whether the spec's text says the same."""
    again = parse(spec.source)
    same = again.fingerprint == spec.fingerprint and again.source == spec.source
    return same and again == spec


@pytest.mark.parametrize(
    ("scope", "covered"),
    [
        ("3", {3}),
        ("0..2", {0, 1, 2}),
        ("0, 2, 4..5", {0, 2, 4, 5}),
        ("even", {0, 2, 4, 6}),
        ("odd", {1, 3, 5, 7}),
        ("all, 3", {*range(8)}),
        ("p..p + 2", {2, 3, 4}),
        ("heads // 2..heads - 1", {4, 5, 6, 7}),
        ("0, 0..1, 1", {0, 1}),
        ("every(3)", {0, 3, 6}),
        ("every(step = 2, offset = 5)", {5, 7}),
        ("every(heads // 2), 1", {0, 1, 4}),
        ("odd, every(4), 2..3", {0, 1, 2, 3, 4, 5, 7}),
    ],
)
@pytest.mark.parametrize("kind", ["layer", "head"])
def test_sets_of_layers_and_heads(kind: str, scope: str, covered: set[int]) -> None:
    body = f"let p = 2 layers 8 heads 8 attend full {kind} {scope} {{ attend self }}"
    spec = spec_of(body)
    places = [(at, 0) if kind == "layer" else (0, at) for at in range(8)]
    assert {at for at in range(8) if spec.mask(3, *places[at]).sum() == 3} == covered
    assert f"{kind} {scope} {{" in spec.source


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            f"layers 2 heads 3 layer 1 {{ head 1 {{ {window(2)} }} {window(3)} }} {window(0)}",
            [[0, 0, 0], [3, 2, 3]],
        ),
        (
            f"layers 2 heads 3 head 1 {{ layer 1 {{ {window(2)} }} }} layer 1 {{ {window(3)} }}"
            f" {window(0)}",
            [[0, 0, 0], [3, 2, 3]],
        ),
        (f"heads 2 head 0 {{ {window(1)} }} {window(2)}", [[1, 2]]),
        (f"heads 4 head 0..1 {{ {window(1)} }} head 2, 3 {{ {window(2)} }}", [[1, 1, 2, 2]]),
        ("layers 2 heads 3 attend window(radius = 2 ** head + layer)", [[1, 2, 4], [2, 3, 5]]),
        # of a head that has no such statement nothing is asked
        ("heads 2 attend self head 1 { attend window(radius = head - 1) }", [[0, 0]]),
        ("layers 2 heads 3 let x = layers * heads attend window(radius = x)", [[6] * 3] * 2),
        ("attend window(radius = layers)", [[1]]),
        (
            "heads 2 head 0 { let c = 1 attend window(radius = c) }"
            " head 1 { let c = 2 attend window(radius = c) }",
            [[1, 2]],
        ),
        ("let l = 1 + 1 layers l heads l * 2 - 1 attend window(radius = head)", [[0, 1, 2]] * 2),
    ],
)
def test_statements_in_their_scopes(body: str, expected: list[list[int]]) -> None:
    assert radii(body) == expected
    assert same_again(spec_of(body))


def test_scopes_have_a_deepest() -> None:
    def nested(deep: int) -> str:
        return "layers 2 attend full " + "layer 0 { " * deep + "attend self" + " }" * deep

    assert spec_of(nested(16)).mask(3).sum() == 3
    assert [d.code for d in refused(f"attention a {{ {nested(17)} }}")] == ["A197"]


def test_scale_score_and_normalize_follow_their_scope() -> None:
    spec = spec_of(
        "layers 2 heads 3 attend full scale 2 score softcap(cap = 5) score alibi()"
        " layer 1 { scale 1 / (head + 1) head 2 { normalize relu score bias() } }"
    )
    attend = spec.program.attend
    assert [attend(0, head).scale for head in range(3)] == [2, 2, 2]
    assert [attend(1, head).scale for head in range(3)] == [1.0, 0.5, 1 / 3]
    assert [score.name for score in attend(0, 2).scores] == ["softcap", "alibi"]
    assert [score.name for score in attend(1, 2).scores] == ["bias"]
    assert [attend(1, head).normalize for head in range(3)] == ["softmax", "softmax", "relu"]


def test_head_and_layer_stay_open_where_they_are_not_declared() -> None:
    spec = spec_of("attend window(radius = 2 ** head + layer)")
    assert spec.heads is None
    assert [int(spec.mask(40, layer=1, head=head)[20].sum()) for head in range(4)] == [5, 7, 11, 19]


def test_equal_heads_share_one_meaning() -> None:
    spec = spec_of("layers 64 heads 64 attend window(radius = head // 32)")
    assert len(spec.program.attends) == 2
    assert spec_of("layers 4096 heads 64 attend full").program.slots[4095] == (0,) * 64


SIZED = "attention a(r = 3, s = r + 1, on = true) { attend window(before = r, after = s) "
SIZED += "| random(keys = 1, per_head = on) }"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({}, {"r": 3, "s": 4, "on": True}),
        ({"r": 7}, {"r": 7, "s": 8, "on": True}),
        ({"r": np.uint8(5), "on": np.bool_(False)}, {"r": 5, "s": 6, "on": False}),
        ({"r": "2 * 4"}, {"r": 8, "s": 9, "on": True}),
        ({"r": "isqrt(n)"}, {"r": "isqrt(n)", "s": "r + 1", "on": True}),
        ({"s": "r * r"}, {"r": 3, "s": 9, "on": True}),
        ({"on": "1 < 0", "r": "4 # a comment"}, {"r": 4, "s": 5, "on": False}),
    ],
)
def test_parameters_are_set(given: dict[str, Any], shown: dict[str, object]) -> None:
    spec = parse(SIZED, parameters=given)
    assert spec.parameters == parse(spec.source).parameters == shown
    assert same_again(spec)
    assert (spec == parse(SIZED)) == (spec.parameters == parse(SIZED).parameters)


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"radius": 3}, ["A216 a"]),
    ({"r": True}, ["A218 true"]),
    ({"r": 2.0}, ["A305 r"]),
    ({"r": ""}, ["A218 "]),
    ({"r": "3 +"}, ["A218 3 +"]),
    ({"r": "3 causal"}, ["A218 3 causal"]),
    ({"r": "3 } attention b {"}, ["A218 3 } attention b {"]),
    ({"r": "3 } graph g = full attention b {"}, ["A218 3 } graph g = full attention b {"]),
    ({"r": "\0"}, ["A102 \0"]),
    ({"r": "3\u202e"}, ["A103 \u202e"]),
    ({"r": "(" * 100_000}, ["A191 ("]),
    ({"r": "1 + 0x10"}, ["A110 0x10"]),
    ({"r": 10**5000}, ["A218 r"]),
    ({"r": 2**63}, ["A218 r"]),
    ({"r": -1}, ["A306 r"]),
    ({"r": "1 // 0"}, ["A308 1 // 0"]),
    ({"r": "foo"}, ["A201 foo"]),
    ({"r": "s"}, ["A201 s"]),
    ({"r": "full"}, ["A218 full"]),
    ({"r": "[3]"}, ["A218 [3]"]),
    ({"r": "n == 3"}, ["A218 n == 3"]),
    ({"r": float("nan")}, ["A218 r"]),
    ({"on": 1}, ["A218 1"]),
    ({"r": "3 +", "s": "0x10", "on": "four"}, ["A201 four", "A218 3 +", "A110 0x10"]),
]


def test_values_that_a_parameter_cannot_have(golden: Golden) -> None:
    shown = []
    for given, expected in WRONG:
        text = SIZED if "s" in given else SIZED.replace("s = r + 1", "s = 1")
        assert errors(text, given) == expected
        for diagnostic in refused(text, parameters=given):
            if all(isinstance(x, str) and x.isprintable() for x in given.values()):
                shown += [line[:120].rstrip() for line in str(diagnostic).splitlines()]
    golden("\n".join(shown) + "\n")


def test_values_of_other_types_are_type_errors() -> None:
    values: tuple[Any, ...] = (None, [None], 1j, b"3", ["a"], [True])
    for value in values:
        with pytest.raises(TypeError, match="`r`"):
            parse(SIZED, r=value)


def test_a_parameter_without_a_value() -> None:
    text = "attention a(r, s = 2 * r) { attend window(before = r, after = s) }"
    assert errors(text, {}) == ["A217 r"]
    assert parse(text, r=2).parameters == {"r": 2, "s": 4}


@pytest.mark.parametrize("value", [2.5, 1e-3, 1e22, np.float64(0.1), np.float32(0.25)])
def test_a_real_parameter(value: float) -> None:
    spec = parse("attention a(cap = 30) { attend full score softcap(cap = cap) }", cap=value)
    assert spec.parameters == {"cap": value}
    assert same_again(spec)


def test_a_parameter_may_be_a_graph_or_a_word_of_a_statement() -> None:
    text = "attention a(g = window(radius = 1), t = first(2)) { attend g | columns(t) }"
    spec = parse(text, g="causal & ~self", t="last(1) | first(1)")
    assert spec.parameters == {"g": "causal & ~self", "t": "last(1) | first(1)"}
    assert same_again(spec)
    meant = spec_of("attend columns(last(1) | first(1)) | (causal - self)")
    assert spec.program.attends == meant.program.attends
    spec = parse(
        "attention a(causal = 2, sequence = 1, extra_tokens = 0, input = 4)"
        " { causal extra_tokens extra_tokens attend block(size = causal, before = sequence)"
        " & window(radius = input) }"
    )
    assert spec.program.causal
    assert same_again(spec)


def test_lets_may_be_anything() -> None:
    spec = spec_of(
        "let a = 2 let b = a * n let g = window(radius = a) let t = first(a) let m = linear()"
        " heads 3 attend g | columns(t) head 1 { let c = b + 1 attend window(radius = c) }"
        " head 2 { let c = g attend c + m }"
    )
    assert spec.mask(9, head=1).all()
    assert spec.program.attend(0, 2).mechanism is not None


def test_inputs_and_grids_are_declared() -> None:
    spec = spec_of("input x: tokens(at_most = 4 * 2) input y: ids attend global(x) | same(y)")
    kinds = {name: (x.kind, x.at_most) for name, x in spec.inputs.items()}
    assert kinds == {"x": ("tokens", 8), "y": ("ids", None)}
    spec = spec_of("sequence grid(isqrt(n), isqrt(n)) attend axial")
    assert spec.mask(16).sum() == 16 * 7
    with pytest.raises(ValueError, match="9"):
        spec.mask(10)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7 // 2 * 2 + 7 % 4", 9),
        ("-7 // 2", -4),
        ("-7 % 4", 1),
        ("2 ** 3 ** 2", 512),
        ("-2 ** 2", -4),
        ("10 - 3 - 2", 5),
        ("17 // 2 % 5 * 3", 9),
        ("1_0", 10),
        ("isqrt(17) + ceil(1.2) + floor(-1.2) + abs(-3)", 7),
        ("min(3, 2, 5) + max(1)", 3),
        ("floor(log2(1024))", 10),
    ],
)
def test_constants_are_computed(text: str, value: int) -> None:
    spec = parse(f"attention a(x = {text}) {{ attend self require edges >= x }}")
    assert spec.parameters == {"x": value}


def test_named_graphs_take_arguments_by_place_name_and_default() -> None:
    text = (
        "graph g(a, b = a + 1, c = 2 * b) = window(before = a, after = b) & window(radius = c)"
        " attention x { heads 4 attend g(1) head 1 { attend g(1, 2, 4) }"
        " head 2 { attend g(b = 5, a = 1) } head 3 { attend g(1, c = 0) } }"
    )
    for head, (a, b, c) in enumerate([(1, 2, 4), (1, 2, 4), (1, 5, 10), (1, 2, 0)]):
        body = f"attend window(before = {a}, after = {b}) & window(radius = {c})"
        assert parse(text).program.attend(0, head) == spec_of(body).program.attend()


def test_named_graphs_take_graphs_tokens_and_inputs() -> None:
    spec = parse(
        "graph both(g, h = transpose(g)) = g | h"
        " graph marked(t, x) = columns(t) & same(x)"
        " attention a { input x: ids input y: tokens"
        " attend both(window(before = 1, after = 0)) | both(marked(y | first(1), x), self) }"
    )
    meant = spec_of(
        "input x: ids input y: tokens attend window(before = 1, after = 0)"
        " | transpose(window(before = 1, after = 0)) | columns(y | first(1)) & same(x) | self"
    )
    assert spec.program.attends == meant.program.attends
    assert same_again(spec)
    # a call may stand inside another of the same name
    assert parse("graph t(g) = transpose(g) attention x { attend t(t(self)) }").mask(2).sum() == 2


@pytest.mark.parametrize("mechanism", ["linear", "favor", "rfa", "taylor", "rbf"])
def test_kernels_may_be_added_to_a_graph(mechanism: str) -> None:
    for body in (f"window(radius = 1) + {mechanism}()", f"{mechanism}() + window(radius = 1)"):
        attend = spec_of(f"attend {body}").program.attend()
        assert attend.graph is not None
        assert attend.mechanism is not None
        assert attend.mechanism.name == mechanism


@pytest.mark.parametrize(
    "body",
    [
        "full | self + linear()",
        "linear() + self | full",
        "full & (linear() + self)",
        "(full | self) & causal + linear()",
        "full - self + linear()",
        "linear() + (full | self) + self",
    ],
)
def test_the_parentheses_that_a_hybrid_needs_are_offered(body: str) -> None:
    (found,) = refused(f"attention a {{ attend {body} }}")
    shown = {f"first join all graphs, then add the mechanism: `(A {x} B) + M`" for x in "|&-"}
    assert found.help in shown
    meant = f"({body.replace('linear()', 'self').replace('+', '|')}) + linear()"
    assert spec_of(f"attend {meant}").program.attend().mechanism is not None


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda each: str(each.name))
def test_wrong_case_is_noticed(pattern: Any) -> None:
    if not pattern.word:
        (found,) = refused(f"attention a {{ attend {pattern.name.capitalize()}(x = 1) }}")
        assert f"`{pattern.name}`" in (found.help or "")


def test_one_of_several_is_chosen_by_name() -> None:
    text = "attention a { attend full } attention b { attend nonsense } attention c { attend self }"
    assert parse(text, name="c").mask(3).sum() == 3
    for name, code in ((None, "A214"), ("C", "A215"), ("b", "A201")):
        (found,) = refused(text, name=name)
        assert found.code == code
    with pytest.raises(SpecError):
        load("bigbird")


@pytest.mark.parametrize(
    ("extents", "axis", "size"),
    [
        ("4, 3", "row", 4),
        ("3, 2", "col", 2),
        ("6, 2, a = 4", "row", 6),
    ],
)
def test_other_boxes_are_written_with_where(extents: str, axis: str, size: int) -> None:
    found = refused(f"attention a {{ sequence grid(7, 8) attend neighborhood({extents}) }}")[0]
    box = f"where(0 <= q.{axis} - k.{axis} < {size})"
    assert f"use `where`: `{box}`" in (found.help or "")
    assert spec_of(f"sequence grid(7, 8) attend {box}").mask(56).sum(1).max() >= size


@pytest.mark.parametrize(
    "body",
    [
        "cross attend transpose(rows(first(2)))",
        "cross input x: tokens attend columns(~x) | transpose(rows(x))",
        "cross input x: length attend prefix(x)",
        "cross input x: choices(size = 4) attend chosen(x)",
        "cross attend topk(mass = 0.5, size = 4, queries = 1)",
        "cross heads 2 attend full head 0 { attend efficient() }",
        "cross attend full score softcap(cap = 5) normalize softmax1",
        "cross attend window(radius = m - n) require rows_nonempty require edges <= m * n",
    ],
)
def test_specs_between_two_sequences_are_accepted(body: str) -> None:
    spec = spec_of(body)
    assert spec.program.cross
    assert same_again(spec)
    one = spec_of("attend full")
    assert one != spec_of("cross attend full")
    assert "cross" not in one.emit()


def test_m_counts_queries_between_two_sequences_alone() -> None:
    text = "graph near(m) = window(radius = m) attention a {{ {} attend near(m = 2) }}"
    assert parse(text.format("cross")).mask(5).sum() == parse(text.format("")).mask(5).sum()
    for code, wrong in (
        ("A204", "attention a { cross let m = 3 attend window(radius = m) }"),
        ("A204", "attention a { cross input m: tokens attend columns(m) }"),
        ("A204", "attention a(m = 3) { cross attend window(radius = m) }"),
        ("A201", "attention a { attend where(q * n < k * m) }"),
    ):
        (found,) = refused(wrong)
        assert (found.code, found.span and found.span.text) == (code, "m")


@pytest.mark.parametrize(
    "body",
    [
        "heads 3 attend window(radius = [1, 3, 5][head])",
        "heads 3 let r = 1 attend window(radius = [r, 3 * r, 4 + r][head])",
        "heads 3 attend where(abs(q - k) <= [1, 3, 5][head])",
        "heads 3 let radii = [5, 3, 1] attend window(radius = radii[heads - 1 - head])",
        "heads 3 attend full head 0..1 { attend window(radius = [1, 3][head]) }"
        " head 2 { attend window(radius = [5][0]) }",
    ],
)
def test_each_head_reads_its_number_of_a_list(body: str) -> None:
    assert radii(body) == [[1, 3, 5]]


def test_a_list_is_a_value_of_a_parameter() -> None:
    text = "attention a(radii = [1, 3, 5]) { heads 3 attend window(radius = radii[head]) }"
    values: tuple[Any, ...] = ("[2, 4, 6]", [2, 4, 6], (2, 4, 6), np.array([2, 4, 6]))
    for given in values:
        spec = parse(text, radii=given)
        assert spec.parameters == {"radii": "[2, 4, 6]"}
        assert same_again(spec)
        assert (spec.mask(12, head=1) == spec_of(window(4)).mask(12)).all()
    passed = "graph near(r, at) = window(radius = r[at]) attention a { attend near([2, 7], 1) }"
    assert (parse(passed).mask(12) == spec_of(window(7)).mask(12)).all()
    assert [d.code for d in refused(text, radii=3)] == ["A218"]
    with pytest.raises(attnspec.AttnSpecError):
        parse(text, radii=[float("nan")])  # type: ignore[arg-type]


def test_lists_are_read_by_position_length_and_head() -> None:
    at = np.arange(40)
    spec = spec_of("attend where(k <= [1, 40, 9][q % 3])")
    assert (spec.mask(40) == (at <= np.array([1, 40, 9])[at % 3][:, None])).all()
    sized = spec_of("attend window(radius = [1, 3][n % 2])")
    assert [int(sized.mask(n)[0].sum()) for n in (40, 41)] == [2, 4]
    # no figure of the report stumbles over it
    assert str(sized.analyse(41))
    for wrong in ("attend where(k <= [1, 2][q])", "attend window(radius = [1, 3][head])"):
        with pytest.raises(SpecError) as caught:
            spec_of(wrong).mask(4, head=2)
        assert caught.value.diagnostics[0].code == "A320"


def test_numbers_of_lists_are_in_written_modules() -> None:
    spec = spec_of("attend window(radius = [1, 3][head])")
    names: dict[str, Any] = {}
    exec(compile(spec.emit(), "written", "exec"), names)
    q = torch.randn(1, 2, 9, 4)
    assert torch.equal(names["Sample"]()(q, q, q), spec.compile()(q, q, q))
