"""Which backend runs which heads: the cheapest of those that do not refuse.

A backend that is asked for by name runs, or its refusal is raised; nothing falls back silently.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from html import escape
from itertools import product
from operator import attrgetter
from typing import TypeAlias

from attnspec.backends import BACKENDS
from attnspec.backends.plugins import installed, installed_names
from attnspec.backends.tables.backend import TablesBackend
from attnspec.graphs.bind import BindError, extents_of, located
from attnspec.graphs.stack import TooMuch
from attnspec.ir.parameters import RelationError
from attnspec.ir.program import Program
from attnspec.layout.steps import drawn_alike
from attnspec.limits import LIMITS
from attnspec.lower.costs import SHIPPED, current, origin
from attnspec.lower.lower import layers_of
from attnspec.lower.work import (
    ONE,
    Backend,
    BackendError,
    Heads,
    Shape,
    Work,
    is_on_request,
    refusal_of,
)
from attnspec.text.diagnostics import ranges, time_text

AUTO = "auto"
"""Stands in place of a backend's name for the cheapest."""

RENAMED = {**dict.fromkeys(("bands", "lists", "rows", "tiles"), "tables"), "scattered": "edges"}
"""Earlier names of backends."""

ON_REQUEST = "on this device it runs only if it is named"
"""The refusal of a backend that is not named and runs on request alone."""

REFUSES = "the backend '{}' refuses: {}; `backend='auto'` chooses among the others"

MOST_GROUPS = 8
"""The most groups of heads that a plan prints one by one."""

OWN = tuple(each.name for each in BACKENDS if not is_on_request(each, "cpu"))
"""The backends of this package that choose themselves on the CPU."""

TABLES = next(each for each in BACKENDS if isinstance(each, TablesBackend))
"""What decodes, where no backend is named: nothing reads fewer keys."""


@dataclass(frozen=True)
class Candidate:
    """What one backend says of a work for a shape: estimated seconds, infinite where there are
    none, and why it refuses."""

    backend: Backend
    seconds: float
    refusal: str | None


@dataclass(frozen=True)
class Step:
    """One group of heads of some layers with its candidates, the chosen one first.

    `lines` say what the chosen one does, step by step.
    """

    layers: tuple[int, ...]
    heads: Heads | None
    candidates: tuple[Candidate, ...]
    lines: tuple[str, ...]

    @property
    def chosen(self) -> Backend:
        """The backend that runs this step."""
        return self.candidates[0].backend


Row: TypeAlias = "tuple[str, str, str, str, tuple[str, ...]]"
"""A line of a plan: layers and heads, or several groups and "", a backend, what it says, and what a
chosen one does, step by step."""


