"""One spec timed beside rivals, in turns, in one run: what `attnspec bench` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from torch import Tensor

from attnspec.bench.rivals import OURS, SAME, SDPA, Attention, Problem, Refused, ours, rival
from attnspec.bench.timing import Timing, turns
from attnspec.ir.serial import Plain

BACKWARD = 3.5
"""How many times as long as forward alone a call with gradients is taken to be."""


@dataclass(frozen=True)
class Row:
    """One subject at one length: its time, or the `reason` for which it has none.

    `ratio` is its time over ours. `eta` is pairs / n² times dense attention without a mask over its
    time. `predicted` are the planner's seconds for the forward pass, of `backends`. `difference` is
    the largest between its output and ours; None for work that is not the same.
    """

    n: int
    subject: str
    timing: Timing | None = None
    reason: str | None = None
    ratio: float | None = None
    eta: float | None = None
    backends: tuple[str, ...] = ()
    predicted: float | None = None
    difference: float | None = None

    def data(self) -> dict[str, Plain]:
        """The fields as plain data."""
        return {**asdict(self), "backends": [*self.backends]}


@dataclass(frozen=True)
class Progress:
    """How far a run is: the rows so far, the share that is done, and what is done now."""

    rows: tuple[Row, ...]
    share: float
    doing: str


def expected(problems: Sequence[Problem], rivals: Sequence[str], rounds: int, most: float) -> float:
    """About how many seconds a run takes, as far as there are estimates; at most `most` a length,
    but for the first call of each subject."""
    total = 0.0
    for problem in problems:
        calls = []
        for name in (problem.setting.backend, *rivals):
            try:
                calls.append(_call_seconds(problem, name))
            except Refused:
                continue
        calls = [seconds for seconds in calls if seconds <= most]
        total += 3 * sum(calls) + min(most, rounds * sum(calls))
    return total


def _call_seconds(problem: Problem, name: str) -> float:
    """Estimated seconds of one call; raises Refused."""
    return (problem.predicted(name) or 0.0) * (BACKWARD if problem.setting.backward else 1.0)


def bench(
    problems: Sequence[Problem], rivals: Sequence[str], rounds: int, most: float
) -> Iterator[Progress]:
    """Time ours and the rivals at every length, in turns, for so many rounds or about `most`
    seconds a length, a round at least; yields after every step.

    Raises BackendError where ours is asked for by a backend that refuses.
    """
    rows: tuple[Row, ...] = ()
    for index, problem in enumerate(problems):
        for progress in _length(problem, rivals, rounds, most):
            share = (index + progress.share) / len(problems)
            yield Progress((*rows, *progress.rows), share, progress.doing)
        rows = (*rows, *progress.rows)


def _length(
    problem: Problem, rivals: Sequence[str], rounds: int, most: float
) -> Iterator[Progress]:
    at = f"n = {problem.n:,}"
    yield Progress((), 0.0, f"{at}: compiling")
    subjects: dict[str, Attention] = {}
    rows = {name: Row(problem.n, name) for name in (OURS, *rivals)}
    expected: Tensor | None = None
    for name in rows:
        if name != OURS:
            yield Progress(_known(rows), 0.0, f"{at}: preparing {name}")
        try:
            seconds = _call_seconds(problem, problem.setting.backend if name == OURS else name)
            if seconds > most:
                raise Refused(
                    f"a call is estimated to take {seconds:,.0f} s, {most:g} s are allowed"
                )
            if name != OURS and expected is None:
                raise Refused("there is no time of ours to compare with")
            backend = problem.setting.backend
            subject = ours(problem, backend) if name == OURS else rival(problem, name)
            if name != SDPA:
                output, same = problem.output(subject).double(), SAME[problem.setting.dtype]
                expected = output if expected is None else expected
                difference = (output - expected).abs().max().item()
                # a comparison that NaN fails as well
                if not difference <= same:
                    raise Refused(
                        f"its result differs from ours by {difference:.3g}, {same:g} is allowed"
                    )
                rows[name] = replace(rows[name], difference=difference)
            subjects[name] = subject
        except Refused as error:
            rows[name] = replace(rows[name], reason=str(error))
    calls = {name: problem.call(subject) for name, subject in subjects.items()}
    steps = len(calls) * (rounds + 1)
    for done, (name, timed) in enumerate(turns(calls, rounds, most), 1):
        rows = {name: _timed(problem, row, timed) for name, row in rows.items()}
        yield Progress(_known(rows), done / steps, f"{at}: {name}")
    yield Progress(_known(rows), 1.0, at)


def _known(rows: Mapping[str, Row]) -> tuple[Row, ...]:
    """The rows that have a time, or the reason for which they have none."""
    return tuple(row for row in rows.values() if row.timing or row.reason)


def _timed(problem: Problem, row: Row, timed: Mapping[str, Timing]) -> Row:
    """A row with its time, if it has one by now, and what follows from that."""
    timing = timed.get(row.subject)
    if timing is None:
        return row
    chosen, eta = row.subject == OURS, None
    # dense attention without a mask does other work, of which all pairs are useful
    if SDPA in timed and row.subject != SDPA and problem.edges is not None:
        eta = problem.edges / problem.n**2 * timed[SDPA].median / timing.median
    return replace(
        row,
        timing=timing,
        ratio=timing.median / timed[OURS].median if OURS in timed else None,
        eta=eta,
        backends=tuple(dict.fromkeys(problem.plan)) if chosen else (),
        predicted=problem.predicted(problem.setting.backend if chosen else row.subject),
    )
