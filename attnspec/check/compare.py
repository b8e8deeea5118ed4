"""Where two specs differ: the pairs that only one of them has, head by head.

Heads whose graphs come to one form (see `forms`) have the same pairs for every n; all others are
compared at one length, row by row where closed forms do not count them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

from attnspec.analysis.counting.degrees import edges_of
from attnspec.analysis.counting.differences import EXAMPLES, Pairs, only_in
from attnspec.check.other_differences import Mechanisms, asides, kind_of, mechanisms_of
from attnspec.check.verdicts import LENGTHS
from attnspec.elaborate import Elaborated
from attnspec.graphs.bind import extents_of
from attnspec.graphs.forms.conditions import equal
from attnspec.graphs.forms.dnf import form_of, place_of
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.relation import Relation, chosen_text
from attnspec.graphs.stack import Sample, Stack, TooMuch, require_supported
from attnspec.ir.api_checks import length_of
from attnspec.ir.crossing import crossed
from attnspec.ir.program import Attend, Crossing, inputs_of, leaves
from attnspec.lower.mechanism_sizes import symbols_in
from attnspec.text.diagnostics import AttnSpecError, hinted

if TYPE_CHECKING:
    from collections.abc import Sequence

Slot = tuple[int, int]
"""A layer and a head."""


@dataclass(frozen=True)
class Compared:
    """The pairs of some heads, which have one graph in each spec.

    `slots` are their layers and heads. `proven`: the same pairs for every n. Counts are of one of
    these heads; they are None where the pairs are not known, for the `reason` given. Where pairs
    are the same by chance of the length, `differ_at` is one at which they are not, if one is found.
    `mechanisms` are those of the heads. Where one of the two is a mechanism without a graph there
    are no pairs: `alike` says whether they are one mechanism, `reason` which, or what differs.
    """

    slots: tuple[Slot, ...]
    proven: bool
    only_in_a: Pairs | None = None
    only_in_b: Pairs | None = None
    in_both: int | None = None
    reason: str = ""
    differ_at: int | None = None
    mechanisms: Mechanisms | None = None
    alike: bool | None = None
    relations: tuple[Relation, Relation] | None = field(default=None, compare=False, repr=False)

    @property
    def equal(self) -> bool | None:
        """Whether the pairs are the same, or the mechanisms where there are no pairs; None where
        that is not known."""
        if self.proven:
            return True
        if self.alike is not None:
            return self.alike
        if self.only_in_a is None or self.only_in_b is None:
            return None
        return not self.only_in_a and not self.only_in_b

    @property
    def same_mechanism(self) -> bool:
        """Whether both have one mechanism, or none."""
        return self.mechanisms is None or self.mechanisms.equal

    def to_dict(self) -> dict[str, object]:
        """As plain data."""
        sides = {"only_in_a": self.only_in_a, "only_in_b": self.only_in_b}
        return {
            "slots": [list(slot) for slot in self.slots],
            "equal": self.equal,
            "proven": self.proven,
            **{name: None if pairs is None else pairs.to_dict() for name, pairs in sides.items()},
            "in_both": self.in_both,
            "reason": self.reason or None,
            "differ_at": self.differ_at,
            "mechanisms": None if self.mechanisms is None else self.mechanisms.to_dict(),
        }


@dataclass(frozen=True)
class Comparison:
    """Two specs compared at n positions, of specs with `cross` m queries and n keys; `notes` say
    what else sets them apart."""

    a: Elaborated
    b: Elaborated
    n: int
    compared: tuple[Compared, ...]
    notes: tuple[str, ...]

    @property
    def m(self) -> int | None:
        """How many queries there are, where these are another sequence."""
        return None if self.a.program.crossing is None else self.a.program.crossing.queries

    @property
    def length(self) -> int:
        """The positions that are compared, those that hold both sequences."""
        return max(self.n, self.m or 0)

    @property
    def lengths(self) -> str:
        """Both numbers, in words."""
        return f"n = {self.n:,}" if self.m is None else f"m = {self.m:,}, n = {self.n:,}"

    @property
    def equal(self) -> bool | None:
        """Whether all compared heads have the same pairs at n, and the same mechanisms beside
        them; None where some are not known."""
        equal = {one.equal if one.same_mechanism else False for one in self.compared}
        return False if False in equal else None if None in equal else True

    @property
    def proven(self) -> bool:
        """Whether they have for every n, by their forms."""
        return all(one.proven and one.same_mechanism for one in self.compared)

    @cached_property
    def only_in_a(self) -> Pairs:
        """The pairs of `a` alone: counted over all heads compared, examples from the first."""
        return self._only([one.only_in_a for one in self.compared])

    @cached_property
    def only_in_b(self) -> Pairs:
        """The pairs of `b` alone, likewise."""
        return self._only([one.only_in_b for one in self.compared])

    def _only(self, sides: Sequence[Pairs | None]) -> Pairs:
        both = zip(sides, self.compared, strict=True)
        counts = [(pairs, len(one.slots)) for pairs, one in both if pairs]
        if not counts:
            return Pairs()
        return Pairs(
            count=sum(pairs.count * heads for pairs, heads in counts),
            queries=sum(pairs.queries * heads for pairs, heads in counts),
            first=min(pairs.first for pairs, _ in counts if pairs.first is not None),
            last=max(pairs.last for pairs, _ in counts if pairs.last is not None),
            examples=counts[0][0].examples[:EXAMPLES],
        )

    def to_dict(self) -> dict[str, object]:
        """As plain data."""
        return {
            "a": self.a.program.name,
            "b": self.b.program.name,
            **({} if self.m is None else {"m": self.m}),
            "n": self.n,
            "equal": self.equal,
            "proven": self.proven,
            "only_in_a": self.only_in_a.to_dict(),
            "only_in_b": self.only_in_b.to_dict(),
            "compared": [one.to_dict() for one in self.compared],
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        return f"<Difference of {self.a.program.name} and {self.b.program.name}, {self.lengths}>"


def compare(
    a: Elaborated, b: Elaborated, n: int, inputs: Sample | None = None, m: int | None = None
) -> Comparison:
    """The pairs that only one of two specs has at n positions, for each layer and head.

    As `attnspec.diff` says; raises SpecError where a size has no value at n, AttnSpecError for a
    length that one of them does not have or for an input that neither declares.
    """
    if a.program.cross != b.program.cross:
        one, other = (a, b) if a.program.cross else (b, a)
        raise AttnSpecError(
            f"`{one.program.name}` has `cross` and `{other.program.name}` does not: pairs of two"
            " sequences cannot be compared with pairs of one"
        )
    keys = length_of(n)
    (first, n), (second, _) = (crossed(spec.program, n, m) for spec in (a, b))
    a, b = replace(a, program=first), replace(b, program=second)
    require_supported(n)
    for spec in (a, b):
        # a length that a grid does not have is an error, not a difference
        extents_of(spec.program, n)
    samples = _inputs(a, b, inputs)
    compared = tuple(_compared(a, b, n, slots, samples) for slots in _slots(a, b))
    return Comparison(a, b, keys, compared, tuple(asides(a, b, [one.slots[0] for one in compared])))


def _inputs(a: Elaborated, b: Elaborated, inputs: Sample | None) -> tuple[Sample, Sample]:
    """What each spec declares of the inputs given."""
    if inputs is not None and not isinstance(inputs, Mapping):
        raise TypeError(f"inputs must map names to arrays, got {type(inputs).__name__}")
    arrays = dict(inputs or {})
    declared = [entry.name for spec in (a, b) for entry in spec.program.inputs]
    for name in arrays:
        if name not in declared:
            theirs = ", ".join(declared) or "none"
            message = f"neither spec declares an input `{name}`, their inputs are {theirs}"
            raise AttnSpecError(hinted(message, str(name), declared))
    names = [{entry.name for entry in spec.program.inputs} for spec in (a, b)]
    first, second = (
        {name: x for name, x in arrays.items() if name in declared} for declared in names
    )
    return first, second


def _common(one: int | None, other: int | None) -> int:
    """How many layers or heads there are to compare; None serves any number of them."""
    return min((count for count in (one, other) if count is not None), default=1)


def _slots(a: Elaborated, b: Elaborated) -> list[tuple[Slot, ...]]:
    """The layers and heads to compare, those that must come out the same together."""
    layers = _common(a.program.layers, b.program.layers)
    heads = _common(a.program.heads, b.program.heads)
    stacks = Stack(a.program), Stack(b.program)
    differs = [
        [stack.differs(at) or _asks(attend) for at, attend in enumerate(stack.program.attends)]
        for stack in stacks
    ]
    groups: dict[tuple[object, ...], list[Slot]] = {}
    for slot in product(range(layers), range(heads)):
        numbers = tuple(spec.program.number(*slot) for spec in (a, b))
        differs_here = any(here[number] for here, number in zip(differs, numbers, strict=True))
        groups.setdefault((*numbers, slot if differs_here else None), []).append(slot)
        require_supported(0, len(groups))
    return [tuple(slots) for slots in groups.values()]


def _asks(attend: Attend) -> bool:
    """Whether a mechanism has other options in another layer or head."""
    asked = set() if attend.mechanism is None else symbols_in(attend.mechanism)
    return bool(asked & {"layer", "head"})


def _compared(
    a: Elaborated, b: Elaborated, n: int, slots: tuple[Slot, ...], samples: tuple[Sample, Sample]
) -> Compared:
    layer, head = slots[0]
    one, other = a.program.attend(layer, head), b.program.attend(layer, head)
    mechanisms = mechanisms_of(a, b, n, layer, head)
    if one.graph is None or other.graph is None:
        return _of_formulas(slots, one, other, mechanisms)
    comparison = _of_graphs(a, b, n, slots, samples)
    return replace(comparison, mechanisms=mechanisms)


def _of_graphs(
    a: Elaborated, b: Elaborated, n: int, slots: tuple[Slot, ...], samples: tuple[Sample, Sample]
) -> Compared:
    layer, head = slots[0]
    one, other = a.program.attend(layer, head), b.program.attend(layer, head)
    proven = same_for_every_n(a, b, layer, head)
    for spec, attend, sample in ((a, one, samples[0]), (b, other, samples[1])):
        reason = _not_known(spec, attend, sample)
        if reason:
            return Compared(slots, proven, reason=reason)
    first = Stack(a.program, samples[0]).relation(n, layer, head)
    second = Stack(b.program, samples[1]).relation(n, layer, head)
    sides = a.program.crossing or Crossing(n, n)
    if sides.empty or proven:
        try:
            edges = 0 if sides.empty else edges_of(first, n)
        except TooMuch:
            return Compared(slots, proven, Pairs(), Pairs(), relations=(first, second))
        return Compared(slots, proven, Pairs(), Pairs(), edges, relations=(first, second))
    try:
        only_in_a, only_in_b = only_in(first, second, n), only_in(second, first, n)
        in_both = edges_of(first, n) - only_in_a.count
    except TooMuch as error:
        return Compared(slots, proven, reason=str(error))
    elsewhere = None if only_in_a or only_in_b else _differ_at(a, b, layer, head)
    return Compared(
        slots, proven, only_in_a, only_in_b, in_both, differ_at=elsewhere, relations=(first, second)
    )


def _of_formulas(
    slots: tuple[Slot, ...], one: Attend, other: Attend, mechanisms: Mechanisms | None
) -> Compared:
    """Where one of two heads, or both, have no graph: one mechanism, or what sets them apart."""
    if mechanisms is None or one.graph is not other.graph:
        words = f"{kind_of(one)} in a, {kind_of(other)} in b"
        return Compared(slots, False, reason=words, mechanisms=mechanisms, alike=False)
    alike = mechanisms.equal
    proven = alike and mechanisms.lasting
    return Compared(slots, proven, reason=str(mechanisms), mechanisms=mechanisms, alike=alike)


def _differ_at(a: Elaborated, b: Elaborated, layer: int, head: int) -> int | None:
    """A length at which the graphs of one layer and head differ, of those that claims are checked
    at; None where they do not, or where inputs would be needed."""
    for n in LENGTHS:
        try:
            programs = (replace(spec.program, crossing=None) for spec in (a, b))
            first, second = (Stack(program).relation(n, layer, head) for program in programs)
            if only_in(first, second, n) or only_in(second, first, n):
                return n
        except AttnSpecError:
            # a size without a value, a grid of another length, too many pairs
            continue
    return None


def same_for_every_n(a: Elaborated, b: Elaborated, layer: int, head: int) -> bool:
    """Whether the graphs of one layer and head come to one form, `causal` included; between two
    sequences, whether they are written alike, for forms know one length."""
    if a.program.cross:
        one, other = (spec.program.attend(layer, head).graph for spec in (a, b))
        return one == other
    forms = []
    for spec in (a, b):
        graph = spec.program.attend(layer, head).graph
        forms.append(None if graph is None else form_of(graph, place_of(spec.program, layer, head)))
    first, second = forms
    return first is not None and second is not None and equal(first, second)


def _not_known(spec: Elaborated, attend: Attend, sample: Sample) -> str:
    """Why the pairs of a graph are not known, "" where they are."""
    if attend.graph is None:
        return ""
    missing = sorted(inputs_of(attend.graph) - set(sample))
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        return f"`{spec.program.name}` reads inputs that are not given, {names}"
    for leaf in leaves(attend.graph):
        if BY_NAME[leaf.pattern].data_dependent:
            return f"{chosen_text(leaf.pattern)} (`{spec.program.name}`)"
    return ""
