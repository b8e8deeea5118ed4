"""What people from other systems write, and the words that get them on."""

from __future__ import annotations

import re

import numpy as np
import pytest
from zoo import FILES

import attnspec
from attnspec.elaborate.foreign_words import SYSTEMS
from attnspec.graphs.stack import Stack
from attnspec.text.diagnostics import AttnSpecError, SpecError


def message(body: str) -> str:
    with pytest.raises(SpecError) as caught:
        attnspec.parse(f"attention a {{ {body} }}")
    return str(caught.value)


@pytest.mark.parametrize(
    ("body", "caret", "said"),
    [
        ("attend where(doc[q] == doc[k])", "doc[q]", "write `same(doc)` for equal labels"),
        ("attend where(doc[q_idx] == doc[kv_idx])", "doc[q_idx]", "declare `input doc: ids`"),
        ("input doc: ids attend where(doc[q] == doc[k])", "doc[q]", "write `same(doc)`"),
        ("input t: numbers attend where(t[q] < 3)", "t[q]", "write `t(q)` and `t(k)`"),
        ("input m: tokens attend where(m[k])", "m[k]", "`columns(m)` those whose key is"),
        ("attend window(radius = 3) | sink(4)", "sink", "`columns(first(c))`"),
        ("attend attention_sinks(4)", "attention_sinks", "`columns(first(c))`"),
        ("attend alibi()", "alibi", "the statement `score alibi(…)` beside `attend`"),
        ("attend full + softcap(30)", "softcap", "the statement `score softcap(…)`"),
        ("attend softmax1", "softmax1", "the statement `normalize softmax1`"),
        ("attend rope()", "rope", "rotated in q and k before the call"),
        ("attend global(cls)", "cls", "`global(first(1))`"),
        ("attend global([0])", "[0]", "`first(c)`, `last(c)`"),
        ("attend full & same(document)", "document", "`input document: ids`, then"),
        ("input document: ids attend same(documents)", "documents", "did you mean `document`?"),
        ("input doc: ids attend full & doc", "doc", "`same(doc)`, or `doc(q)` and `doc(k)`"),
        ("input p: length attend columns(p)", "p", "declare it as `tokens`; an input of kind"),
        ("input p: length attend columns(first(p))", "p", "is read by `prefix(p)`"),
        ("heads 2 attend window(radius = h)", "h", "did you mean `head`?"),
        ("attend dilated(radius = 4, dilation = 2)", "dilation", "did you mean `step`?"),
        ("attend ancestors(3)", "ancestors", "`attnspec zoo tree_decoding`"),
        ("attend relative(32)", "relative", "the statement `score bias()`"),
        ("attend swa(4)", "swa", "did you mean `window`?"),
        ("attend block_causal(size = 4)", "block_causal", "by names like `block_causal`"),
        ("attend causal(full)", "full", "`&` keeps the pairs of two graphs: `causal & …`"),
        ("attend full require causal()", None, "`require causal`"),
        ("attend where(k % 2 == 0 & q - k < 4)", "<", "`and` and `or` join comparisons"),
        ("attend where(k == q == 3)", "==", "write `a == b and b == c`"),
        ("// all\nattend full", "//", "`#` starts a comment"),
        ("attend bigbird()", "bigbird", "`attnspec zoo` has some, by names like `bigbird`"),
        ("attend flash", "flash", "chosen by the planner"),
        ("attend mask_mod(q < k)", "mask_mod", "`where(…)` takes a predicate"),
        ("attend a()", "a", "`graph a(…) = …` names a graph"),
        ("layers 3 attend full layer 0-2 { attend self }", "0-2", "write `0..2` for a range"),
        ("heads 8 attend full head 5-3 { attend self }", "5-3", "write `3..5` for a range"),
        ("heads 8 attend full head 0,3.. { attend self }", "{", "`3..N`, the last one included"),
        ("attend full head 0:2 { attend self }", ":", "a range is `0..N`"),
        ("heads 2 attend full head h { attend self }", "h", "`every(3)` and `all` name heads"),
        ("heads 2 head rest { attend self }", "rest", "outside of the blocks is for the heads"),
        ("heads 8 attend full head -1 { attend self }", "-1", "`head 7` is the one that -1 names"),
        ("heads 8 attend full head 0 and 2 { attend self }", "and", "commas join them"),
        ("heads 2 head 0, even attend full", "attend", "stands in braces: `{ attend … }`"),
        ("layers 2 attend full layer Even { attend self }", "Even", "did you mean `even`?"),
        ("attend full heads h { attend self }", "{", "`head 0 { … }` what one does"),
        ("heads 2 attend full heads 0 { attend self }", "{", "`heads N` says how many there are"),
        ("layers 2 layers 0 { attend self }", "{", "`layer 0 { … }` what one does"),
        ("attend full alibi()", "alibi", "write `score alibi(…)`"),
        ("attend full softcap(cap = 30)", "softcap", "write `score softcap(…)`"),
        ("attend window(radius = [][head])", "]", "a list has one number at least: `[8, 16]`"),
        ("causal = true attend full", "=", "the statement is `causal` alone"),
        ("causal true attend full", "true", "the statement is `causal` alone"),
        ("cross = true attend full", "=", "the statement is `cross` alone"),
        ("attend same(docs)", "docs", "declare it: `input docs: ids`"),
        ("attend global(cls)", "cls", "declare it: `input cls: tokens`"),
        ("attend prefix(prompt)", "prompt", "declare it: `input prompt: length`"),
        ("sequence 256 attend full", "256", "n is known when it is called"),
        ("rope attend full", "rope", "rotated in q and k before the call"),
        ("dropout 0.1 attend full", "dropout", "`module(q, k, v, dropout_p = 0.1)`"),
        ("attend self and full", "and", "`and` stands between comparisons, got a graph"),
        ("attend window(radius = 0.1 * n)", "0.1 * n", "`floor(…)` rounds"),
        ("attend where(1 if q < k else 0)", "if", "there is no `if` in an expression"),
        ("attend where(if q < k)", "if", "write `a and b or not a and c`"),
        ("attend where(time <= 3)", "time", "write `q.time` or `k.time`; of tokens declare"),
        ("input time: numbers attend where(time <= 3)", "time", "write `time(q)` and `time(k)`"),
        ("input t: numbers attend where(t(q - 1) < 3)", "t(q - 1)", "at the query or the key"),
        ("input t: numbers attend window(radius = t(q))", "t(q)", "only inside `where(…)`"),
        (
            "input t: numbers attend where(sqrt(t(q)) < 3)",
            None,
            "`sqrt` may differ in its last bit",
        ),
        ("input t: numbers attend where(9 // t(q) < 3)", None, "the same for all pairs"),
        ("input t: numbers attend where(t(q) % 2.5 < 1)", None, "divides by whole numbers"),
        ("input t: numbers attend where(t(q) ** 0.5 < 1)", None, "an exponent from 0 to 8"),
        ("input t: ids attend where([1, 2][t(q)] < k)", None, "a list is read by `layer`, `head`"),
        ("input t: number attend full", "number", "did you mean `numbers`?"),
        ("input t: numbers attend same(t)", "t", "an input of kind `ids` is needed"),
    ],
)
def test_what_is_said(body: str, caret: str | None, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        attnspec.parse(f"attention a {{ {body} }}")
    assert said in str(caught.value)
    if caret is not None:
        (span,) = {d.span for d in caught.value.diagnostics[:1]}
        assert span is not None
        assert span.source.text[span.start : span.end] == caret


def test_no_pattern_is_guessed_where_the_meaning_is_known() -> None:
    assert "sinkhorn" not in message("attend sink(4)")
    # where a paper's word has one meaning here it is still told
    assert "`same(document)`" in message("attend document(3)")
    assert "did you mean `lsh`?" in message("attend reformer()")


def test_an_attention_is_no_token() -> None:
    with pytest.raises(SpecError, match=r"`global\(first\(1\)\)`"):
        attnspec.parse("attention cls { attend window(radius = 4) | global(cls) }")


def test_what_is_no_spec_says_where_one_is() -> None:
    with pytest.raises(SpecError, match=r"`attnspec.load\(path\)` reads one"):
        attnspec.parse("near.attn")
    with pytest.raises(SpecError, match=r'`attnspec.zoo\("bigbird"\)`'):
        attnspec.load("bigbird")


def test_systems_that_are_named_are_in_the_zoo() -> None:
    stems = [path.stem for path in FILES]
    assert not [word for word in SYSTEMS if not any(stem.startswith(word) for stem in stems)]


def test_only_the_name_of_an_input_is_to_be_declared() -> None:
    assert "declare" not in message("attend global(first(cc))")
    with pytest.raises(SpecError) as caught:
        attnspec.parse("graph g() = same(docs) attention a { attend g() }")
    assert "declare" not in str(caught.value)


def test_a_grid_says_its_one_length() -> None:
    spec = attnspec.parse("attention a { sequence grid(14, 14) extra_tokens 1 attend axial }")
    with pytest.raises(AttnSpecError, match="got n = 64: its one length is 197, which") as no:
        Stack(spec.program).mask(64)
    assert "without -n" in str(no.value)


@pytest.mark.parametrize(
    "extents", ["4, 3", "H = 3, W = 3", "3, 3, stride = 2", "6, 2, stride = 4"]
)
def test_other_boxes_are_said_with_where(extents: str) -> None:
    grid = "sequence grid(7, 8) attend"
    (text,) = re.findall("write `(where.*)`", message(f"{grid} neighborhood({extents})"))[:1]
    found = attnspec.parse(f"attention a {{ {grid} {text} }}").mask(56).reshape(7, 8, 7, 8)
    height, width, *rest = map(int, re.findall(r"\d+", extents))
    stride = rest[0] if rest else 1
    for row, col in np.ndindex(7, 8):
        first = [
            min(max(at // stride * stride + stride // 2 - size // 2, 0), most - size)
            for at, size, most in ((row, height, 7), (col, width, 8))
        ]
        meant = np.zeros((7, 8), bool)
        meant[first[0] : first[0] + height, first[1] : first[1] + width] = True
        assert (found[row, col] == meant).all()
    if stride == 1 and height % 2 and width % 2:
        named = attnspec.parse(f"attention a {{ {grid} neighborhood({height}, {width}) }}")
        assert (named.mask(56) == found.reshape(56, 56)).all()
