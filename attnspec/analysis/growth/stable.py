"""Whether rows are the same pairs at every length: proven by form, else looked for at lengths.

What is proven holds for every n and every input. A difference that is found is exact: the lengths
and the inputs at which it shows are admissible. Where none is found nothing is proven.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attnspec.graphs.bind import BindError, Situation, bind, bind_attended, situation_of
from attnspec.graphs.forms.conditions import Conjunction, Held, Within
from attnspec.graphs.forms.dnf import Place, form_of, place_of
from attnspec.graphs.forms.properties import never_reads_later
from attnspec.graphs.forms.stability import (
    CAUSAL,
    FAR,
    Fault,
    changing_weights,
    counting_queries,
    fault_of,
    reads_later,
    unsteady,
    unsteady_choice,
    unsteady_leaf,
    unsteady_shift,
)
from attnspec.graphs.forms.written import written
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.relation import chosen_text, evaluate_pairs
from attnspec.graphs.stack import TooMuch, asks_for, require_supported, unread_text
from attnspec.graphs.token_sets import Data
from attnspec.ir.parameters import RelationError
from attnspec.ir.program import Attend, Input, Leaf, Program, Term, inputs_of, leaves, symbols_of
from attnspec.ir.scalars import ScalarError
from attnspec.limits import LIMITS


@dataclass(frozen=True)
class Difference:
    """A query that reads a key at one of two lengths alone, in a layer and head, and the term that
    makes it so; `reads` says whether it is at the longer one."""

    query: int
    key: int
    shorter: int
    longer: int
    reads: bool
    layer: int
    head: int
    fault: Fault

    @property
    def what(self) -> str:
        """The difference in words."""
        key = f"the later key {self.key}" if self.key > self.query else f"{self.key}"
        at, other = self.shorter, self.longer
        if self.reads:
            at, other = other, at
        return f"query {self.query} reads {key} at n = {at}, but not at n = {other}"


# --- proofs ---------------------------------------------------------------------------------------


def is_stable(program: Program) -> bool:
    """Whether it is proven of every head that row q is the same pairs at every n > q."""
    try:
        # other draws are proven alike: it is sizes that may differ from head to head
        every = places(program, drawn=False)
        return all(head_is_stable(program, layer, head) for layer, head in every)
    except TooMuch:
        return False


def head_is_stable(program: Program, layer: int, head: int) -> bool:
    """The same of one head."""
    if fault_of(program, layer, head) is None:
        return True
    steady = unsteady_choice(program, layer, head) is None
    return steady and _by_form(program, layer, head, whole=True)


def head_is_steady(program: Program, layer: int, head: int) -> bool:
    """Whether it is proven that a pair of a head is one at every n above both positions, or none:
    positions that come after them, padding for example, change nothing between them."""
    graph = program.attend(layer, head).graph
    if program.fixed_length is not None or graph is None:
        return True
    choice = unsteady_choice(program, layer, head, whole=False)
    pairs = unsteady(graph, place_of(program, layer, head))
    return choice is None and (pairs is None or _by_form(program, layer, head, whole=False))


def _by_form(program: Program, layer: int, head: int, *, whole: bool) -> bool:
    """Whether the form of a graph leaves out what is not steady, and with `whole` later keys."""
    attend, place = program.attend(layer, head), place_of(program, layer, head)
    if attend.graph is None or attend.mechanism is not None:
        return False
    form = form_of(attend.graph, place)
    return form is not None and all(
        _is_steady(one, place) and (not whole or _looks_back(one)) for one in form
    )


def _is_steady(conjunction: Conjunction, place: Place) -> bool:
    return all(
        unsteady(one.term, place) is None if isinstance(one, Held) else one.steady
        for one in conjunction
    )


def _looks_back(conjunction: Conjunction) -> bool:
    return any(
        one.wanted and never_reads_later(one.term)
        if isinstance(one, Held)
        else isinstance(one, Within) and one.later and one.reach <= 0
        for one in conjunction
    )


def unsteady_choices(program: Program, n: int = FAR) -> tuple[int, int, Fault] | None:
    """The first layer and head with a choice that differs between lengths up to n, and why."""
    for layer, head in places(program, drawn=False):
        fault = unsteady_choice(program, layer, head, n)
        if fault is not None:
            return layer, head, fault
    return None


# --- differences ----------------------------------------------------------------------------------


def difference(program: Program, longest: int) -> Difference | None:
    """The first difference between two lengths up to `longest` of some head that is not proven to
    be stable. Raises TooMuch, with the reason, where none was found and more is unknown."""
    doubt = ""
    for layer, head in places(program):
        if head_is_stable(program, layer, head):
            continue
        try:
            change = difference_of(program, layer, head, longest)
        except TooMuch as error:
            doubt = doubt or str(error)
            continue
        if change is not None:
            return change
    if doubt:
        raise TooMuch(doubt)
    return None


def difference_of(
    program: Program, layer: int, head: int, longest: int, *, whole: bool = True
) -> Difference | None:
    """The first difference of one head; without `whole` of pairs of positions that both lengths
    have. Raises TooMuch where none is found and some input or the data may show one."""
    attend = program.attend(layer, head)
    mixing = reads_later(attend, program.causal) if whole and attend.mechanism else None
    if mixing is not None:
        return Difference(0, 1, 1, 2, True, layer, head, mixing) if longest > 1 else None
    if attend.graph is None:
        raise TooMuch(str(fault_of(program, layer, head)))
    for leaf in leaves(attend.graph):
        if BY_NAME[leaf.pattern].data_dependent:
            fault = unsteady_choice(program, layer, head, whole=whole)
            raise TooMuch(str(fault or chosen_text(leaf.pattern)))
    before: tuple[int, np.ndarray] | None = None
    for n in _lengths(longest):
        try:
            at = _situation(program, layer, head, n)
            every = np.arange(n)
            here = evaluate_pairs(bind_attended(attend.graph, at), every[:, None], every[None], n)
            pair = None if before is None else _first(before[1], here, whole)
        except (BindError, RelationError, ScalarError):
            # a length that the grid or a size does not have
            continue
        if before is not None and pair is not None:
            q, k, reads = pair
            cause = _cause(program, (layer, head), (q, k), (before[0], n))
            return Difference(q, k, before[0], n, reads, layer, head, cause)
        before = n, here
    if inputs_of(attend.graph):
        raise TooMuch(unread_text(inputs_of(attend.graph)))
    if attend.mechanism is not None:
        raise TooMuch(str(fault_of(program, layer, head)))
    return None


def _lengths(longest: int) -> list[int]:
    powers = {1 << bit for bit in range(longest.bit_length())}
    every = {*range(1, min(longest, LIMITS.every_length) + 1), *powers, longest - 1, longest}
    return sorted(n for n in every if 1 <= n <= longest)


def _first(short: np.ndarray, long: np.ndarray, whole: bool) -> tuple[int, int, bool] | None:
    """The first query and key, and whether it reads it at the longer length, where rows of the
    shorter one, both bool [length, length], differ."""
    m = len(short)
    differ = long[:m].copy() if whole else long[:m, :m].copy()
    differ[:, :m] ^= short
    if not differ.any():
        return None
    query, key = divmod(int(differ.argmax()), differ.shape[1])
    return query, key, bool(long[query, key])


# --- what is at fault -----------------------------------------------------------------------------


def _cause(
    program: Program, slot: tuple[int, int], pair: tuple[int, int], lengths: tuple[int, int]
) -> Fault:
    """The term that makes a pair one at one of two lengths alone."""
    attend = program.attend(*slot)
    later = reads_later(attend, program.causal) if pair[1] >= lengths[0] else None
    if later is not None or attend.graph is None:
        return later or Fault(program.name, "reads later keys", CAUSAL)
    situations = tuple(_situation(program, *slot, n) for n in lengths)
    return _changed(attend.graph, place_of(program, *slot), situations, pair)


def _changed(term: Term, place: Place, at: tuple[Situation, ...], pair: tuple[int, int]) -> Fault:
    changing = Fault(written(term), "changes with n", "write numbers as its sizes")
    if isinstance(term, Leaf):
        return unsteady_leaf(term, place) or changing
    q, k = pair[::-1] if term.op == "transpose" else pair
    if term.op == "shift":
        by = vars(bind(term, at[0]))["by"]
        q, k = q - by, k - by
    inside = all(0 <= min(q, k) and max(q, k) < each.n for each in at)
    for part in term.terms if inside else ():
        if _holds(part, at[0], q, k) != _holds(part, at[1], q, k):
            return _changed(part, place, at, (q, k))
    return unsteady_shift(term, place) or changing


def _holds(term: Term, at: Situation, q: int, k: int) -> bool:
    return bool(evaluate_pairs(bind(term, at), np.array([q]), np.array([k]), at.n)[0])


# --- where graphs stand ---------------------------------------------------------------------------


def places(program: Program, *, drawn: bool = True) -> Iterator[tuple[int, int]]:
    """Every layer and head that may differ from those before it, unless `drawn` by their sizes;
    raises TooMuch for very many."""
    seen: set[int] = set()
    count = 0
    for layer, row in enumerate(program.slots):
        for head, index in enumerate(row):
            if index in seen:
                continue
            graph = program.attends[index].graph
            asked = asks_for if drawn else symbols_of
            if graph is None or asked(graph).isdisjoint(("layer", "head")):
                seen.add(index)
            count += 1
            require_supported(0, count)
            yield layer, head


def _situation(program: Program, layer: int, head: int, n: int) -> Situation:
    inputs = {entry.name: Data(_sample(entry, n)) for entry in program.inputs}
    return situation_of(program, n, layer, head, inputs=inputs)


def _sample(entry: Input, n: int) -> np.ndarray:
    """An input of one sample, the same at all lengths as far as they have it."""
    at = np.arange(n)
    if entry.kind == "ids":
        return at // 3
    if entry.kind == "numbers":
        return at * 5 % 7
    if entry.kind == "length":
        return np.asarray(2)
    marked = at % 3 == 1
    return np.asarray(marked & (marked.cumsum() <= (n if entry.at_most is None else entry.at_most)))


# --- for what goes on, or is padded ---------------------------------------------------------------


def unstable(program: Program, layer: int, heads: int) -> Fault | None:
    """What makes a layer that goes on from earlier positions contradict them; None where nothing
    does at the lengths that were examined."""
    fault = _first_fault(program, layer, heads, whole=True)
    return fault or counting_queries(program, layer, heads)


def changed_by_padding(program: Program, layer: int, heads: int) -> Fault | None:
    """What makes the rows of a sample others where padding stands behind it; None as above."""
    return _first_fault(program, layer, heads, whole=False)


def _first_fault(program: Program, layer: int, heads: int, *, whole: bool) -> Fault | None:
    proven = head_is_stable if whole else head_is_steady
    seen: set[Attend] = set()
    for head in range(heads):
        attend = program.attend(layer, head)
        if attend in seen:
            continue
        if attend.graph is None or not asks_for(attend.graph):
            seen.add(attend)
        weights = changing_weights(attend)
        if weights is not None:
            return weights
        if proven(program, layer, head):
            continue
        try:
            change = difference_of(program, layer, head, LIMITS.every_length, whole=whole)
        except TooMuch:
            # neither proven nor refuted: an input or the data might show it
            return fault_of(program, layer, head, whole=whole)
        if change is not None:
            return change.fault
    return None