@dataclass(frozen=True)
class Plan:
    """What runs at n positions on a type of device.

    `str` gives a line per step and backend, and one for what a backend says to several steps alike.
    More than `MOST_GROUPS` steps are folded: those that the same backend runs in the same way are
    one, with the range of their times.

    `m` are the queries of a spec with `cross`. `rates` says whose rates the estimates are made
    with, `shape` for how many samples and heads of which size they are, `training` whether they are
    of both passes. Those of a type of device without rates are a GPU's, and give the order alone.
    """

    name: str
    n: int
    device: str
    steps: tuple[Step, ...]
    shape: Shape
    m: int | None
    rates: str
    training: bool

    @property
    def is_estimated(self) -> bool:
        """Whether the estimates are about this device."""
        return self.device in SHIPPED

    def __str__(self) -> str:
        queries = "" if self.m is None else f"m = {self.m}, "
        title = f"{self.name}, {queries}n = {self.n}, {self.device}"
        if not self.steps:
            return f"{title}: nothing to run"
        rows = self._rows()
        layers, heads = (max(len(row[side]) for row in rows if row[1]) for side in (0, 1))
        names = max(len(row[2]) for row in rows)
        lines = [f"{title}; {self.about}"]
        if self._is_folded:
            seconds = sum(step.candidates[0].seconds * len(step.layers) for step in self.steps)
            estimate = self._estimate(seconds)
            every = "" if estimate is None else f", {time_text(estimate)} in all"
            lines.append(f"{len(self.steps)} different groups of heads{every}; `--json` lists each")
        for which, head, name, said, steps in rows:
            where = f"{which:<{layers}}  {head}" if head else which
            lines.append(f"{where:<{layers + heads + 2}}  {name:<{names}}  {said}".rstrip())
            lines.extend(f"{' ' * (layers + heads + names + 6)}- {each}" for each in steps)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    @property
    def about(self) -> str:
        """What the estimates are for and whose they are, in words."""
        if not self.is_estimated:
            return (
                f"no estimates for {self.device}: plain tensor operations, ranked as on a GPU of"
                " another kind"
            )
        samples, heads = self.shape.batch, self.shape.heads or 1
        many = f"{samples} samples, " if samples > 1 else ""
        each = "one head" if heads == 1 else "the heads of a line, each"
        size, passes = self.shape.head_dim, "forward and backward" if self.training else "forward"
        return f"estimates for {many}{each} of size {size}, {passes}, {self.rates}"

    def _rows(self) -> list[Row]:
        """A line for each step and backend, then for what a backend says to several steps alike."""
        refusals: dict[tuple[str, str], list[str]] = {}
        for step in self.steps:
            for each in step.candidates:
                if each.refusal is not None:
                    groups = refusals.setdefault((each.backend.name, each.refusal), [])
                    groups.append(" ".join(_where([step])))
        shared = {key: groups for key, groups in refusals.items() if len(groups) > 1}
        rows = list[Row]()
        for steps in self._folded():
            layers, heads = _where(steps)
            for i, candidate in enumerate(steps[0].candidates):
                name, refusal = candidate.backend.name, candidate.refusal
                if (name, refusal) in shared:
                    continue
                alike = sorted((step.candidates[i] for step in steps), key=attrgetter("seconds"))
                said = dict.fromkeys(self._said(each) for each in (alike[0], alike[-1]))
                lines = () if i else steps[0].lines
                if any(step.lines != steps[0].lines for step in steps):
                    lines = _unnumbered(lines)
                mark = "" if refusal else " " * 8 if i else "chosen  "
                rows.append((layers, heads, name, mark + " to ".join(said), lines))
        for (name, refusal), groups in shared.items():
            every = len(groups) == len(self.steps)
            where = "every group" if every else f"{len(groups)} groups"
            which = "" if every else f" ({'; '.join(groups)})"
            rows.append((where, "", name, f"refused: {refusal}{which}", ()))
        return rows

    @property
    def _is_folded(self) -> bool:
        return len(self.steps) > MOST_GROUPS

    def _folded(self) -> list[list[Step]]:
        """The steps, or where they are many those with the same candidates and lines together."""
        folded: dict[object, list[Step]] = {}
        for number, step in enumerate(self.steps):
            names = tuple((each.backend.name, each.refusal) for each in step.candidates)
            key = (names, _unnumbered(step.lines)) if self._is_folded else number
            folded.setdefault(key, []).append(step)
        return list(folded.values())

    def _said(self, candidate: Candidate) -> str:
        if candidate.refusal is not None:
            return f"refused: {candidate.refusal}"
        if not self.is_estimated:
            return ""
        return "no estimate" if candidate.seconds == math.inf else time_text(candidate.seconds)

    def _estimate(self, seconds: float) -> float | None:
        """Estimated seconds, None where there are none or none for this device."""
        return seconds if self.is_estimated and seconds < math.inf else None

    def to_dict(self) -> dict[str, object]:
        """The plan as plain data; seconds are estimates for all samples and heads of a step, and
        None where there are none."""
        return {
            "name": self.name,
            **({} if self.m is None else {"m": self.m}),
            "n": self.n,
            "device": self.device,
            "batch": self.shape.batch,
            "heads": self.shape.heads,
            "head_size": self.shape.head_dim,
            "rates": self.rates,
            **({"training": True} if self.training else {}),
            "steps": [
                {
                    "layers": list(step.layers),
                    "heads": step.heads and list(step.heads),
                    "chosen": step.chosen.name,
                    "candidates": [
                        {
                            "backend": each.backend.name,
                            "seconds": self._estimate(each.seconds),
                            "refusal": each.refusal,
                        }
                        for each in step.candidates
                    ],
                }
                for step in self.steps
            ],
        }


