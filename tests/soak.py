"""`python -m soak --minutes 10 --seed 1 --processes 2`: random specs until the time is over.

Everything that the package says of a spec is held against the oracle. What is wrong is printed as
the smallest spec that shows it; a line of JSON stands at the end, and it ends with 1 if there was
one. A refusal is right where the oracle refuses too, or where the language allows it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from oracle import truth
from oracle.meaning import masks, slot
from oracle.scalars import Invalid
from oracle.tree import Attention, Claim, text
from population import sample_of
from specs import specs, ten
from views import FIGURES, KERNELS, PAIRS, SHAPES, Call, Case, check, differing, step_errors

from attnspec import SpecError, parse

SECONDS = 240
"""A spec that takes longer, at its small lengths, is wrong."""

CHECKED = Counter[str]()
"""How often each thing was examined."""


class Finding(AssertionError):
    """What is wrong with a spec."""

    def __init__(self, spec: Attention, said: str) -> None:
        set_ = "".join(f"{key} = {value} " for key, value in spec.overrides)
        super().__init__(f"{said}\n{set_ and 'with ' + set_}\n{text(spec)}")


def has(spec: Attention, kind: str) -> bool:
    return any(each.kind == kind for top in spec.statements() for each in top.walk())


def lengths(spec: Attention) -> st.SearchStrategy[int]:
    """Short lengths, those that a grid has, and now and then longer ones."""
    first = [int(each.parts[0]) for each in spec.grid if each.kind == "number"]  # type: ignore[arg-type]
    if first and len(first) == len(spec.grid):
        return st.just(int(np.prod(first)) + spec.extra_tokens)
    if first:
        return st.integers(1, 12).map(lambda rows: rows * first[0])
    return st.integers(0, 40) | st.integers(0, 16) | st.integers(41, 140)


def meaning(spec: Attention, n: int) -> np.ndarray | None:
    """The pairs, None where some head has a mechanism alone; raises Invalid."""
    for layer in range(spec.layers or 1):
        for head in range(spec.heads or 1):
            slot(spec, layer, head)
    attends = {each.nodes[0].kind for each in spec.statements() if each.kind == "attend"}
    if "mechanism" in attends:
        return None
    return masks(spec, n, sample_of(spec.inputs, n, np.random.default_rng(0)))


def is_meaningless(spec: Attention) -> bool:
    """Whether no length gives the spec, or a claim of it, a meaning."""
    first = [int(each.parts[0]) for each in spec.grid if each.kind == "number"]  # type: ignore[arg-type]
    some = (1, 2, 5, 6, 12, 36, 64, int(np.prod(first or [1])) + spec.extra_tokens)
    return not any(_has_meaning(lambda n=n: meaning(spec, n)) for n in some) or not all(
        any(_has_meaning(lambda n=n, x=x: _holds(spec, x, n)) for n in x.at or some)
        for x in spec.claims
    )


def _has_meaning(ask: Any) -> bool:
    try:
        ask()
    except Invalid:
        return False
    return True


def _holds(spec: Attention, claim: Claim, n: int) -> bool:
    return truth.holds(spec, claim, n, sample_of(spec.inputs, n, np.random.default_rng(n)))


def ask(spec: Attention, data: st.DataObject, kind: type[Case] = Case) -> None:
    """Everything about one spec, at a length and in a call that are drawn."""
    try:
        found = parse(text(spec), parameters=dict(spec.overrides))
    except SpecError as error:
        CHECKED["refused"] += 1
        if is_meaningless(spec):
            return
        raise Finding(spec, f"refused what has a meaning: {error}") from error
    again = parse(found.source)
    if again != found or again.fingerprint != found.fingerprint:
        raise Finding(spec, f"the source is another spec: {found.source}")
    n = data.draw(lengths(spec), "n")
    case = kind(found, n, spec)
    try:
        known = meaning(spec, n)
    except Invalid as error:
        if not _refuses(case):
            raise Finding(spec, f"took what has no meaning at n = {n}: {error}") from error
        known = np.zeros(0)
    if known is None or known.size:
        said = [] if known is None else differing(case, _views(spec, n))
        said += _verdicts(case) + _calls(case, data)
        if said:
            raise Finding(spec, f"at n = {n}: {'; '.join(said)}")
    CHECKED["spec"] += 1


def _refuses(case: Case) -> bool:
    layers, heads = case.spec.layers, case.spec.heads or 1
    refused = 0
    for layer, head in np.ndindex(layers, heads):
        try:
            case.spec.mask(case.n, layer, head, case.inputs)
        except ValueError:
            refused += 1
    return refused > 0


def _views(spec: Attention, n: int) -> dict[str, Any]:
    figures = {} if has(spec, "mechanism") or not n else FIGURES
    return {**PAIRS, **{name: view for name, view in figures.items() if name != "verdicts"}}


LONGEST = 257
"""Where claims about every n are examined, as far as brute force can."""


def _verdicts(case: Case) -> list[str]:
    """Verdicts that the oracle contradicts."""
    found = []
    for claim, verdict in zip(case.attention.claims, case.spec.verdicts, strict=True):
        CHECKED[f"claim {verdict.status}"] += 1
        if has(case.attention, "mechanism") and claim.expr.kind not in ("subset", "same"):
            continue
        failed = verdict.failed_at or 0
        meant = dict.fromkeys((n for n in verdict.lengths if n != failed), True)
        if verdict.status == "proven":
            meant = dict.fromkeys((*claim.at, 3, 7, 12, 20), True)
        elif verdict.status == "refuted":
            meant = {n: True for n in meant if n < failed}
            # with inputs some sample refutes it
            meant |= {} if case.attention.inputs else {failed: False}
        elif verdict.status != "checked":
            continue
        found += [
            f"`{verdict.claim.text}` is {verdict.status}, wrong at n = {n}"
            for n, wanted in meant.items()
            if 0 < n <= LONGEST and _is(case.attention, claim, n) not in (wanted, None)
        ]
    return found


def _is(spec: Attention, claim: Claim, n: int) -> bool | None:
    try:
        return _holds(spec, claim, n)
    except Invalid:
        return None


def _calls(case: Case, data: st.DataObject) -> list[str]:
    """What a backend computes, and steps."""
    spec = case.attention
    kernel = data.draw(st.sampled_from(KERNELS if has(spec, "mechanism") else ("auto", *KERNELS)))
    # of padding the numbers are others than they are given
    plain = any(entry.kind == "numbers" for entry in spec.inputs)
    # what relu divides by comes near 0, and 1 + cos is a difference: in a narrow type neither is
    # comparable to the roundings of the definition
    narrow = not {"relu", "taylor"} & spec.words() and data.draw(st.booleans())
    layer = data.draw(st.integers(0, case.spec.layers - 1))
    shape = data.draw(st.sampled_from(["plain"] if plain else SHAPES))
    call = Call(case, shape, torch.float32 if narrow else torch.float64, layer)
    try:
        found = check(call, kernel) or []
        CHECKED["call"] += 1
        if spec.causal and kernel == "auto" and case.n and shape in SHAPES[::4]:
            found += step_errors(Call(case, shape, torch.float64, layer))
            CHECKED["steps"] += 1
    except ValueError:
        # what a call cannot have, such as steps of what is not stable
        CHECKED["call refused"] += 1
        return []
    return [f"{kernel}, {shape}, layer {layer}: {x}" for x in found]


def worker(work: tuple[float, int, int]) -> tuple[Counter[str], int]:
    """Rounds of ten specs of every `step`-th seed until the time is over, and what was wrong."""
    end, number, step = work
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    signal.signal(signal.SIGALRM, _too_long)
    wrong = 0

    def one(spec: Attention, data: st.DataObject) -> None:
        signal.alarm(SECONDS)
        try:
            ask(spec, data)
        finally:
            signal.alarm(0)

    while time.time() < end:
        try:
            ten(one, number, specs(), st.data())
        except Exception as error:
            wrong += 1
            said = str(error) if isinstance(error, Finding) else traceback.format_exc(limit=-4)
            print(f"\n=== --seed {number}\n{said}", flush=True)
        number += step
    return CHECKED, wrong


def _too_long(number: int, frame: Any) -> None:
    raise TimeoutError(f"took more than {SECONDS} seconds")


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    end = time.time() + 60 * options.minutes
    work = [(end, options.seed + index, options.processes) for index in range(options.processes)]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        results = pool.map(worker, work)
    checked = sum((each for each, _ in results), Counter[str]())
    wrong = sum(each for _, each in results)
    print(json.dumps({**dict(checked.most_common()), "wrong": wrong}))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
