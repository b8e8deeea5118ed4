"""Whether an attention reads no later position: shown by its form, or looked at pair by pair."""

from __future__ import annotations

from attnspec.graphs.forms.properties import never_reads_later
from attnspec.graphs.patterns import BY_NAME
from attnspec.ir.program import Program, leaves
from attnspec.lower.lower import stand_ins, works_of
from attnspec.text.diagnostics import AttnSpecError


class ReadsLaterError(AttnSpecError):
    """A spec may read a later position in a model that must not."""


def require_past_only(program: Program, layer: int, heads: int, n: int, n_q: int) -> None:
    """Raise ReadsLaterError unless the last n_q of n queries read no key after themselves.

    The pairs of every head are looked at where the form does not decide; a graph whose pairs
    depend on run-time inputs or on the data must be causal by its form.
    """
    if is_past_only(program, layer):
        return
    attends = [program.attend(layer, head) for head in range(program.heads or 1)]
    graphs = [attend.graph for attend in attends if attend.mechanism is None and attend.graph]
    if len(graphs) < len(attends):
        raise _leak(program, "a mechanism reads every position")
    for graph in graphs:
        if any(BY_NAME[leaf.pattern].data_dependent for leaf in leaves(graph)):
            raise _leak(program, "its pairs are decided by the data")
    for work, _ in works_of(program, layer, heads, n_q, n, stand_ins(program)):
        if work.reads:
            raise _leak(program, f"its pairs depend on the input `{work.reads[0]}`")
        for first, last in work.relation.chunks(n):
            q, k = work.relation.rows(max(first, n - n_q), max(last, n - n_q), n)
            later = k > q
            if later.any():
                index = int(later.argmax())
                raise _leak(program, f"position {q[index]} reads position {k[index]}")


def require_past_only_by_form(program: Program, layer: int) -> None:
    """The same of every length: raise unless it shows in the form."""
    if not is_past_only(program, layer):
        raise _leak(program, "in a program of every length no pairs are looked at")


def is_past_only(program: Program, layer: int) -> bool:
    """Whether it shows in the form of a layer that it reads no later position."""
    attends = [program.attend(layer, head) for head in range(program.heads or 1)]
    return program.causal or all(
        attend.mechanism is None and attend.graph is not None and never_reads_later(attend.graph)
        for attend in attends
    )


def _leak(program: Program, reason: str) -> ReadsLaterError:
    return ReadsLaterError(
        f"a causal spec is needed, the model must not read the future, but `{program.name}` may: "
        f"{reason}; write `causal` in the spec"
    )