def _unnumbered(lines: Sequence[str]) -> tuple[str, ...]:
    """Lines with `…` in place of each number."""
    return tuple(re.sub(r"\d[\d,.]*", "…", line) for line in lines)


def _where(steps: Sequence[Step]) -> tuple[str, str]:
    """The layers and heads of some steps, in words."""
    layers = {layer for step in steps for layer in step.layers}
    heads = {head for step in steps for head in step.heads or ()}
    cells = sum(len(step.layers) * len(step.heads or ()) for step in steps)
    if cells == len(layers) * len(heads):
        which = f"head {ranges(sorted(heads))}" if heads else "every head"
    else:
        which = f"{len(steps)} groups"
    return f"layer {ranges(sorted(layers))}", which


def plan(
    program: Program,
    n: int,
    device: str,
    backend: str,
    shape: Shape,
    passes: Callable[[Work, str], float] | None,
) -> Plan:
    """The backends of all layers and heads at n positions, by estimates for a shape; with
    `passes` of training, which takes so many times the forward of a work in a backend of a name.

    Raises BackendError for a backend that is unknown or refuses, SpecError where a size has no
    admissible value at n, AttnSpecError above `LIMITS.planned` and for lengths that a spec does
    not have.
    """
    check_backend(backend)
    heads = shape.heads_of(program)
    shape = replace(shape, heads=heads)
    if n > LIMITS.planned:
        raise TooMuch(f"plans are made up to n = {LIMITS.planned:,}, got {n:,}")
    kind = device.partition(":")[0]
    sides = program.crossing
    empty = not n if sides is None else sides.empty
    if n == 0:
        # nothing runs, but a grid has its own length
        extents_of(program, n)
    with located(None):
        groups = {} if empty else layers_of(program, heads, n)
    steps = []
    for (work, mine), layers in groups.items():
        work = replace(work, copies=len(mine), device=kind)
        with located(program.attend(layers[0], mine[0]).span):
            ranked = candidates(work, kind, backend, shape)
        if passes is not None:
            # of one that refuses nothing is asked
            ranked = tuple(
                c if c.refusal else replace(c, seconds=c.seconds * passes(work, c.backend.name))
                for c in ranked
            )
        every = program.heads is None and len(mine) == heads
        lines = ranked[0].backend.steps(work)
        steps.append(Step(tuple(layers), None if every else mine, ranked, lines))
    m, n = (None, n) if sides is None else (sides.queries, sides.keys)
    training = passes is not None
    return Plan(program.name, n, kind, tuple(steps), shape, m, origin(kind), training)


def check_backend(name: str) -> None:
    """Raises BackendError unless there is a backend of this name."""
    names = [AUTO, *[backend.name for backend in BACKENDS], *installed_names()]
    if name in RENAMED and name not in names:
        raise BackendError(f"the backend `{name}` is called `{RENAMED[name]}` now")
    if name not in names:
        raise BackendError(f"the backend must be one of {', '.join(names)}, got {name!r}")


def backend_of(name: str) -> Backend:
    """The backend of a name; raises BackendError where there is none."""
    check_backend(name)
    return next(backend for backend in (*BACKENDS, *installed()) if backend.name == name)


