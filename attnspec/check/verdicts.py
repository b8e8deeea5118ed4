"""A verdict on each claim of a program.

A claim that follows from how the spec is written is proven for every n and every input. Any other
claim without `at` is checked at `LENGTHS`, no more; diagnostics say at which length it failed.
What cannot be checked is reported (A609), never passed over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from attnspec.analysis.counting.degrees import degrees_of
from attnspec.analysis.counting.differences import row_text
from attnspec.analysis.counting.figures import COSTS, COUNTS, FIGURES
from attnspec.analysis.growth.stable import is_stable
from attnspec.analysis.reach.leaks import looks_ahead
from attnspec.analysis.reach.mirrored import asymmetry, one_way
from attnspec.check import counterexamples, form_proofs, values
from attnspec.check.counterexamples import COMPARE, against_stable, slot_text
from attnspec.check.places import (
    EVERYWHERE,
    GRAPHS,
    HEADS,
    Place,
    cases,
    few_places,
    reads_by_head,
    without_end,
)
from attnspec.graphs.across import reads_m
from attnspec.graphs.bind import BindError, integer_of
from attnspec.graphs.forms.properties import is_symmetric, never_reads_later, reads_itself
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.relation import chosen_text
from attnspec.graphs.stack import Stack, TooMuch, has_mechanism, influence, unread_text
from attnspec.ir.crossing import evened
from attnspec.ir.program import Attend, Claim, Program, Term, inputs_of, leaves, symbols_of
from attnspec.ir.scalars import ScalarError, evaluate, symbols
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import AttnSpecError, Diagnostic, SpecError

LENGTHS = (1, 2, 64, 257, 1024)
"""The lengths at which a claim about every n is checked."""

_LONG = frozenset(
    (
        *COUNTS,
        *COSTS,
        *"symmetric rows_nonempty causal reach depth diameter path_length subset ==".split(),
    )
)
"""Claims that are checked at lengths above `LIMITS.matrix` too, as far as the graphs allow it."""


_READ = (
    "every query has read every key (under `causal` every earlier key) in any head, directly or"
    " through other positions"
)
MEANINGS = {
    "degree": "`degree`: the most keys of one query in one head",
    "order": "`order <= f(n)`: the number of edges, the pairs of a query and a key in all layers"
    " and heads, grows at most as fast as f(n)",
    "reach": f"`reach(layers = L)`: after L layers {_READ}",
    "depth": f"`depth`: the fewest layers after which {_READ}",
    "diameter": "`diameter`: the most steps a query needs to reach a key, in any layer and head",
    "path_length": "`path_length`: the mean number of steps that a query needs to reach a key",
    "stable": "`stable`: the keys of a query stay the same when positions are added after it",
    "flops": "`flops`: the operations of a forward pass in {}, all heads together, each of size 64",
    "bytes": "`bytes`: the bytes that a forward pass reads and writes in {}, all heads"
    " together, each of size 64 in float32",
}
"""What claims mean whose name does not tell, for their refutations."""

PATHS = "a path starts at the query in the last of the layers, counted from 0, and ends in layer 0"
REPEATED = "layers beyond those of the spec are copies of its last layer"

NO_WARNING = "the spec compiles all the same; remove the claim to silence the warning"
SHORTER = "claim it at {} (`at n = …`), or remove it to silence the warning"


@dataclass(frozen=True)
class Verdict:
    """What is known of one claim: proven for every n, or checked at `lengths`; where it is refuted,
    `failed_at` says at which of them first, None where that is not a matter of a length."""

    claim: Claim
    status: Literal["proven", "checked", "refuted", "unchecked"]
    lengths: tuple[int, ...] = ()
    failed_at: int | None = None
    diagnostics: tuple[Diagnostic, ...] = ()

    def __str__(self) -> str:
        at = ", ".join(f"{n:,}" for n in self.lengths)
        every = "every n" if self.claim.since is None else f"every n >= {self.claim.since:,}"
        holds = {"proven": f"is proven for {every}", "checked": f"holds at n = {at}"}
        if self.status in holds:
            return f"`{self.claim.text}` {holds[self.status]}"
        return "\n".join(map(str, self.diagnostics))

    def to_dict(self) -> dict[str, object]:
        """As plain data."""
        since = {} if self.claim.since is None else {"since": self.claim.since}
        return {
            "claim": self.claim.text,
            **since,
            "status": self.status,
            "lengths": list(self.lengths),
            "failed_at": self.failed_at,
        }


def judge(program: Program) -> list[Verdict]:
    """A verdict on each claim of a program, in the order of the text; of a spec with `cross` where
    there are as many queries as keys."""
    stack = Stack(evened(program))
    if not program.cross:
        return [verdict_on(claim, stack) for claim in stack.program.claims]
    return [
        _on_stable(claim, program) if claim.kind == "stable" else _evened(verdict_on(claim, stack))
        for claim in stack.program.claims
    ]


def evenly(diagnostic: Diagnostic) -> Diagnostic:
    """The diagnostic with a note that it was found with as many queries as keys."""
    note = "checked only with as many queries as keys, m = n"
    return replace(diagnostic, notes=(*diagnostic.notes, note))


def _evened(verdict: Verdict) -> Verdict:
    return replace(verdict, diagnostics=tuple(map(evenly, verdict.diagnostics)))


def _on_stable(claim: Claim, program: Program) -> Verdict:
    """What is known of rows between two sequences, of which the queries grow."""
    counterexample = against_stable(program)
    if counterexample is not None:
        message = f"`{claim.text}` does not hold: {counterexample}"
        refuted = Diagnostic("A606", message, claim.span, notes=(MEANINGS["stable"],))
        return Verdict(claim, "refuted", diagnostics=(refuted,))
    if reads_m(program):
        where = f" above m = {counterexamples.QUERIES.stop}"
        reason = "a graph may depend on m, the number of queries; up to there no keys change"
        return Verdict(claim, "unchecked", diagnostics=(_unchecked(claim, reason, where),))
    domain, examined = _domain(claim, Stack(evened(program)), program.attends), list[int]()
    if domain.everywhere:
        return Verdict(claim, "proven")
    problems = tuple(_at_lengths(claim, Stack(evened(program)), domain, True, examined))
    return Verdict(claim, "unchecked" if problems else "checked", tuple(examined), None, problems)


# --- claims -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Domain:
    """The lengths at which a claim is judged: what has no value at others that were to be, and
    whether there is a value at every length."""

    lengths: tuple[int, ...]
    faults: Mapping[int, Diagnostic]
    everywhere: bool


def verdict_on(claim: Claim, stack: Stack) -> Verdict:
    """What is known of one claim."""
    program = stack.program
    # a mechanism has pairs as far as it lets something through
    felt = Stack(influence(stack.program), stack.inputs) if has_mechanism(stack.program) else stack
    if claim.kind in _OF_REACH:
        stack = felt
    domain = _domain(claim, felt, program.attends)
    lengths = domain.lengths
    followed = _follows(claim, stack) and (domain.everywhere or claim.kind not in GRAPHS)
    examined: list[int] = []
    problems = tuple(dict.fromkeys(_claim(claim, stack, domain, followed, examined)))
    codes = {d.code for d in problems}
    if codes - {"A609"}:
        failed = examined[-1] if examined and "A606" in codes else None
        return Verdict(claim, "refuted", lengths, failed, problems)
    if codes:
        return Verdict(claim, "unchecked", lengths, None, problems)
    if (followed and domain.everywhere) or (claim.kind == "order" and not examined):
        return Verdict(claim, "proven")
    return Verdict(claim, "checked", tuple(examined))


def _domain(claim: Claim, stack: Stack, attends: Sequence[Attend]) -> Domain:
    """Where the graphs of the stack have values, and what stands beside those of some attends; or
    the graphs of a claim about graphs, which says so itself where it has none."""
    if claim.kind == "order":
        return Domain((), {}, True)
    fixed = stack.program.fixed_length
    wanted = lengths_of(claim) if fixed is None or claim.at is not None else (fixed,)
    terms = claim.terms if claim.kind in GRAPHS else stack.program.graphs
    attends = () if claim.kind in GRAPHS else attends
    everywhere = values.total(terms, attends, stack.program, fixed or claim.since or 1)
    faults: dict[int, Diagnostic] = {}
    for n in () if everywhere or claim.kind in GRAPHS else wanted:
        fault = values.fault_at(terms, attends, stack, n)
        faults |= {} if fault is None else {n: fault}
    if claim.at is not None:
        return Domain(wanted, faults, everywhere)
    there = wanted if stack.unknown else stack.lengths(wanted)
    lengths = tuple(n for n in there if n not in faults and n >= (claim.since or 0))
    # a grid has no other lengths than its own
    whole = lengths == wanted or stack.program.grid is not None
    return Domain(lengths, faults, everywhere and whole)


def lengths_of(claim: Claim) -> tuple[int, ...]:
    """The lengths at which a claim is checked that was not proven."""
    if claim.at is not None:
        return tuple(sorted(set(claim.at)))
    if claim.since is None:
        return LENGTHS
    first = claim.since
    return first, first + 1, *(n for n in LENGTHS if n > first + 1)


def _follows(claim: Claim, stack: Stack) -> bool:
    """Whether a claim follows from how the spec is written."""
    if claim.kind == "stable":
        return is_stable(stack.program)
    if claim.kind in GRAPHS:
        return counterexamples.graphs_proven(claim, stack.program, few_places(claim, stack))
    if claim.kind in _PROOFS:
        return _proven(claim, stack)
    return form_proofs.proven(claim, stack)


def _claim(
    claim: Claim, stack: Stack, domain: Domain, followed: bool, examined: list[int]
) -> Iterator[Diagnostic]:
    """What is wrong with a claim, or keeps it from being checked; `examined` gets lengths seen."""
    about_graphs = claim.kind in GRAPHS
    if followed and not about_graphs:
        if not domain.everywhere:
            yield from _at_lengths(claim, stack, domain, followed, examined)
        return
    reason = stack.unknown if not about_graphs else _unknown_terms(claim)
    if claim.kind in COSTS and has_mechanism(stack.program):
        # formulas say what mechanisms cost, or what is missing
        reason = None
    more_heads = None if about_graphs else reads_by_head(stack)
    # a claim about each head that fails for one fails however many there are
    each = claim.compare in (None, "<", "<=") and claim.kind not in _OF_REACH
    if more_heads is not None and not each:
        reason = reason or more_heads
    reason = reason or without_end(claim, stack)
    if claim.kind in _IN_DOUBT and reason is not None:
        yield from _in_doubt(claim, stack, examined)
        return
    if claim.kind == "order":
        yield from _order(claim, stack, reason, examined)
        return
    if reason is not None:
        if not followed:
            yield _unchecked(claim, reason)
        return
    refuted = False
    for one in _at_lengths(claim, stack, domain, followed, examined):
        refuted = refuted or one.code != "A609"
        yield one
    if more_heads is not None and not refuted:
        yield _unchecked(claim, more_heads)


def _at_lengths(
    claim: Claim, stack: Stack, domain: Domain, followed: bool, examined: list[int]
) -> Iterator[Diagnostic]:
    lengths, wanted = domain.lengths, lengths_of(claim)
    missing = [n for n in wanted if n not in lengths]
    if missing and (not lengths or stack.program.grid is None):
        fault = domain.faults.get(missing[0])
        why, mend = f"the grid has n = {stack.program.fixed_length}", NO_WARNING
        if fault is not None:
            why, mend = fault.message, _valid_at(lengths, missing)
        listed = ", ".join(f"{n:,}" for n in missing)
        if lengths:
            listed += f" of the lengths {', '.join(f'{n:,}' for n in wanted)}"
        yield _unchecked(claim, why, f" at n = {listed}", mend)
    for n in lengths:
        if n > LIMITS.matrix and claim.kind not in _LONG:
            yield _unchecked(claim, f"this claim supports n <= {LIMITS.matrix:,}, got n = {n:,}")
            continue
        if n in domain.faults:
            yield domain.faults[n]
            return
        examined.append(n)
        problems = tuple(_at_length(claim, stack, n, followed))
        if any(one.code == "A606" for one in problems):
            problems = _with_way_out(claim, stack, n, lengths, problems)
        yield from problems
        if any(one.code != "A609" for one in problems):
            return


def _with_way_out(
    claim: Claim, stack: Stack, failed: int, lengths: tuple[int, ...], found: tuple[Diagnostic, ...]
) -> tuple[Diagnostic, ...]:
    """The refutation of a figure with, where it is one of short sequences, the least n from which
    the claim holds, as far as is looked."""
    # paths in long sequences take time, and few claims on them fail in the shortest alone
    paths = claim.kind in _OF_REACH and failed <= LENGTHS[1]
    if claim.at is not None or not (claim.kind in (*COUNTS, *COSTS) or paths):
        return found

    def holds(n: int) -> bool:
        return not tuple(_at_length(claim, stack, n, False))

    low, high = failed, 0
    for n in (n for n in lengths if n > failed):
        low, high = (low, high or n) if holds(n) else (n, 0)
    if not high:
        always = f"nor does it hold at n = {lengths[-1]:,}, the longest length that is checked"
        longest = () if failed == lengths[-1] else _at_length(claim, stack, lengths[-1], False)
        notes = (always,) if any(one.code == "A606" for one in longest) else ()
        return tuple(replace(one, notes=(*one.notes, *notes)) for one in found)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    if not holds(high + 1):
        return found
    way = f"it holds at all checked lengths from n = {high:,} on: end it with `for n >= {high}`"
    return tuple(replace(one, help=one.help or way) for one in found)


def _at_length(claim: Claim, stack: Stack, n: int, followed: bool) -> Iterator[Diagnostic]:
    """The same at one length: in the first layer and head in which there is anything."""
    doubt = None
    try:
        # graphs that have no size at some length do not exist there, whatever follows for others
        for place, one, part in cases(claim, stack, n):
            if followed:
                continue
            try:
                counterexample = _CHECKS[claim.kind](one, part, n)
            except TooMuch as error:
                doubt = doubt or error
                continue
            if counterexample is not None:
                yield _refuted(claim, stack, n, counterexample, place)
                return
    except TooMuch as error:
        doubt = error
    except SpecError as error:
        yield from error.diagnostics
        return
    except (AttnSpecError, ScalarError) as error:
        yield _without_answer(claim, error, n)
        return
    if doubt is not None:
        limit = re.match(r"above (n = [\d,]*\d)", str(doubt))
        shorter = f"{limit[1]} or less" if limit else "a smaller n"
        free = stack.program.grid is None and (limit or (claim.at and "n = " in str(doubt)))
        yield _unchecked(claim, str(doubt), mend=SHORTER.format(shorter) if free else NO_WARNING)


def _in_doubt(claim: Claim, stack: Stack, examined: list[int]) -> Iterator[Diagnostic]:
    """A claim on a spec whose pairs are not all known: what some input shows refutes it."""
    fixed = stack.program.fixed_length
    doubt = f"{stack.unknown}"
    for n in claim.at or (lengths_of(claim) if fixed is None else (fixed,)):
        examined.append(n)
        try:
            counterexample = _IN_DOUBT[claim.kind](stack, n)
        except TooMuch as error:
            doubt = str(error)
            continue
        except AttnSpecError:
            # a size without a value at this n, or a grid of another length
            continue
        if counterexample is not None:
            yield _refuted(claim, stack, n, counterexample)
            return
        doubt = reads_by_head(stack) or ""
    if doubt:
        yield _unchecked(claim, doubt)


def _refuted(
    claim: Claim, stack: Stack, n: int, counterexample: str, place: Place = EVERYWHERE
) -> Diagnostic:
    # of a figure of more than a head only the bound is that of a head
    own, count = claim.kind in (*COUNTS, *GRAPHS), stack.program.layer_count
    where = place.text if own else re.sub(r"( in|,) (\w+)", r"\1 \2 =", place.text)
    where = where if own else re.sub(r" in (.*)", r" with \1 in the claim", where)
    message = f"`{claim.text}` does not hold at n = {n:,}{where}: {counterexample}"
    layers = "one layer" if place.layer is not None or count == 1 else "the most expensive layer"
    notes = [MEANINGS[claim.kind].format(layers)] if claim.kind in MEANINGS else []
    if claim.kind in ("reach", "depth"):
        walked = re.search(r"takes ([\d,]+) layer", counterexample)
        never = " never reads " in counterexample and len(set(stack.program.slots)) > 1
        beyond = never or (walked is not None and int(walked[1].replace(",", "")) > count)
        notes += [PATHS] * (count > 1 and walked is not None) + [REPEATED] * beyond
    return Diagnostic("A606", message, claim.span, notes=tuple(notes))


def _proven(claim: Claim, stack: Stack) -> bool:
    if claim.kind == "causal" and looks_ahead(stack.program) is not None:
        return False
    if claim.kind == "causal" and stack.program.causal:
        # a mechanism without a causal form was refused before
        return True
    if claim.kind == "symmetric" and stack.program.causal:
        # k <= q is intersected with every graph, and is not symmetric
        return False
    if claim.kind == "rows_nonempty" and stack.program.extra_tokens:
        # patterns on a grid leave out the tokens before it
        return False
    attends = stack.program.attends
    plain = all(each.graph is not None and each.mechanism is None for each in attends)
    return plain and all(map(_PROOFS[claim.kind], stack.program.graphs))


def _order(
    claim: Claim, stack: Stack, reason: str | None, examined: list[int]
) -> Iterator[Diagnostic]:
    try:
        counterexample = counterexamples.order(claim, stack, reason, examined)
    except TooMuch as error:
        yield _unchecked(claim, str(error))
    except (AttnSpecError, ScalarError) as error:
        yield _without_answer(claim, error)
    else:
        if counterexample is not None:
            message = f"`{claim.text}` does not hold: {counterexample}"
            yield Diagnostic("A606", message, claim.span, notes=(MEANINGS["order"],))


def _without_answer(claim: Claim, error: Exception, n: int | None = None) -> Diagnostic:
    asked = set(symbols(claim.value or 0)).union(*map(symbols_of, claim.terms))
    where, mend = "" if n is None else f" at n = {n:,}", None
    if "n" not in asked and {"layer", "head"} & asked:
        mend = "write an expression that is valid in every layer and head"
    elif n is not None and claim.at is None:
        others = [x for x in lengths_of(claim) if x != n]
        mend = _valid_at([x for x in others if x < n] or others, [n])
    # the length stands in the sentence already
    message = f"`{claim.text}` cannot be checked{where}: {str(error).replace(where, '')}"
    return Diagnostic("A608", message, claim.span, help=mend)


def _valid_at(valid: Sequence[int], missing: Sequence[int]) -> str:
    """What to do where an expression has no value at some of the lengths of a claim."""
    short = valid and valid[-1] < missing[-1]
    lengths = f"`at n = {', '.join(map(str, valid))}`" if short else "`for n >= N`, valid from N on"
    limit = f", or end the claim with {lengths}" if valid else ""
    return f"write an expression that is valid at every n{limit}"


def _unchecked(claim: Claim, reason: str, where: str = "", mend: str = NO_WARNING) -> Diagnostic:
    if reason.endswith(HEADS):
        mend = "add `heads N`, or remove the claim to silence the warning"
    message = f"`{claim.text}` is not checked{where}: {reason}"
    return Diagnostic("A609", message, claim.span, "warning", help=mend)


def _unknown_terms(claim: Claim) -> str | None:
    for term in claim.terms:
        if inputs_of(term):
            return unread_text(inputs_of(term))
        for leaf in leaves(term):
            if getattr(BY_NAME[leaf.pattern], "data_dependent", False):
                return chosen_text(leaf.pattern)
    return None


def _rows_nonempty(claim: Claim, stack: Stack, n: int) -> str | None:
    for layer, head, relation in stack.relations(n):
        empty = np.flatnonzero(degrees_of(relation, n) == 0)
        if len(empty):
            slot = slot_text(stack, layer, head)
            return f"query {empty[0]} has no key{slot}"
    return None


def _symmetric(claim: Claim, stack: Stack, n: int) -> str | None:
    certain = True
    for layer, head, relation in stack.relations(n):
        position, sure = asymmetry(relation, n)
        if position is not None:
            q, k = one_way(relation, n, position)
            slot = slot_text(stack, layer, head)
            return f"query {q} reads key {k}, but query {k} does not read key {q}{slot}"
        certain &= sure
    if not certain:
        raise TooMuch("at this length only random sums are compared, and show no fault")
    return None


def _reach(claim: Claim, stack: Stack, n: int) -> str | None:
    layers = integer_of(claim.value or 0, stack.situation(n), "layers", claim.span)
    if layers < 0:
        raise BindError(f"`layers` must be at least 0, got {layers} at n = {n:,}", claim.span)
    return counterexamples.reaches(stack, n, layers)


def _figure(claim: Claim, stack: Stack, n: int) -> str | None:
    value = _value(claim, stack, n)
    counterexample = FIGURES[claim.kind](stack, n)
    if COMPARE[claim.compare or "=="](counterexample, value):
        return None
    too_many = claim.kind == "degree" and claim.compare in ("<", "<=")
    row = _longest_row(stack, n) if too_many else ""
    return counterexamples.missed(claim.kind, counterexample, claim.compare or "==", value, row)


def _longest_row(stack: Stack, n: int) -> str:
    """The first row with the most keys, as `query 9 reads 0..9 in head 1`."""
    most = max(
        stack.bound(n).found, key=lambda each: int(degrees_of(each[2], n).max()), default=None
    )
    if most is None:
        return ""
    layer, head, relation = most
    query = int(degrees_of(relation, n).argmax())
    return f"query {query} reads {row_text(relation, query, n)}{slot_text(stack, layer, head)}"


def _distance(claim: Claim, stack: Stack, n: int) -> str | None:
    value = _value(claim, stack, n)
    return counterexamples.compared(stack, n, claim.kind, claim.compare or "==", value)


def _value(claim: Claim, stack: Stack, n: int) -> float:
    """What a figure is compared with."""
    value = evaluate(claim.value if claim.value is not None else 0, stack.situation(n).values)
    return value.item() if isinstance(value, np.ndarray) else value


_PROOFS: dict[str, Callable[[Term], bool]] = {
    "causal": never_reads_later,
    "rows_nonempty": reads_itself,
    "symmetric": is_symmetric,
}

_IN_DOUBT = {"causal": counterexamples.causal, "stable": counterexamples.stable}
"""Claims that inputs and mechanisms may refute though their pairs are not all known."""

_OF_REACH = ("reach", "depth", "diameter", "path_length")
"""Claims about what is felt, also through mechanisms."""

_CHECKS: dict[str, Callable[[Claim, Stack, int], str | None]] = {
    "causal": lambda claim, stack, n: counterexamples.causal(stack, n),
    "stable": lambda claim, stack, n: counterexamples.stable(stack, n),
    "rows_nonempty": _rows_nonempty,
    "symmetric": _symmetric,
    "reach": _reach,
    **dict.fromkeys(
        GRAPHS, lambda claim, stack, n: counterexamples.of_graphs(claim, stack.situation(n))
    ),
    **dict.fromkeys(FIGURES, _figure),
    **dict.fromkeys(("depth", "diameter", "path_length"), _distance),
}
