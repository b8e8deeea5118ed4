"""Whether an attention reads no later position: shown by its form, or looked at pair by pair."""

from __future__ import annotations

from attnspec.bind import Situation, bind_attended
from attnspec.diagnostics import AttnSpecError
from attnspec.ir import Compound, Program, Term, inputs_of, leaves
from attnspec.patterns import BY_NAME
from attnspec.relations import Relation


def require_past_only(program: Program, layer: int, heads: int, n: int, n_q: int) -> None:
    """Raise AttnSpecError unless the last n_q of n queries read no key after themselves.

    The pairs of every head are looked at where the form does not decide; a graph whose pairs
    depend on run-time inputs or on the data must be causal by its form.
    """
    if program.causal:
        return
    seen: set[Relation] = set()
    for head in range(program.heads or heads):
        attend = program.attend(layer, head)
        if attend.graph is None or attend.mechanism is not None:
            raise _leak(program, "it reads every position")
        if _past_by_form(attend.graph):
            continue
        if _unknown(program, attend.graph):
            raise _leak(program, "its pairs are known only at run time")
        at = Situation(
            n=n,
            patterns=BY_NAME,
            layer=layer,
            head=head,
            layers=program.layers,
            heads=program.heads,
        )
        relation = bind_attended(attend.graph, at)
        if relation in seen:
            continue
        seen.add(relation)
        for first, last in relation.chunks(n):
            q, k = relation.rows(max(first, n - n_q), max(last, n - n_q), n)
            later = k > q
            if later.any():
                index = int(later.argmax())
                raise _leak(program, f"position {q[index]} reads position {k[index]}")


def _leak(program: Program, reason: str) -> AttnSpecError:
    return AttnSpecError(
        f"a causal spec is needed, the model must not read the future, but `{program.name}` may: "
        f"{reason}; write `causal` in the spec"
    )


def _past_by_form(term: Term) -> bool:
    """Whether a term lies within k <= q for its form alone; False decides nothing."""
    if not isinstance(term, Compound):
        return term.pattern in ("causal", "self")
    match term.op:
        case "&":
            return any(_past_by_form(part) for part in term.terms)
        case "|":
            return all(_past_by_form(part) for part in term.terms)
        case "-":
            return _past_by_form(term.terms[0])
        case _:
            return False


def _unknown(program: Program, graph: Term) -> bool:
    if program.grid is not None or inputs_of(graph):
        return True
    return any(BY_NAME[leaf.pattern].data_dependent for leaf in leaves(graph))