def candidates(
    work: Work, device: str, backend: str = AUTO, shape: Shape = ONE
) -> tuple[Candidate, ...]:
    """What every backend says of all copies of a work for samples and heads of a shape, the chosen
    one first, those that refuse last."""
    work = _planned(work, device)
    # estimates are for heads of 64 numbers
    times = shape.batch * work.copies * shape.head_dim / 64
    listed = []
    for each in (*BACKENDS, *installed()):
        is_asked = each.name == backend or not is_on_request(each, device)
        refusal = refusal_of(each, work, device) if is_asked else ON_REQUEST
        listed.append(Candidate(each, math.inf if refusal else times * each.cost(work), refusal))
    listed.sort(
        key=lambda each: (
            each.backend.name != backend,
            each.refusal is not None,
            not (work.decodes and each.backend is TABLES),
            each.seconds,
        )
    )
    chosen = listed[0]
    if chosen.refusal is not None:
        if backend != AUTO:
            raise BackendError(REFUSES.format(backend, chosen.refusal))
        graph = work.mechanism is None
        some = (x for x in listed if graph or getattr(x.backend, "runs_mechanisms", False))
        able = (f"`{x.backend.name}` refuses: {x.refusal}" for x in some if x.refusal != ON_REQUEST)
        raise BackendError(f"no backend runs this; {'; '.join(able)}")
    return tuple(listed)


def choose(work: Work, device: str, backend: str = AUTO) -> Backend:
    """The first of `candidates`; one that is asked for by name need only not refuse."""
    if backend != AUTO:
        named = backend_of(backend)
        refusal = refusal_of(named, work, device)
        if refusal is not None:
            raise BackendError(REFUSES.format(backend, refusal))
        return named
    work = _planned(work, device)
    if work.decodes:
        return TABLES
    return _cheapest(work, work.copies, device, current(device))


def _planned(work: Work, device: str) -> Work:
    """A work on a type of device, with the draws of the head whose plan it shares."""
    relation = work.relation if work.mechanism else drawn_alike(work.relation)[0]
    return replace(work, relation=relation, device=device)


@lru_cache(maxsize=1024)
def _cheapest(work: Work, copies: int, device: str, rates: object) -> Backend:
    """The backend of the least estimate by these rates."""
    return candidates(replace(work, copies=copies), device)[0].backend


LENGTHS = (1, 64, 4096)
"""A refusal at lengths as far apart as these does not depend on the length."""

DEVICES = ("cpu", "cuda")
"""The devices that a module may be moved to later."""


def require_willing(program: Program, name: str, devices: Sequence[str] = DEVICES) -> None:
    """Raises BackendError, with every reason, where a backend refuses on all of the devices and at
    all lengths that the program has, or where no backend runs a mechanism; unknown backends as
    well."""
    if name == AUTO:
        if not program.mechanisms:
            return
        devices = DEVICES[:1]
    check_backend(name)
    lengths = LENGTHS if program.fixed_length is None else (program.fixed_length,)
    works = []
    for n in lengths:
        # the program may have no such length
        with suppress(BindError):
            works.append([work for work, _ in layers_of(program, program.head_count, n)])
    if name != AUTO and len(works) < min(2, len(lengths)):
        # one length says nothing of the others
        return
    reasons: dict[str, str] = {}
    for device, at_length in product(devices, works):
        # a predicate without a value at this length says nothing of the others
        with suppress(RelationError):
            refusals = [_refusal(name, work, device) for work in at_length]
            if not any(refusals):
                return
            # of the longest sequence, which is the most like those that are meant
            reasons[device] = next(filter(None, refusals))
    if not reasons:
        return
    distinct = list(dict.fromkeys(reasons.values()))
    if name == AUTO:
        raise BackendError(distinct[0])
    if len(distinct) > 1:
        distinct = [f"on {device}, {reason}" for device, reason in reasons.items()]
    raise BackendError(REFUSES.format(name, "; ".join(distinct)))


def _refusal(name: str, work: Work, device: str) -> str | None:
    """Why a backend, or each of them, does not run a work, or None."""
    if name != AUTO:
        return refusal_of(backend_of(name), work, device)
    try:
        choose(work, device)
    except BackendError as error:
        return str(error)
    return None
