"""From text to meaning: scopes, parameters, names, what may stand where, and how faults come."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from attnspec.elaborate.names import type_of
from attnspec.elaborate.scope import Weight, Weights
from attnspec.graphs.patterns import BY_NAME
from attnspec.ir.program import ArgumentValue, Compound, Leaf, ParameterValue, Tokens
from attnspec.ir.scalars import Apply, Symbol
from attnspec.spec import Spec, parse
from attnspec.text.decoding import source_of
from attnspec.text.diagnostics import SpecError


def spec_of(body: str) -> Spec:
    return parse(f"attention a {{ {body} }}")


def with_values(text: str, given: Mapping[str, ParameterValue]) -> Spec:
    return Spec(source_of(text), parameters=given)


def errors(text: str, **parameters: ParameterValue) -> list[str]:
    """`CODE place` of each error, the place being the text at fault."""
    with pytest.raises(SpecError) as caught:
        with_values(text, parameters)
    return [f"{d.code} {d.span.text if d.span else None}" for d in caught.value.diagnostics]


def faults(body: str) -> list[str]:
    return errors(f"attention a {{ {body} }}")


def helps(text: str, **parameters: ParameterValue) -> list[str | None]:
    with pytest.raises(SpecError) as caught:
        with_values(text, parameters)
    return [d.help for d in caught.value.diagnostics]


def radii(spec: Spec) -> list[list[ArgumentValue]]:
    """The radius of every layer and head of a spec of windows."""
    rows = []
    for layer in range(spec.layers):
        row: list[ArgumentValue] = []
        for head in range(spec.heads or 1):
            graph = spec.program.attend(layer, head).graph
            assert isinstance(graph, Leaf)
            row.append(dict(graph.arguments)["radius"])
        rows.append(row)
    return rows


def window(radius: object) -> str:
    return f"attend window(radius = {radius})"


# --- scopes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "covered"),
    [
        ("3", [3]),
        ("0..2", [0, 1, 2]),
        ("0, 2, 4..5", [0, 2, 4, 5]),
        ("even", [0, 2, 4]),
        ("odd", [1, 3, 5]),
        ("all", [0, 1, 2, 3, 4, 5]),
        ("p", [2]),
        ("p..p + 2", [2, 3, 4]),
        ("heads - 1", [5]),
        ("heads // 2..heads - 1", [3, 4, 5]),
        ("0, 0..1, 1", [0, 1]),
    ],
)
def test_sets_of_heads(scope: str, covered: list[int]) -> None:
    spec = parse(
        f"attention a(p = 2) {{ heads 6 {window(0)} head {scope} {{ {window('1')} }}"
        " require degree <= p + 1 }"
    )
    assert [head for head, radius in enumerate(radii(spec)[0]) if radius == 1] == covered


def test_the_innermost_wins_in_either_order() -> None:
    inner = f"layer 1 {{ head 1 {{ {window(2)} }} {window(3)} }}"
    outer = f"head 1 {{ layer 1 {{ {window(2)} }} }} layer 1 {{ {window(3)} }}"
    for body in (inner, outer):
        spec = spec_of(f"layers 2 heads 3 {body} {window(0)}")
        assert radii(spec) == [[0, 0, 0], [3, 2, 3]]


def test_inner_statements_may_come_first() -> None:
    assert radii(spec_of(f"heads 2 head 0 {{ {window(1)} }} {window(2)}")) == [[1, 2]]


@pytest.mark.parametrize(
    "body",
    [
        "layers 2 heads 2 layer 0 { attend full } head 0 { attend self } attend causal",
        # that a third statement wins in the end does not make the two agree
        "heads 1 head 0 { attend full head 0 { attend causal } } head 0 { attend self }",
        "heads 1 head 0 { head 0 { attend causal } attend full } head 0 { attend self }",
        "heads 1 head 0 { attend full } head 0 { attend self head 0 { attend causal } }",
    ],
)
def test_two_of_one_depth_clash_and_both_are_shown(body: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_of(body)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "A404"
    assert diagnostic.span is not None
    places = {diagnostic.span.text, *(span.text for _, span in diagnostic.related)}
    assert places == {"attend full", "attend self"}
    assert "layer 0, head 0" in diagnostic.message


def test_two_of_one_depth_that_do_not_meet_are_fine() -> None:
    body = f"heads 4 head 0..1 {{ {window(1)} }} head 2, 3 {{ {window(2)} }}"
    assert radii(spec_of(body)) == [[1, 1, 2, 2]]


@pytest.mark.parametrize(
    ("body", "missing"),
    [
        ("heads 2", "nothing is attended in head 0..1"),
        ("", "nothing is attended"),
        ("scale 2", "nothing is attended"),
        ("layers 3 layer 1 { attend full }", "nothing is attended in layer 0, 2"),
        (
            "layers 2 heads 4 layer 0 { attend full } head 0, 2..3 { layer 1 { attend self } }",
            "nothing is attended in layer 1, head 1",
        ),
    ],
)
def test_every_head_needs_an_attend(body: str, missing: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_of(body)
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.code, diagnostic.message) == ("A408", missing)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("attend self head 0 { attend full }", ["A401 0"]),
        ("attend self layer 0 { attend full }", ["A401 0"]),
        ("heads 2 attend self head 2 { attend full }", ["A402 2"]),
        ("heads 2 attend self head 0..2 { attend full }", ["A402 2"]),
        ("heads 4 attend self head 3..1 { attend full }", ["A307 3..1"]),
        ("heads 4 attend self head 0.5 { attend full }", ["A305 0.5"]),
        ("heads 4 attend self head n { attend full }", ["A315 n"]),
        ("heads 4 attend self head full { attend full }", ["A310 full"]),
        ("heads 4 attend self head 0 { head 1 { attend full } }", ["A403 1"]),
        ("heads 1 attend self head odd { attend full }", ["A403 odd"]),
        ("heads 2 head 0 { heads 2 } attend self", ["A405 heads 2"]),
        ("heads 2 head 0 { input x: ids } attend self", ["A405 input x: ids"]),
        ("heads 2 head 0 { require causal } attend self", ["A405 require causal"]),
        ("heads 2 head 0 { causal } attend self", ["A405 causal"]),
    ],
)
def test_faults_of_scopes(body: str, expected: list[str]) -> None:
    assert faults(body) == expected


def test_scopes_have_a_deepest() -> None:
    def nested(deep: int) -> str:
        return "layers 2 attend full " + "layer 0 { " * deep + "attend self" + " }" * deep

    assert spec_of(nested(16)).program.attend(0).graph == Leaf("self", ())
    (fault,) = faults(nested(17))
    assert fault.startswith("A197")


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
    assert attend(0, 0) == attend(0, 1) != attend(1, 0)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ("scale 1 scale 2", "scale 2"),
        ("normalize relu normalize sigmoid", "normalize sigmoid"),
        (
            "heads 2 head 0 { score alibi() } head all { score softcap(cap = 2) }",
            "score softcap(cap = 2)",
        ),
    ],
)
def test_they_clash_like_attends(body: str, place: str) -> None:
    assert faults(f"attend full {body}") == [f"A404 {place}"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("score softcap(cap = 0)", "A306 0"),
        ("score softcap(cap = 1 < 2)", "A306 1 < 2"),
        ("score softcap()", "A303 softcap()"),
        ("score softcap(30)", "A301 30"),
        ("score softcap(cap = 1, cap = 2)", "A304 cap"),
        ("score softcap(top = 1)", "A302 top"),
        ("score relu()", "A317 relu"),
        ("score bias()", "A407 bias()"),
        ("score alibi(slopes = [1, 2])", "A407 [1, 2]"),
        ("heads 3 score alibi(slopes = [1, 2])", "A306 [1, 2]"),
        ("heads 2 score alibi(slopes = [1, n])", "A315 [1, n]"),
        ("heads 1 score alibi(slopes = 2)", "A310 2"),
        ("heads 1 score alibi(slopes = [1e-40])", "A306 [1e-40]"),
        ("heads 2 score bias(buckets = 1)", "A306 1"),
        ("heads 2 score bias(buckets = n)", "A315 n"),
        ("normalize softplus", "A309 softplus"),
        ("scale 1 < 2", "A314 1 < 2"),
        ("scale full", "A310 full"),
        ("heads 2 scale 1 / head", "A308 attend full"),
    ],
)
def test_faults_of_scores(body: str, expected: str) -> None:
    assert faults(f"attend full {body}") == [expected]


# --- layer and head in sizes -------------------------------------------------------------------


def test_head_and_layer_are_numbers_where_they_are_declared() -> None:
    spec = spec_of("layers 2 heads 3 attend window(radius = 2 ** head + layer)")
    assert radii(spec) == [[1, 2, 4], [2, 3, 5]]


def test_head_and_layer_stay_open_where_they_are_not() -> None:
    spec = spec_of("attend window(radius = 2 ** head + layer)")
    assert spec.heads is None
    assert [int(spec.mask(40, layer=1, head=head)[20].sum()) for head in range(4)] == [5, 7, 11, 19]
    assert spec_of("attend where(q - k == head)").mask(5, head=2).sum() == 3


def test_sizes_are_checked_for_every_head() -> None:
    with pytest.raises(SpecError, match=r"A306.*`radius` must be at least 0, got -1 at head 0"):
        spec_of("heads 2 attend window(radius = head - 1)")
    with pytest.raises(SpecError, match=r"A308.*no value at layer 1: division by zero"):
        spec_of("layers 2 attend residue(step = 4 // (1 - layer))")
    # of a head that has no such statement nothing is asked
    spec_of("heads 2 attend self head 1 { attend window(radius = head - 1) }")


def test_equal_heads_share_one_meaning() -> None:
    spec = spec_of("layers 64 heads 64 attend window(radius = head // 32)")
    assert len(spec.program.attends) == 2
    assert spec.program.slots[3] == (0,) * 32 + (1,) * 32


def test_layers_times_heads_is_bounded() -> None:
    started = time.process_time()
    assert spec_of("layers 4096 heads 64 attend full").program.attends[0].graph
    assert faults("layers 4096 heads 4096 attend full") == ["A194 a"]
    assert faults("layers 4097 attend full") == ["A194 4097"]
    assert faults("heads 5000 attend full") == ["A194 5000"]
    with pytest.raises(SpecError, match="A196"):
        spec_of("layers 4096 heads 64 attend window(radius = head + layer)")
    assert time.process_time() - started < 15


# --- parameters --------------------------------------------------------------------------------

SIZED = "attention a(r = 3, s = r + 1, on = true) { attend window(before = r, after = s) "
SIZED += "| random(keys = 1, per_head = on) }"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({}, {"r": 3, "s": 4, "on": True}),
        ({"r": 7}, {"r": 7, "s": 8, "on": True}),
        ({"s": 0}, {"r": 3, "s": 0, "on": True}),
        ({"r": np.int64(5)}, {"r": 5, "s": 6, "on": True}),
        ({"r": np.uint8(5), "on": np.bool_(False)}, {"r": 5, "s": 6, "on": False}),
        ({"r": "2 * 4"}, {"r": 8, "s": 9, "on": True}),
        ({"r": "isqrt(n)"}, {"r": "isqrt(n)", "s": "r + 1", "on": True}),
        ({"s": "r * r"}, {"r": 3, "s": 9, "on": True}),
        ({"on": False}, {"r": 3, "s": 4, "on": False}),
        ({"on": "false", "r": "4 # a comment"}, {"r": 4, "s": 5, "on": False}),
        ({"on": "1 < 0"}, {"r": 3, "s": 4, "on": False}),
    ],
)
def test_overriding(given: dict[str, ParameterValue], shown: dict[str, object]) -> None:
    spec = with_values(SIZED, given)
    assert spec.parameters == shown
    again = parse(spec.source)
    assert again == spec
    assert again.parameters == shown
    assert again.fingerprint == spec.fingerprint


def test_overriding_changes_the_meaning() -> None:
    assert parse(SIZED, r=4) != parse(SIZED)
    assert parse(SIZED, r=3) == parse(SIZED)
    assert parse(SIZED, r=4, s=4) == parse(SIZED.replace("r = 3, s = r + 1", "r = 4, s = 4"))


def test_a_real_parameter() -> None:
    text = "attention a(cap = 30) { attend full score softcap(cap = cap) }"
    values: tuple[Any, ...] = (2.5, 1e-3, 1e22, np.float64(0.1), np.float32(0.25))
    for value in values:
        spec = parse(text, cap=value)
        assert spec.parameters == {"cap": value}
        assert parse(spec.source) == spec
    for bad in (float("nan"), float("inf")):
        assert errors(text, cap=bad) == ["A218 cap"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
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
        ({"r": "n == 3"}, ["A218 n == 3"]),
        ({"on": 1}, ["A218 1"]),
    ],
)
def test_overriding_by_what_cannot_be(
    given: dict[str, ParameterValue], expected: list[str]
) -> None:
    assert errors(SIZED.replace("s = r + 1", "s = 1"), **given) == expected


def test_a_wrong_value_is_shown_as_it_was_given() -> None:
    text = "attention a(radius = 64, on = true, g = full) { attend g & window(radius = radius) "
    text += "& random(keys = 1, per_head = on) }"
    for given, shown in (
        (
            {"radius": "2 * four"},
            "<parameter radius>:1:5: error[A201]: `four` is not defined\n"
            "  1 | 2 * four\n"
            "    |     ^^^^\n"
            "  note: the parameter `radius` is a number, 64 by default",
        ),
        (
            {"on": "3"},
            "<parameter on>:1:1: error[A218]: the value of `on` must be true or false,"
            " got a number\n"
            "  1 | 3\n"
            "    | ^\n"
            "  note: the parameter `on` is true or false, true by default",
        ),
        (
            {"g": "windw(radius = 1)"},
            "<parameter g>:1:1: error[A201]: `windw` is not defined\n"
            "  1 | windw(radius = 1)\n"
            "    | ^^^^^\n"
            "  note: the parameter `g` has the default `full`\n"
            "  help: did you mean `window`?",
        ),
        (
            {"g": "full & (self |"},
            "<parameter g>:1:1: error[A218]: the value of `g` must be one expression\n"
            "  1 | full & (self |\n"
            "    | ^^^^^^^^^^^^^^\n"
            "  note: the parameter `g` has the default `full`",
        ),
    ):
        with pytest.raises(SpecError) as caught:
            parse(text, parameters=given)
        assert str(caught.value) == shown


def test_wrong_values_are_found_together() -> None:
    given = {"r": "3 +", "s": "0x10", "on": "four"}
    assert errors(SIZED, **given) == ["A201 four", "A218 3 +", "A110 0x10"]


def test_the_nearest_parameter_is_suggested() -> None:
    assert helps("attention a(radius = 3) { attend window(radius = radius) }", raduis=4) == [
        "did you mean `radius`?"
    ]


def test_a_parameter_without_a_value() -> None:
    text = "attention a(r, s = 2 * r) { attend window(before = r, after = s) }"
    assert errors(text) == ["A217 r"]
    assert parse(text, r=2).parameters == {"r": 2, "s": 4}


def test_values_of_other_types_are_type_errors() -> None:
    for value in (None, [None], 1j, b"3"):
        with pytest.raises(TypeError, match="the parameter `r`"):
            parse(SIZED, r=value)  # type: ignore[arg-type]


def test_a_parameter_may_be_a_graph() -> None:
    text = "attention a(g = window(radius = 1), t = first(2)) { attend g | columns(t) }"
    spec = parse(text, g="causal & ~self", t="last(1) | first(1)")
    assert spec.parameters == {"g": "causal & ~self", "t": "last(1) | first(1)"}
    assert parse(spec.source) == spec
    assert spec == spec_of("attend columns(last(1) | first(1)) | (causal - self)")


def test_words_of_statements_may_be_parameters() -> None:
    spec = parse(
        "attention a(causal = 2, sequence = 1, extra_tokens = 0, input = 4)"
        " { causal extra_tokens extra_tokens attend block(size = causal, before = sequence)"
        " & window(radius = input) }"
    )
    assert spec.program.causal
    assert parse(spec.source) == spec


# --- names -------------------------------------------------------------------------------------


def test_lets() -> None:
    spec = spec_of(
        "let a = 2 let b = a * n let g = window(radius = a) let t = first(a) let m = linear()"
        " heads 3 attend g | columns(t) head 1 { let c = b + 1 attend window(radius = c) }"
        " head 2 { let c = g attend c + m }"
    )
    assert spec.mask(9, head=1).all()
    assert spec.program.attend(0, 2).mechanism is not None


def test_names_of_one_scope_end_with_it() -> None:
    body = "heads 2 head 0 { let c = 1 attend window(radius = c) } head 1 { %s }"
    assert radii(spec_of(body % "let c = 2 attend window(radius = c)")) == [[1, 2]]
    assert faults(body % "attend window(radius = c)") == ["A201 c"]
    assert faults("let c = 2 " + body % "attend full") == ["A203 c"]


def test_a_name_is_defined_before_it_is_used() -> None:
    assert faults("let a = b let b = 1 attend window(radius = a)") == ["A201 b"]


@pytest.mark.parametrize("name", ["n", "q", "k", "head", "layer", "heads", "layers"])
def test_words_that_no_name_can_be(name: str) -> None:
    assert faults(f"let {name} = 1 attend full") == [f"A204 {name}"]
    assert faults(f"input {name}: ids attend full") == [f"A204 {name}"]
    assert errors(f"attention a({name} = 1) {{ attend full }}") == [f"A204 {name}"]
    assert errors(f"graph g({name}) = full attention a {{ attend g(1) }}") == [f"A204 {name}"]
    assert errors(f"graph {name} = full attention a {{ attend full }}") == [f"A202 {name}"]


def test_layers_and_heads_have_values_after_they_are_declared() -> None:
    assert (
        radii(spec_of("layers 2 heads 3 let x = layers * heads attend window(radius = x)"))
        == [[6] * 3] * 2
    )
    assert radii(spec_of("attend window(radius = layers)")) == [[1]]
    for word in ("layers", "heads"):
        assert faults(f"let x = {word} {word} 3 attend window(radius = x)") == [f"A207 {word}"]
        text = f"attention a(r = {word}) {{ {word} 3 attend window(radius = r) }}"
        assert errors(text) == [f"A207 {word}"]
        assert faults(f"{word} {word} attend full") == [f"A207 {word}"]
    assert faults("attend window(radius = heads)") == ["A207 heads"]


def test_counts_come_from_parameters_and_lets() -> None:
    text = "attention a(h = 4) { let l = h // 2 layers l heads h extra_tokens h - 4 attend full }"
    spec = parse(text, h=6)
    assert (spec.layers, spec.heads, spec.program.extra_tokens) == (3, 6, 2)


# --- inputs and grids --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("input x: token attend full", "A212 token"),
        ("input x: ids(at_most = 3) attend full", "A302 at_most = 3"),
        ("input x: tokens(at_least = 3) attend full", "A302 at_least = 3"),
        ("input x: tokens(3) attend full", "A302 3"),
        ("input x: tokens(at_most = 1, at_most = 2) attend full", "A302 at_most = 2"),
        ("input x: tokens(at_most = -1) attend full", "A306 -1"),
        ("input x: tokens(at_most = n) attend full", "A315 n"),
        ("input x: ids attend global(x)", "A313 x"),
        ("input x: tokens attend same(x)", "A313 x"),
        ("input x: tokens attend prefix(x)", "A313 x"),
        ("input x: ids attend x", "A310 x"),
        ("input x: tokens attend x | full", "A310 x"),
        ("input x: length attend window(radius = x)", "A310 x"),
        ("attend prefix(-1)", "A306 -1"),
        ("attend prefix(1.5)", "A305 1.5"),
        ("sequence line(3) attend full", "A316 line(3)"),
        ("sequence grid(3) attend full", "A316 grid(3)"),
        ("sequence grid(3, H = 3) attend full", "A316 grid(3, H = 3)"),
        ("sequence grid(0, 3) attend full", "A306 0"),
        ("sequence grid(3, 2.0) attend full", "A305 2.0"),
        ("attend axial", "A208 axial"),
        ("attend neighborhood(3, 3)", "A208 neighborhood"),
        ("attend where(q.row == k)", "A208 q.row"),
        ("sequence grid(3, 3) attend where(q.time == k.row)", "A209 q.time"),
        ("sequence grid(3, 3) attend where(n.row == k.row)", "A205 n.row"),
        ("sequence grid(3, 3) attend window(radius = q.row)", "A205 q.row"),
        ("attend window(radius = q)", "A205 q"),
        ("sequence grid(3, 3) attend neighborhood(3, 3, 3)", "A303 neighborhood(3, 3, 3)"),
        ("sequence grid(3, 3) attend neighborhood(3, 2)", "A306 2"),
        ("sequence grid(3, 3) attend neighborhood(3, W = 3)", "A301 W = 3"),
        ("extra_tokens -1 attend full", "A306 -1"),
        ("extra_tokens n attend full", "A315 n"),
        ("extra_tokens 1 extra_tokens 1 attend full", "A406 extra_tokens 1"),
    ],
)
def test_faults_of_inputs_and_grids(body: str, expected: str) -> None:
    assert faults(body) == [expected]


def test_inputs_are_declared_with_their_promise() -> None:
    spec = spec_of("input x: tokens(at_most = 4 * 2) input y: ids attend global(x) | same(y)")
    assert {name: (x.kind, x.at_most) for name, x in spec.inputs.items()} == {
        "x": ("tokens", 8),
        "y": ("ids", None),
    }


def test_grids_may_depend_on_n() -> None:
    spec = spec_of("sequence grid(isqrt(n), isqrt(n)) attend axial")
    assert spec.mask(16).sum() == 16 * 7
    with pytest.raises(ValueError, match="3 x 3 = 9 cells, got n = 10"):
        spec.mask(10)
    spec = spec_of("sequence grid(2, 2, 3) extra_tokens 2 attend axial | self")
    assert spec.mask(14)[0].sum() == 1
    assert spec.mask(14)[2].sum() == 5


# --- mechanisms --------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["linear", "favor", "rfa", "taylor", "rbf"])
def test_kernels_may_be_added_to_a_graph(mechanism: str) -> None:
    for body in (f"window(radius = 1) + {mechanism}()", f"{mechanism}() + window(radius = 1)"):
        attend = spec_of(f"attend {body}").program.attend()
        assert attend.graph is not None
        assert attend.mechanism is not None
        assert attend.mechanism.name == mechanism


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("attend full + fourier()", "A702 +"),
        ("attend full + linformer()", "A702 +"),
        ("attend full + nystrom()", "A702 +"),
        ("attend full + mixer(hidden = 4, max_length = 8)", "A702 +"),
        ("attend linear() + favor()", "A701 +"),
        ("attend full + linear() + favor()", "A701 +"),
        ("attend linear() | full", "A701 |"),
        ("attend linear() & full", "A701 &"),
        ("attend full | self + linear()", "A701 full | self"),
        ("attend full & linear() + causal | self", "A701 linear()"),
        ("attend full - self + linear()", "A701 full - self"),
        ("attend linear() + full + self", "A701 full + self"),
        ("attend full | self + linear() | causal", "A701 linear()"),
        ("attend full - linear()", "A701 -"),
        ("attend ~linear()", "A310 linear()"),
        ("attend transpose(linear())", "A310 linear()"),
        ("attend first(2) + linear()", "A701 +"),
        ("attend full + full", "A312 +"),
        ("attend full + 1", "A312 +"),
        ("attend linear", "A206 linear"),
        ("attend linear(3)", "A301 3"),
        ("attend favor(kind = cos)", "A309 cos"),
        ("attend synthesizer(kind = dense)", "A303 synthesizer(kind = dense)"),
        ("attend mixer()", "A303 mixer()"),
        ("causal attend full + rfa(gated = true)", "A702 +"),
        ("attend full + linear(normalize = none)", "A702 +"),
        ("causal attend nystrom()", "A704 nystrom()"),
        ("attend rfa(gated = true)", "A704 rfa(gated = true)"),
        ("attend linear() score alibi()", "A705 alibi()"),
        ("attend linear() normalize relu", "A705 normalize relu"),
        ("attend full + linear() normalize relu", "A705 normalize relu"),
        ("attend linear() scale 0.3", "A705 scale 0.3"),
        ("attend taylor() scale 0.3", "A705 scale 0.3"),
        ("attend favor() scale -1", "A705 scale -1"),
        ("heads 2 attend full + favor() scale head", "A705 scale head"),
        ("attend ~topk(size = 4, blocks = 1)", "A703 ~topk(size = 4, blocks = 1)"),
        ("attend full - (self | cluster(count = 2))", "A703 self | cluster(count = 2)"),
        ("let g = lsh(buckets = 4) attend full - g", "A703 g"),
    ],
)
def test_what_cannot_be_combined(body: str, expected: str) -> None:
    assert faults(body) == [expected]


@pytest.mark.parametrize(
    ("body", "meant"),
    [
        ("full | self + linear()", "(full | self) + linear()"),
        ("linear() + self | full", "(self | full) + linear()"),
        ("full & (linear() + self)", "(full & self) + linear()"),
        ("(full | self) & causal + linear()", "((full | self) & causal) + linear()"),
        ("full - self + linear()", "(full - self) + linear()"),
        ("linear() + (full | self) + self", "((full | self) | self) + linear()"),
    ],
)
def test_hybrids_without_parentheses_are_written_right(body: str, meant: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_of(f"attend {body}")
    (found,) = caught.value.diagnostics
    assert found.help is not None
    assert f"write `{meant}`" in found.help
    assert spec_of(f"attend {meant}").program.attend().mechanism is not None


def test_graphs_that_the_data_decide_join_unions() -> None:
    body = "attend lsh(buckets = 4) | window(radius = 1) & topk(size = 4, blocks = 1) - self"
    assert spec_of(body).program.attend().graph is not None


def test_scores_and_kernels_stand_together_in_a_sum() -> None:
    attend = spec_of("attend full + linear() score alibi() normalize softmax").program.attend()
    assert [score.name for score in attend.scores] == ["alibi"]


# --- operators and types -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("attend self * full", "A312 *"),
        ("attend 1 | 2", "A312 |"),
        ("attend where((q == k) | (k == q))", "A312 |"),
        ("attend where(q & k)", "A312 &"),
        ("attend where(not q)", "A314 q"),
        ("attend where(q and k == q)", "A314 q"),
        ("attend where((q == k) + 1 == 2)", "A314 q == k"),
        ("attend where((q == k) == 1)", "A314 1"),
        ("attend where(max(q == k, 1) == 1)", "A314 q == k"),
        ("attend where(q in 0..(q == k))", "A314 q == k"),
        ("attend where(q in {1, (q == k)})", "A314 q == k"),
        ("attend where(q in 3)", "A311 3"),
        ("attend where(q in full)", "A311 full"),
        ("attend where(full)", "A310 full"),
        ("attend where(-full == q)", "A310 full"),
        ("attend where(isqrt() == q)", "A303 isqrt()"),
        ("attend where(isqrt(q, k) == q)", "A303 isqrt(q, k)"),
        ("attend where(min(x = q) == q)", "A301 x = q"),
        ("attend global(isqrt)", "A206 isqrt"),
        ("attend global(first)", "A206 first"),
        ("attend transpose", "A206 transpose"),
        ("attend transpose(full, self)", "A303 transpose(full, self)"),
        ("attend shift(full)", "A303 shift(full)"),
        ("attend shift(full, by = 0.5)", "A305 0.5"),
        ("attend shift(full, by = first(1))", "A310 first(1)"),
        ("attend global(first(1) | full)", "A310 first(1)"),
        ("attend global(first(1) + last(1))", "A312 +"),
        ("attend first(1)", "A310 first(1)"),
        ("attend 3", "A310 3"),
        ("attend r(3)", "A201 r"),
        ("let r = 3 attend window(radius = r(2))", "A210 r"),
    ],
)
def test_faults_of_expressions(body: str, expected: str) -> None:
    assert faults(body) == [expected]


def test_scalar_types() -> None:
    n, k = Symbol("n"), Symbol("k")
    assert type_of(Apply("//", (n, 2))) == "integer"
    assert type_of(Apply("/", (n, 2))) == "real"
    assert type_of(Apply("**", (2, Symbol("head")))) == "integer"
    assert type_of(Apply("**", (2, Apply("-", (n, 1))))) == "real"
    assert type_of(Apply("max", (n, 0.5))) == "real"
    assert type_of(Apply("floor", (Apply("sqrt", (n,)),))) == "integer"
    assert type_of(Apply("within", (k, 0, n))) == "boolean"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7 // 2 * 2 + 7 % 4", 9),
        ("-7 // 2", -4),
        ("-7 % 4", 1),
        ("2 ** 3 ** 2", 512),
        ("-2 ** 2", -4),
        ("10 - 3 - 2", 5),
        ("isqrt(17) + ceil(1.2) + floor(-1.2) + abs(-3)", 7),
        ("min(3, 2, 5) + max(1)", 3),
        ("floor(log2(1024))", 10),
    ],
)
def test_constants_are_computed(text: str, value: int) -> None:
    spec = parse(f"attention a(x = {text}) {{ attend self require edges >= x }}")
    assert spec.parameters == {"x": value}


def test_window_says_how_many_keys_each_way_keeps() -> None:
    (advice,) = helps("attention a { attend window(512) }")
    assert advice is not None
    assert "`window(radius = 512)` keeps 1025 keys on both sides" in advice
    assert "`window(before = 511, after = 0)` keeps the last 512" in advice
    spec = spec_of("attend window(radius = 512) require degree == 1025 at n = 2000")
    assert spec.check() == []


# --- how errors come ---------------------------------------------------------------------------


def test_independent_errors_come_together_in_the_order_of_the_text() -> None:
    text = """
    graph g(r) = windw(radius = r)
    attention a(p = m) {
        let x = 1 // 0
        heads 2.5
        input y: token
        attend window(radius = z) | g(1) | residue(step = 0, size = 1)
        scale full
        require degree <= w
        require cusal
    }
    """
    assert errors(text) == [
        "A201 windw",
        "A201 m",
        "A308 1 // 0",
        "A305 2.5",
        "A212 token",
        "A201 z",
        "A306 0",
        "A302 size",
        "A310 full",
        "A201 w",
        "A601 cusal",
    ]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("let x = y attend window(radius = x) require degree <= x", ["A201 y"]),
        ("heads 2 head 0 { let r = y attend window(radius = r) } attend self", ["A201 y"]),
        ("heads 5000 attend window(radius = heads) head 3 { attend self }", ["A194 5000"]),
        ("layers 0 attend window(radius = layers) layer 3 { attend self }", ["A306 0"]),
        ("heads 0 attend full score bias()", ["A306 0"]),
        ("sequence grid(0, 3) attend axial | where(q.row == 1)", ["A306 0"]),
        ("input x: token attend global(x)", ["A212 token"]),
        ("let r = 1 let r = full attend window(radius = r) | r", ["A203 r"]),
        ("heads 2 head 7 { attend nonsense }", ["A402 7"]),
        ("heads 2 attend x head 0 { attend self }", ["A201 x"]),
    ],
)
def test_one_fault_makes_no_others(body: str, expected: list[str]) -> None:
    assert faults(body) == expected


def test_a_wrong_parameter_makes_no_others() -> None:
    assert errors("attention a(r = x) { attend window(radius = r) }") == ["A201 x"]
    assert errors("attention a(r) { attend window(radius = r) }") == ["A217 r"]


def test_one_fault_of_a_graph_is_said_once() -> None:
    text = (
        "graph g(r) = windw(radius = r) attention a { heads 2 attend g(1) head 1 { attend g(2) } }"
    )
    assert errors(text) == ["A201 windw"]


# --- named graphs ------------------------------------------------------------------------------


def test_named_graphs_take_arguments_by_place_name_and_default() -> None:
    text = (
        "graph g(a, b = a + 1, c = 2 * b) = window(before = a, after = b) & window(radius = c)"
        " attention x { heads 4 attend g(1) head 1 { attend g(1, 2, 4) }"
        " head 2 { attend g(b = 5, a = 1) } head 3 { attend g(1, c = 0) } }"
    )
    graphs = [parse(text).program.attend(0, head).graph for head in range(4)]
    wanted = [(1, 2, 4), (1, 2, 4), (1, 5, 10), (1, 2, 0)]
    for graph, (a, b, c) in zip(graphs, wanted, strict=True):
        body = f"attend window(before = {a}, after = {b}) & window(radius = {c})"
        assert graph == spec_of(body).program.attend().graph


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("graph g(a) = window(radius = a) attention x { attend g }", ["A303 g"]),
        ("graph g(a) = window(radius = a) attention x { attend g() }", ["A303 g()"]),
        ("graph g(a) = window(radius = a) attention x { attend g(1, 2) }", ["A302 2"]),
        ("graph g(a) = window(radius = a) attention x { attend g(b = 2) }", ["A302 b"]),
        ("graph g(a) = window(radius = a) attention x { attend g(1, a = 2) }", ["A304 a"]),
        ("graph g = 3 attention x { attend g }", ["A310 3"]),
        ("graph g = linear() attention x { attend g }", ["A310 linear()"]),
        ("graph g = window(radius = r) attention x(r = 1) { attend g }", ["A201 r"]),
        ("graph g = same(y) attention x { input y: ids attend g }", ["A313 y"]),
        ("graph g = where(q < k) attention x { attend where(g) }", ["A310 g"]),
    ],
)
def test_faults_of_named_graphs(text: str, expected: list[str]) -> None:
    found = errors(text)
    # an undefined name stands before what becomes of it
    assert found[-len(expected) :] == expected or found[: len(expected)] == ["A201 y"]


def test_named_graphs_take_graphs_tokens_and_inputs() -> None:
    text = (
        "graph both(g, h = transpose(g)) = g | h"
        " graph marked(t, x) = columns(t) & same(x)"
        " attention a { input x: ids input y: tokens"
        " attend both(window(before = 1, after = 0)) | both(marked(y | first(1), x), self) }"
    )
    spec = parse(text)
    wanted = spec_of(
        "input x: ids input y: tokens attend window(before = 1, after = 0)"
        " | transpose(window(before = 1, after = 0)) | columns(y | first(1)) & same(x) | self"
    )
    assert spec == wanted
    assert parse(spec.source) == spec


def test_a_graph_may_not_call_itself() -> None:
    text = "graph a = b graph b = c | self graph c = transpose(a) attention x { attend self | a }"
    with pytest.raises(SpecError) as caught:
        parse(text)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "A211"
    assert "a -> b -> c -> a" in diagnostic.message
    assert [span.text for _, span in diagnostic.related] == ["a"]
    # with a graph for an argument a call may stand inside another of the same name
    assert parse("graph t(g) = transpose(g) attention x { attend t(t(self)) }").mask(2).sum() == 2


def doubling(step: str, first: str, steps: int, last: str) -> str:
    lines = [first, *(step.replace("@1", str(i + 1)).replace("@", str(i)) for i in range(steps))]
    return "\n".join(lines) + "\n" + last.replace("@", str(steps))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (
            doubling(
                "graph g@1 = g@ | transpose(g@)",
                "graph g0 = causal",
                60,
                "attention a { attend g@ }",
            ),
            "A196",
        ),
        (
            doubling(
                "graph g@1(x) = g@(g@(x))", "graph g0(x) = x", 60, "attention a { attend g@(full) }"
            ),
            "A196",
        ),
        (
            doubling(
                "let g@1 = g@ - transpose(g@)", "attention a { let g0 = causal", 60, "attend g@ }"
            ),
            "A196",
        ),
        (
            doubling(
                "let x@1 = x@ + x@", "attention a { let x0 = n", 60, "attend window(radius = x@) }"
            ),
            "A196",
        ),
        (
            doubling(
                "let t@1 = t@ & first(@) | t@",
                "attention a { let t0 = first(n)",
                60,
                "attend global(t@) }",
            ),
            "A196",
        ),
        (
            doubling(
                "let g@1 = g@ & ~window(radius = @) | full",
                "attention a { let g0 = self",
                2000,
                "attend g@ }",
            ),
            "A197",
        ),
        (
            doubling(
                "let x@1 = 2 * x@", "attention a { let x0 = n", 2000, "attend window(radius = x@) }"
            ),
            "A197",
        ),
        (
            doubling("graph g@1 = g@", "graph g0 = self", 100, "attention a { attend g@ }"),
            "A197",
        ),
    ],
    ids=["graphs", "calls", "lets", "scalars", "tokens", "deep", "deep scalars", "nested calls"],
)
def test_names_cannot_multiply_without_end(text: str, code: str) -> None:
    started = time.process_time()
    found = errors(text)
    assert [fault[:4] for fault in found] == [code]
    assert time.process_time() - started < 8


def test_what_the_limits_allow() -> None:
    nested = doubling("graph g@1 = g@", "graph g0 = self", 60, "attention a { attend g@ }")
    assert parse(nested).mask(3).sum() == 3
    wide = " | ".join(f"window(before = {i}, after = 0)" for i in range(3000))
    assert len(spec_of(f"attend {wide}").program.attend().graph.terms) == 3000  # type: ignore[union-attr]
    long = " + ".join(["n"] * 99)
    assert spec_of(f"attend window(radius = {long})").mask(3).all()


def test_weights_count_shared_parts_every_time() -> None:
    weights = Weights()
    scalar = Apply("+", (Symbol("n"), 1))
    leaf = Leaf("window", (("radius", scalar),))
    assert weights.of(3) == weights.of(Symbol("n")) == Weight(0, 0)
    assert weights.of(scalar) == Weight(1, 1)
    assert weights.of(leaf) == Weight(2, 2)
    both = Compound("|", (leaf, leaf))
    assert weights.of(both) == Weight(5, 3)
    assert weights.of(Compound("shift", (both, both), scalar)) == Weight(12, 4)
    assert weights.of(Tokens("positions", (scalar, 4))) == Weight(2, 2)


# --- suggestions -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(name for name in BY_NAME if not BY_NAME[name].word))
def test_wrong_case_is_noticed(name: str) -> None:
    text = f"attention a {{ attend {name.capitalize()}(x = 1) }}"
    assert helps(text) == [f"did you mean `{name}`?"]


def test_names_of_the_spec_are_suggested() -> None:
    text = "graph ring = full attention a(width = 3) { let height = 2 input mark: tokens %s }"
    for body, wanted in (
        ("attend rign", "ring"),
        ("attend window(radius = widht)", "width"),
        ("attend window(radius = heigth)", "height"),
        ("attend global(makr)", "mark"),
        ("attend where(laeyr == q)", "layer"),
    ):
        assert helps(text % body) == [f"did you mean `{wanted}`?"]
    assert helps(text % "attend xyzzyx") == [None]


# --- files of several attentions ---------------------------------------------------------------


def test_one_of_several_is_chosen_by_name() -> None:
    text = "attention a { attend full } attention b { attend nonsense } attention c { attend self }"
    assert parse(text, name="c").mask(3).sum() == 3
    assert errors(text) == ["A214 b"]
    with pytest.raises(SpecError) as caught:
        parse(text, name="C")
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.code, diagnostic.help) == ("A215", "did you mean `c`?")
    assert diagnostic.span is not None
    assert diagnostic.span.column == len("attention a")
    with pytest.raises(SpecError, match="A201"):
        parse(text, name="b")
    assert errors("graph g = full") == ["A213 "]
