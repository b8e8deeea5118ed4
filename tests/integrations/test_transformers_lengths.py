"""Specs whose rows depend on the length, inside models: refused beside a cache, warned of beside
padding, in the words that a step has for them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator

import pytest
import torch
from tiny_models import (
    TOLERANCE,
    bert,
    difference,
    hidden,
    llama,
    named,
    names_restored,
    padded,
    tokens,
    transformers,
)

import attnspec

UNSTABLE = [
    ("window(before = isqrt(n), after = 0)", "a number in place of `isqrt(n)`"),
    ("window(before = 2, after = 0) | columns(last(4))", "other tokens at every length"),
    ("self | expander(degree = 4)", "`random(keys = …)` under the statement `causal`"),
    ("where(q - k <= n // 4)", "compare q and k with numbers"),
]
STABLE = [
    "self | random(keys = 3, seed = 2)",
    "self | random_blocks(size = 3, blocks = 2, seed = 5)",
    "window(before = 4, after = 0) | columns(first(2))",
    "block(size = 4)",
    "window(before = min(n, 99), after = 0)",
]


@pytest.fixture(autouse=True)
def _no_names_left() -> Iterator[None]:
    with names_restored():
        yield


def causal(graph: str) -> str:
    return f"attention a {{ causal attend {graph} }}"


@pytest.mark.parametrize(("graph", "words"), UNSTABLE)
def test_generation_with_rows_that_change_is_refused(graph: str, words: str) -> None:
    model, ids = llama(named(causal(graph))), tokens(2, 9)
    with pytest.raises(attnspec.AttnSpecError, match="same row q at every n > q") as caught:
        model.generate(ids, max_new_tokens=4, do_sample=False)
    assert words in str(caught.value)
    # a step of the module says the same, with the same term and repair
    module = attnspec.parse(causal(graph)).compile()
    with pytest.raises(ValueError, match=re.escape(str(caught.value))):
        module.step(*torch.randn(3, 1, 2, 3, 4))


@pytest.mark.parametrize(("graph", "_words"), UNSTABLE)
def test_without_a_cache_they_run(graph: str, _words: str) -> None:
    model, ids = llama(named(causal(graph))), tokens(2, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hidden(model, ids)
    assert model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=False).shape == (2, 12)


@pytest.mark.parametrize("graph", STABLE)
def test_generation_in_steps_gives_the_rows_of_the_whole_pass(graph: str) -> None:
    model, ids = llama(named(causal(graph))), tokens(2, 20)
    cache, parts = transformers.DynamicCache(config=model.config), []
    with torch.no_grad():
        for start, stop in ((0, 7), (7, 8), (8, 15), (15, 20)):
            out = model(ids[:, start:stop], past_key_values=cache, use_cache=True)
            parts.append(out.logits)
    assert difference(torch.cat(parts, 1), hidden(model, ids)) < TOLERANCE


def test_the_whole_pass_is_another_where_rows_change() -> None:
    # what the refusal prevents
    for graph, _ in UNSTABLE:
        model, ids = llama(named(causal(graph))), tokens(2, 20)
        whole = hidden(model, ids)
        apart = [difference(whole[:, n - 1], hidden(model, ids[:, :n])[:, -1]) for n in (5, 9, 15)]
        assert max(apart) > 0.01


def test_a_layer_that_is_stable_may_go_on_beside_one_that_is_not() -> None:
    text = """attention a { layers 3 causal attend window(before = 3, after = 0)
        layer 2 { attend columns(last(2)) | self } }"""
    with pytest.raises(attnspec.AttnSpecError, match=r"`columns\(last\(2\)\)`"):
        llama(named(text)).generate(tokens(1, 5), max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("attention a { attend self | random(keys = 3) }", "`random(keys = 3)` draws among all n"),
        (
            "attention a { attend self | random_blocks(size = 4, blocks = 1) }",
            "under the statement `causal`",
        ),
        ("attention a { attend self | expander(degree = 2) }", "draws cycles through all n"),
        ("attention a { attend self | columns(last(3)) }", "`columns(last(3))` reads `last(3)`"),
        ("attention a { attend window(radius = isqrt(n)) }", "in place of `isqrt(n)`"),
    ],
)
def test_padding_beside_rows_that_change_warns_once(text: str, words: str) -> None:
    model, ids, mask = bert(named(text)), tokens(3, 13), padded(13, left=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = hidden(model, ids, mask)
        hidden(model, ids, mask)
    (only,) = [str(each.message) for each in caught if "padded sample" in str(each.message)]
    assert words in only
    # and it is so: the sample of 8 tokens is another alone
    assert difference(found[1:2, :8], hidden(model, ids[1:2, :8])) > 0.01


@pytest.mark.parametrize(
    "text",
    [
        "attention a { attend full }",
        "attention a { attend window(radius = 2) | global(first(2)) }",
        "attention a { attend block(size = 4, before = 1, after = 1) }",
        "attention a { attend shift(causal, by = 1) | self }",
        "attention a { causal attend self | random(keys = 3) }",
        "attention a { causal attend self | random_blocks(size = 3, blocks = 2) }",
    ],
)
def test_padding_on_the_right_changes_nothing_where_pairs_are_steady(text: str) -> None:
    model, ids, mask = bert(named(text)), tokens(3, 13), padded(13, left=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = hidden(model, ids, mask)
    assert difference(found[1:2, :8], hidden(model, ids[1:2, :8])) < TOLERANCE


def test_draws_count_from_padding_on_the_left() -> None:
    text = "attention a { causal attend self | random(keys = 3) }"
    ids, mask = tokens(3, 13), padded(13, left=True)
    with pytest.warns(UserWarning, match="draws by them, and they count from the padding"):
        hidden(llama(named(text)), ids, mask)
