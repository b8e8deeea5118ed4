"""What would make a claim on reach hold: the cheapest of a few standard repairs, each tried out.

A repair is a line of the language. It is put into the canonical text of the spec, the whole is read
and analysed anew at every length at which the claim is checked, and only what then holds is
suggested. A spec in which no position learns of a later one stays so: under `causal` whatever is
added is cut to k <= q, and where that is not said, saying it is all that is suggested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from attnspec.analysis.counting.degrees import total_edges
from attnspec.analysis.counting.differences import only_in
from attnspec.analysis.reach.leaks import leak
from attnspec.analysis.reach.spread import EVERY_PAIR
from attnspec.check.budget import joins
from attnspec.check.verdicts import Verdict, verdict_on
from attnspec.elaborate import Elaborated, elaborate
from attnspec.graphs.patterns.where import Where
from attnspec.graphs.stack import Stack, influence
from attnspec.ir.linear import K, Q
from attnspec.ir.program import Claim, Compound, Leaf, Term, leaves
from attnspec.ir.scalars import Apply, ScalarError
from attnspec.text.decoding import source_of
from attnspec.text.diagnostics import AttnSpecError, SpecError

ADVISED = frozenset("reach depth diameter path_length".split())
"""The claims for which repairs are looked for, as far as more pairs can make them hold."""

LONGEST = EVERY_PAIR
"""The longest sequence for which repairs are looked for: there all pairs are followed."""

MOST_STATEMENTS = 3
"""The most `attend` statements of one spec that repairs are tried on."""

MOST_NAMED = 2
"""The most other repairs that a message names."""

BUDGET = 1 << 32
"""The pairs that are looked at, layer by layer, for one claim: about a second."""

GRAPH_COST = 1 << 12
"""Pairs for which making a graph ready counts, for each position."""

DEGREES = (2, 4, 8, 16, 32)
"""The expanders that are tried."""


@dataclass(frozen=True)
class Repair:
    """A line that makes a claim hold.

    `instead` says whether it stands in place of the `attend` statement at `line_number` of the
    spec's own text, or beside it; `causal` stands at the head of the attention. `extra_edges` are
    the pairs of all layers and heads that come in addition at n positions, `for_every_n` says that
    the claim is then proven, or about some lengths alone, `breaks` other claims that held and then
    do not. `source` is the whole spec with the repair.
    """

    kind: str
    line: str
    instead: bool
    line_number: int
    extra_edges: int
    n: int
    breaks: tuple[str, ...]
    source: str = field(repr=False)
    for_every_n: bool = True


@dataclass(frozen=True)
class Advice:
    """The repairs found for one claim, the cheapest first, and the kinds that were tried; unless
    `complete`, not all could be in the time that is spent on it."""

    claim: str
    repairs: tuple[Repair, ...]
    tried: tuple[str, ...]
    complete: bool = True


def advise(spec: Elaborated, verdicts: Sequence[Verdict]) -> tuple[Advice, ...]:
    """Repairs for each claim on reach of a spec that does not hold."""
    return tuple(
        advice_for(spec, verdict, verdicts)
        for verdict in verdicts
        if verdict.failed_at is not None and repairable(verdict.claim)
    )


def repairable(claim: Claim) -> bool:
    """Whether more pairs can make a claim hold."""
    return claim.kind == "reach" or (claim.kind in ADVISED and claim.compare in ("<", "<="))


def advice_for(spec: Elaborated, verdict: Verdict, verdicts: Sequence[Verdict]) -> Advice:
    """Repairs for one claim of a spec, which was refuted at some length; `verdicts` are
    those on all of its claims."""
    claim = verdict.claim
    if verdict.failed_at is None or max(verdict.lengths) > LONGEST:
        return Advice(claim.text, (), ())
    number = next(i for i, one in enumerate(spec.program.claims) if one is claim)
    work = Search(spec, number, verdict, verdicts)
    found: dict[str, Repair] = {}
    for statement in work.statements[:MOST_STATEMENTS]:
        for repair in work.repairs(statement):
            found.setdefault(repair.kind, repair)
        if found:
            break
    ordered = sorted(found.values(), key=lambda repair: repair.extra_edges)
    judged = [work.judged(repair) for repair in ordered]
    judged.sort(key=lambda repair: (bool(repair.breaks), not repair.for_every_n))
    return Advice(claim.text, tuple(judged), tuple(work.tried), work.spent < BUDGET)


def words(advice: Advice) -> tuple[str | None, tuple[str, ...]]:
    """The help of a diagnostic, and its notes."""
    if not advice.repairs:
        if not advice.tried and advice.complete:
            return None, (f"repairs are looked for up to n = {LONGEST:,}",)
        if not advice.tried:
            return None, ("repairs would take longer to look for than is spent on it",)
        rest = "" if advice.complete else "; others would take longer than is spent on it"
        return None, (f"none of these makes it hold: {', '.join(advice.tried)}{rest}",)
    cheapest, *others = advice.repairs
    notes = [f"with `{one.line}` it holds, too {_price(one)}" for one in others[:MOST_NAMED]]
    return f"it holds with `{cheapest.line}` {_where(cheapest)} {_price(cheapest)}", tuple(notes)


def _where(repair: Repair) -> str:
    """Where the line stands."""
    if repair.line == "causal":
        # no scope may say it
        return "at the head of the attention"
    where = "in place of" if repair.instead else "beside"
    return f"{where} the `attend` of line {repair.line_number}"


def _price(repair: Repair) -> str:
    """`(7,920 more pairs at n = 512)`, and what else it costs."""
    change = repair.extra_edges
    pairs = (
        f"{abs(change):,} {'more' if change > 0 else 'fewer'} pairs" if change else "no more pairs"
    )
    text = f"({pairs} at n = {repair.n:,}{'' if repair.for_every_n else ', not proven beyond'})"
    if repair.breaks:
        text += f"; but then {', '.join(f'`{claim}`' for claim in repair.breaks)} does not hold"
    return text


@dataclass(frozen=True)
class Statement:
    """An `attend` of a canonical text: its text on one line, where it stands, its graph if that is
    one for all, and the heads of a layer and the slots that it serves."""

    text: str
    start: int
    end: int
    graph: Term | None
    heads: tuple[int, ...]
    slots: int
    line_number: int


class Search:
    """The repairs of one claim of one spec, in its canonical text; `tried` are their kinds."""

    def __init__(
        self, spec: Elaborated, number: int, verdict: Verdict, verdicts: Sequence[Verdict]
    ) -> None:
        self.base, self.spec, self.number = _read(spec.source), spec, number
        self.verdicts, lengths = verdicts, verdict.lengths
        failed_at = verdict.failed_at or 0
        self.spent = 0
        longest = max(lengths)
        # the longest tells most; where that holds already, the length that failed
        fails = failed_at == longest or not self._holds(self.base, longest)
        self.n = longest if fails else failed_at
        self.lengths = (self.n, *sorted(set(lengths) - {self.n}, reverse=True))
        self.edges = total_edges(Stack(influence(self.base.program)), self.n)
        self.tried: dict[str, None] = {}

    @cached_property
    def statements(self) -> list[Statement]:
        """The `attend` statements with a graph, those that serve most heads and layers first."""
        program, text = self.base.program, self.base.source
        places: dict[tuple[int, int], list[int]] = {}
        for index, attend in enumerate(program.attends):
            if attend.graph is not None and not attend.mechanism and attend.span is not None:
                places.setdefault((attend.span.start, attend.span.end), []).append(index)
        found = []
        for (start, end), indices in places.items():
            rows = [
                tuple(head for head, at in enumerate(row) if at in indices) for row in program.slots
            ]
            heads = next(row for row in rows if row)
            own = self.spec.program.attends[indices[0]].span
            found.append(
                Statement(
                    text=" ".join(text[start:end].split()),
                    start=start,
                    end=end,
                    graph=program.attends[indices[0]].graph if len(indices) == 1 else None,
                    heads=heads if program.heads is not None else (),
                    slots=sum(map(len, rows)),
                    line_number=own.line if own else 0,
                )
            )
        return sorted(found, key=lambda statement: -statement.slots)

    @cached_property
    def keeps_order(self) -> bool:
        """Whether positions learn of earlier ones alone, which a repair must not change."""
        stack = Stack(influence(self.base.program))
        if leak(stack, self.n).value is not None:
            return False
        itself = Where(Apply("==", (Q, K)))
        return any(only_in(each, itself, self.n) for _, _, each in stack.bound(self.n).found)

    # --- candidates ------------------------------------------------------------------------------

    def repairs(self, statement: Statement) -> Iterator[Repair]:
        """One repair of each kind that works, as small as it can be."""
        if not self.base.program.causal and self.keeps_order:
            yield from self._cheapest(statement, "declaring it causal", [0], lambda _: "causal")
            return
        window = _Window(statement, self.base.program.causal)
        radii = list(range(window.least + 1, self.n))
        # each of these steps divides the one before it, so that pairs are only added
        steps = [1 << power for power in range(self.n.bit_length() - 1, 0, -1)]
        yield from self._cheapest(
            statement, "one global token", [1], _added(statement, "global(first({}))")
        )
        for chunks in _chunks(statement):
            yield from self._cheapest(statement, "shifted chunks", [0], _added(statement, chunks))
        yield from self._cheapest(statement, "a wider window", radii, window.widened)
        for kind, options, extra in (
            ("a stride", steps, "residue(step = {})"),
            ("an expander", list(DEGREES), "expander(degree = {})"),
        ):
            yield from self._cheapest(statement, kind, options, _added(statement, extra))

    def _cheapest(
        self, statement: Statement, kind: str, sizes: list[int], line: Callable[[int], str]
    ) -> Iterator[Repair]:
        """The repair of the first size that works; each size has the pairs of those before it."""
        found: dict[int, Repair | None] = {}

        def works(place: int) -> bool:
            if self.spent >= BUDGET:
                return False
            self.tried[kind] = None
            found[place] = self._tried(statement, kind, line(sizes[place]))
            return found[place] is not None

        # look at the last first: where that fails, all do
        low, high = 0, len(sizes) - 1
        if high < 0 or not works(high):
            return
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if works(middle) else (middle + 1, high)
        repair = found[high]
        if repair is not None:
            edges = total_edges(Stack(influence(_read(repair.source).program)), self.n)
            yield replace(repair, extra_edges=edges - self.edges)

    def _tried(self, statement: Statement, kind: str, line: str) -> Repair | None:
        """The repair if it parses and works: in one head where the statement serves several."""
        ways = [(line, True)]
        if line == "causal":
            ways = [(line, False)]
        elif len(statement.heads) > 1:
            ways.insert(0, (f"head {statement.heads[-1]} {{ {line} }}", False))
        for text, instead in ways:
            source = self._spliced(statement, text, instead)
            try:
                repaired = _read(source)
            except SpecError:
                # a head may not be claimed twice: then the statement itself is changed
                continue
            if not all(self._holds(repaired, n) for n in self.lengths):
                return None
            return Repair(
                kind, text, instead, statement.line_number, 0, self.n, (), repaired.source
            )
        return None

    def _spliced(self, statement: Statement, text: str, instead: bool) -> str:
        source = self.base.source
        if text == "causal":
            top = source.index("attention ")
            return source[:top] + source[top:].replace("{\n", "{\ncausal\n", 1)
        kept = "" if instead else source[statement.start : statement.end] + "\n"
        return source[: statement.start] + kept + text + source[statement.end :]

    # --- verification ----------------------------------------------------------------------------

    def _holds(self, spec: Elaborated, n: int) -> bool:
        """Whether the claim holds at n; a length that the spec does not have takes nothing away."""
        claim, stack = spec.program.claims[self.number], Stack(influence(spec.program))
        try:
            self.spent += GRAPH_COST * n * len(stack.bound(n).found)
            holds, cost = joins(stack, claim, n, BUDGET - self.spent)
        except (AttnSpecError, ScalarError):
            return False
        self.spent += cost
        return holds

    def judged(self, repair: Repair) -> Repair:
        """The repair with the claims that it breaks, and whether it is one for every n."""
        stack = Stack(influence(_read(repair.source).program))
        claims = stack.program.claims
        broken = [
            before.claim.text
            for before, claim in zip(self.verdicts, claims, strict=True)
            if before.status != "refuted" and verdict_on(claim, stack).status == "refuted"
        ]
        own = claims[self.number]
        # a window that is wide enough for the lengths looked at is too narrow for longer ones
        lasting = own.at is not None or verdict_on(own, stack).status == "proven"
        return replace(repair, breaks=tuple(broken), for_every_n=lasting)


@lru_cache(maxsize=64)
def _read(text: str) -> Elaborated:
    """What a text says, kept for a while: several claims of a spec ask for the same change."""
    return elaborate(source_of(text))


# --- texts ----------------------------------------------------------------------------------------


class _Window:
    """How a statement says a wider window: its own widened, or one more where it has none whose
    size is a number. `least` is the size that it has."""

    def __init__(self, statement: Statement, causal: bool) -> None:
        self.text, self.own, self.least = statement.text, "", 0
        self.new = "window(before = {0}, after = 0)" if causal else "window(radius = {0})"
        graph = statement.graph
        terms: tuple[Term, ...] = (graph,) if isinstance(graph, Leaf) else ()
        if isinstance(graph, Compound) and graph.op == "|":
            terms = graph.terms
        for term in terms:
            if not isinstance(term, Leaf) or term.pattern != "window" or term.span is None:
                continue
            sizes = [size for _, size in term.arguments if isinstance(size, int)]
            own = " ".join(term.span.text.split())
            inside = statement.start <= term.span.start and term.span.end <= statement.end
            if inside and len(sizes) == len(term.arguments) and self.text.count(own) == 1:
                self.own, self.least = own, max(sizes)
                if "radius" in dict(term.arguments):
                    self.new = "window(radius = {0})"
                elif not causal:
                    after = dict(term.arguments)["after"]
                    self.new = f"window(before = {{0}}, after = {'{0}' if after else 0})"
                return

    def widened(self, size: int) -> str:
        """The statement with a window of this size."""
        new = self.new.format(size)
        return self.text.replace(self.own, new) if self.own else f"{self.text} | {new}"


def _added(statement: Statement, extra: str) -> Callable[[int], str]:
    """The statement with one more graph, by the size that is put into it."""
    return lambda size: f"{statement.text} | {extra.format(size)}"


def _chunks(statement: Statement) -> Iterator[str]:
    """Chunks half a chunk further on, for each size of chunk that the statement has."""
    seen = set()
    for leaf in leaves(statement.graph) if statement.graph is not None else ():
        given = dict(leaf.arguments)
        size = given.get("size")
        if leaf.pattern != "block" or not isinstance(size, int) or size < 2 or size in seen:
            continue
        seen.add(size)
        yield f"shift(block(size = {size}), by = {size // 2})"
