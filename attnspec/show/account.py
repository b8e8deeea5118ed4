"""What a page says beside its pictures: what is reached, what it costs, the plan, the claims. Where
something is not known the reason stands in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from attnspec.analysis.cost.cost import Seconds, longest_break, seconds_at
from attnspec.analysis.report.report import Report
from attnspec.backends.planner import Plan, plan
from attnspec.check.verdicts import Verdict, judge
from attnspec.elaborate import Elaborated
from attnspec.graphs.stack import Stack
from attnspec.ir.crossing import evened
from attnspec.lower.lower import require_built
from attnspec.show.panels import Known, Sample
from attnspec.show.reached import Reach, reach_of
from attnspec.text.diagnostics import AttnSpecError, InternalError

LENGTHS = (256, 1024, 4096, 16384, 65536)
"""The lengths at which costs are compared, as far as the spec has them."""

T = TypeVar("T")


@dataclass(frozen=True)
class Account:
    """The parts, or for each why it is not there. `verdicts` are those on all claims."""

    reach: Reach | str
    costs: tuple[Seconds, ...] | str
    plan: Plan | str
    verdicts: tuple[Verdict, ...]


def account(
    spec: Elaborated,
    n: int,
    side: int,
    inputs: Sample,
    known: Known | None = None,
    m: int | None = None,
) -> Account:
    """All that is said of a spec at n positions, drawn in cells of `side` positions; `known` are
    samples of what tensors decide, m the queries of a spec with `cross`, whose costs are compared
    where they are as many as its keys."""
    report = Report(spec, n, dict(inputs), known, m=m)
    program = report.program

    def planned() -> Plan:
        require_built(program)
        return plan(program, report.length)

    return Account(
        reach=_or_reason(lambda: reach_of(report, side)),
        costs=_or_reason(lambda: _costs(Stack(evened(spec.program)))),
        plan=_or_reason(planned),
        verdicts=tuple(judge(spec.program)),
    )


def _costs(stack: Stack) -> tuple[Seconds, ...]:
    require_built(stack.program)
    most = longest_break(stack.program)
    lengths = [n for n in stack.lengths(LENGTHS) if n <= most]
    return tuple(seconds_at(stack, n) for n in lengths)


def _or_reason(ask: Callable[[], T]) -> T | str:
    """What is asked for, or in words why there is none."""
    try:
        return ask()
    except InternalError:
        raise
    except AttnSpecError as error:
        return str(error).splitlines()[0]
