"""Every spec of the population in every view: what the package says is what the oracle says."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import interpreted
from oracle import truth
from oracle.program import attention_of
from oracle.scalars import Invalid
from oracle.tree import Attention
from population import BODIES, population, samples, spec_of
from sweeps import few
from views import (
    DECIDED,
    FIGURES,
    KERNELS,
    PAIRS,
    SHAPES,
    SLOW_KERNELS,
    Call,
    Case,
    View,
    check,
    differing,
    errors_of,
    is_decided,
    patterns,
    row_errors,
    step_errors,
    times_weighed,
    written,
)

from attnspec import Spec
from attnspec.analysis.report.inquiry import GRAPH_HEADS
from attnspec.analysis.report.report import NAMES as NAMES_OF_FIGURES
from attnspec.graphs.patterns import PATTERNS
from attnspec.ir.mechanisms import MECHANISMS

__all__ = ["interpreted"]

NAMES = list(population())
LENGTHS = (33, 2, 64, 7, 130, 1, 24)
TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def length(spec: Spec, turn: int) -> int:
    # plain loops over what tensors decide take long
    lengths = (33, 2, 24, 7) if is_decided(spec) else LENGTHS
    return spec.program.fixed_length or lengths[turn % len(lengths)]


def case_of(name: str, turn: int = 0) -> Case:
    """A spec at one length, which its place in the population decides."""
    spec = population()[name]
    case = Case(spec, length(spec, NAMES.index(name) + turn))
    try:
        assert has_mechanism(spec, alone=True) or case.masks is not None
    except Invalid:
        # at another length it has a meaning
        return case_of(name, turn + 1)
    return case


def mechanisms(spec: Spec) -> set[str]:
    return {x.mechanism.name for x in spec.program.attends if x.mechanism}


def has_mechanism(spec: Spec, alone: bool = False) -> bool:
    return any(x.mechanism and not (alone and x.graph) for x in spec.program.attends)


CANCELLING = ("identity", "favor of waves", "waves", "gated waves")
"""Sums of weights of either sign, of which some may be near 0."""


def call_of(case: Case, turn: int) -> Call:
    """A call whose shape and type go by turns."""
    shape = SHAPES[turn % len(SHAPES)]
    kinds = {entry.kind for entry in case.spec.inputs.values()}
    if "numbers" in kinds and shape in ("left", "right", "holes", "several"):
        # of padding the numbers are others than they are given
        shape = "plain"
    if "nystrom" in mechanisms(case.spec) and shape in ("last queries", "one query", "several"):
        # it takes the queries of all positions
        shape = "plain"
    dtype = TYPES[turn // len(SHAPES) % len(TYPES)]
    if NAMES[turn % len(NAMES)] in CANCELLING:
        dtype = torch.float64
    return Call(case, shape, dtype, turn % case.spec.layers)


def kinds(spec: Spec) -> frozenset[str]:
    """The words of the language that a spec is made of."""
    program = spec.program
    found = patterns(spec) | mechanisms(spec) | {entry.kind for entry in program.inputs}
    for attend in program.attends:
        found |= {attend.normalize, *(score.name for score in attend.scores)}
    several = {"layers": spec.layers > 1, "heads": spec.heads, "grid": program.grid}
    several["causal"] = program.causal
    return frozenset(found | {word for word, is_so in several.items() if is_so})


def by_default(names: Collection[str], part: int) -> Collection[Any]:
    """Every spec with a word that none before has, and one part of four of the others, of the zoo
    where words meet for the first time; nine parts go through all lengths, types and backends."""
    words, seen, kept = set[str](), set[frozenset[str]](), list[str]()
    for name in names:
        found = kinds(population()[name])
        again = found in seen and name not in BODIES and name not in SAMPLED
        turn, at = divmod(NAMES.index(name), 9)
        if not found <= words or (turn % 2 == 0 and at % 2 == part and not again):
            kept.append(name)
        words |= found
        seen.add(found)
    return few(names, kept)


SAMPLED = dict(samples())

GRAPHS = [name for name in NAMES if not has_mechanism(population()[name], alone=True)]
WEIGHED = [
    name
    for name, spec in population().items()
    if not has_mechanism(spec)
    and not is_decided(spec)
    and all(x.normalize == "softmax" and not x.scores for x in spec.program.attends)
]


def views_of(spec: Spec) -> dict[str, View]:
    if is_decided(spec):
        if has_mechanism(spec):
            return {}
        # the report has a matrix of its own for `sinkhorn`
        more = () if "sinkhorn(" in spec.source else FIGURES.keys() - {"causal", "useful_flops"}
        return {**DECIDED, **{name: FIGURES[name] for name in more}}
    return PAIRS if has_mechanism(spec) else {**PAIRS, **FIGURES}


@pytest.mark.parametrize("name", by_default(GRAPHS, 0))
def test_pairs_and_figures(name: str) -> None:
    case = case_of(name)
    assert differing(case, views_of(case.spec)) == []
    if case.spec.program.grid is None and not is_decided(case.spec):
        assert differing(Case(case.spec, 0), PAIRS) == []


@pytest.mark.limits("", "tiny")
@pytest.mark.parametrize("name", by_default(NAMES, 1))
def test_kernels(name: str) -> None:
    """What is chosen, and every fourth backend."""
    turn = NAMES.index(name)
    call = call_of(case_of(name), turn)
    found = {kernel: check(call, kernel) for kernel in ("auto", *KERNELS[1 + turn % 4 :: 4])}
    assert {kernel: faults for kernel, faults in found.items() if faults} == {}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("kernel", "name"),
    few(product(SLOW_KERNELS, NAMES), [(x, y) for x, quick in SLOW_KERNELS.items() for y in quick]),
)
def test_kernels_that_are_asked_for_by_name(kernel: str, name: str) -> None:
    turn = NAMES.index(name)
    case = case_of(name)
    # two tiles say what three do
    case = case if case.spec.program.fixed_length else Case(case.spec, min(case.n, 70))
    call = replace(call_of(case, turn), dtype=(torch.float32, torch.float16)[turn % 2])
    assert not check(call, kernel)


@pytest.mark.limits("", "tiny")
@pytest.mark.parametrize("name", by_default(WEIGHED, 0))
def test_every_pair_is_weighed_once(name: str) -> None:
    case, turn = case_of(name, 1), NAMES.index(name)
    for kernel in ("auto", *KERNELS[1 + (turn + 1) % 4 :: 4]):
        times = times_weighed(case, kernel, turn % case.spec.layers)
        if times is not None:
            assert np.abs(times - case.masks[turn % case.spec.layers]).max(initial=0) < 1e-9, kernel


@pytest.mark.limits("", "tiny")
@pytest.mark.parametrize(
    "name", by_default([name for name in NAMES if population()[name].program.causal], 1)
)
def test_steps(name: str) -> None:
    turn = NAMES.index(name)
    case = Case(population()[name], population()[name].program.fixed_length or 33)
    kinds = {entry.kind for entry in case.spec.inputs.values()}
    # rows of scores begin where a sample does
    shape = "plain" if "scores" in kinds else ("plain", "left")[turn % 2]
    call = replace(call_of(case, turn), shape=shape, dtype=torch.float64)
    if mechanisms(case.spec) & {"synthesizer", "gmlp"}:
        with pytest.raises(ValueError, match="which needs all positions at once"):
            step_errors(call)
        return
    if has_mechanism(case.spec, alone=True):
        assert step_errors(call) == []
        return
    if is_decided(case.spec):
        stable = case.spec.analyse(case.n).stable
    else:
        stable = "choices" in kinds or truth.flag("stable", case.masks, case.attention, case.inputs)
    try:
        assert step_errors(call) == []
        refused = ""
    except ValueError as error:
        refused = str(error)
    others = "added to a mechanism|cannot use the input|must hold indices of blocks"
    assert stable == ("step by step would give other results" not in refused), refused
    assert not stable or not refused or re.search(others, refused), refused


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("name", by_default([x for x in NAMES if x not in SAMPLED], 0))
def test_written_modules(name: str) -> None:
    """The emitted class, or the file that needs nothing but torch."""
    turn = NAMES.index(name)
    call = replace(call_of(case_of(name), turn), dtype=torch.float64)
    assert errors_of(call, written(call.case.spec, standalone=turn % 4 > 0)) == []


@pytest.mark.parametrize("dtype", TYPES[2:], ids=str)
@pytest.mark.parametrize(
    "name", few((x for x in NAMES if x not in CANCELLING and not is_decided(population()[x])), 40)
)
def test_rows_in_16_bits(name: str, dtype: torch.dtype) -> None:
    spec = population()[name]
    short = "**" in name or mechanisms(spec) & {"linformer", "synthesizer", "mixer", "gmlp"}
    longest = 130 if short else 500
    call = Call(Case(spec, spec.program.fixed_length or longest), "plain", dtype)
    assert row_errors(call, call.said(call.learning(spec.compile()).to(dtype))) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_everything_at_every_length(name: str) -> None:
    for turn in range(len(SHAPES) * len(TYPES)):
        case = case_of(name, turn)
        if name in GRAPHS and turn < len(LENGTHS):
            assert differing(case, views_of(case.spec)) == []
        call = call_of(case, NAMES.index(name) + turn)
        found = {kernel: check(call, kernel) for kernel in KERNELS}
        assert {kernel: faults for kernel, faults in found.items() if faults} == {}


def test_the_population_has_every_pattern_and_mechanism() -> None:
    programs = [spec.program for spec in population().values()]
    attends = [attend for program in programs for attend in program.attends]
    drawn = {name for spec in population().values() for name in patterns(spec)}
    assert {each.name for each in PATTERNS} <= drawn
    used = {attend.mechanism.name for attend in attends if attend.mechanism}
    assert {each.name for each in MECHANISMS} == used
    assert set(BODIES) <= population().keys()


ELSEWHERE = {
    **dict.fromkeys(GRAPH_HEADS, "analysis/test_sizes_of_mechanisms.py"),
    **dict.fromkeys(("choice", "scoring_flops"), "decided/test_figures_of_choices.py"),
    "order": "analysis/test_order.py: counts over n, growth derived by hand",
    "stable": "graphs/test_stable.py, and the verdicts",
    **dict.fromkeys(
        "break_even eviction bytes flops intensity peak_memory backward_flops".split(),
        "analysis/test_cost.py: what torch counts and allocates",
    ),
}
"""Figures that do not depend on the pairs at one length, and what they are held against."""


def test_no_figure_is_left_out() -> None:
    assert {*FIGURES} & {*NAMES_OF_FIGURES} | {*ELSEWHERE} == {*NAMES_OF_FIGURES}


class Wrong(Case):
    """The spec of a window beside the pairs of another graph."""

    @cached_property
    def attention(self) -> Attention:
        return attention_of(spec_of("attend columns(first(2)) - rows(first(1))").program)


@pytest.mark.parametrize("view", [*PAIRS, *FIGURES])
def test_a_wrong_answer_is_found(view: str) -> None:
    case = Wrong(spec_of("attend window(radius = 1)"), 9)
    if view == "source":
        pytest.skip("compares the package with itself")
    assert differing(case, {view: {**PAIRS, **FIGURES}[view]})


class Broken(torch.nn.Module):
    """A module that computes something else, in one of several ways."""

    def __init__(self, module: torch.nn.Module, fault: str) -> None:
        super().__init__()
        self.module, self.fault = module, fault

    def forward(self, q: Any, k: Any, v: Any, return_lse: bool = False, **rest: Any) -> Any:
        if self.fault == "last key":
            v = torch.cat([v[:, :, :-1], 0 * v[:, :, -1:]], 2)
        if self.fault == "padding":
            rest.pop("key_padding_mask")
        if self.fault in "qkv":
            q, k, v = (
                x.detach() if name == self.fault else x
                for name, x in zip("qkv", (q, k, v), strict=True)
            )
        out, lse = self.module(q, k, v, return_lse=True, **rest)
        if self.fault == "log-sum-exps":
            lse = lse + 1e-4
        if self.fault == "rounding":
            out = out.bfloat16().to(out.dtype)
        return (out, lse) if return_lse else out


@pytest.mark.parametrize(
    "fault", ["last key", "padding", "q", "k", "v", "log-sum-exps", "rounding"]
)
def test_a_wrong_kernel_is_found(fault: str) -> None:
    spec = spec_of("attend window(radius = 5)")
    call = Call(Case(spec, 33), "left" if fault == "padding" else "plain", torch.float32)
    assert errors_of(call, spec.compile()) == []
    assert errors_of(call, Broken(spec.compile(), fault))


def test_a_pair_that_is_weighed_twice_is_found() -> None:
    case = Case(spec_of("attend window(radius = 5)"), 20)
    twice = Case(spec_of("attend window(radius = 6)"), 20)
    assert np.abs(times_weighed(case, "auto", 0) - twice.masks[0]).max() > 0.01


def test_another_choice_is_found() -> None:
    meant = attention_of(spec_of("attend topk(keys = 2)").program)
    assert differing(Case(spec_of("attend topk(keys = 3)"), 9, meant), DECIDED)
