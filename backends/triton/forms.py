"""What the kernels compute of scores, known without torch."""

from __future__ import annotations

from attnspec.ir.scalars import Apply, Scalar, Symbol, symbols
from attnspec.ir.scores import DISTANCE, S, Scores, goes_by_distance

CAP, SLOPE, TABLE = 1, 2, 3
"""How a kernel is told of a statement: a cap, a slope of |q - k|, a number for each q - k."""


Form = tuple[int, Scalar, "Scalar | None"]
"""How a statement is told, with its number for each head, and the index by which a learned table is
read, None where none is."""


def forms_of(scores: Scores) -> list[Form] | None:
    """How a kernel is told of all statements; None where it cannot be told of one."""
    forms = [each for each in map(_form_of, scores.statements) if each is not None]
    return forms if len(forms) == len(scores.statements) else None


def _form_of(statement: Scalar) -> Form | None:
    """How a kernel is told of a statement; None where it cannot be."""
    match statement:
        case Apply("*", (cap, Apply("tanh", (Apply("/", (over, by)),)))) if over == S and cap == by:
            return (CAP, cap, None) if set(symbols(cap)) <= {"head"} else None
        case Apply("-", (score, Apply("*", (slope, far)))) if score == S:
            if far == Apply("abs", (DISTANCE,)) and set(symbols(slope)) <= {"head"}:
                return SLOPE, slope, None
        case Apply("+", (score, Apply("entry", (Symbol(), index)))) if score == S:
            return (TABLE, 0.0, index) if goes_by_distance(index) else None
    scores = Scores((statement,))
    return (TABLE, 0.0, None) if scores.added is not None and scores.by_distance else None


def refuses_scores(scores: Scores) -> str | None:
    """Why the kernels do not compute scores, or None."""
    forms = forms_of(scores)
    if forms is None:
        return "its kernels compute a cap and added functions of q - k, and `score` is more"
    if sum(digit == TABLE for digit, *_ in forms) > 1:
        return "its kernels add one `score bias` or function of q - k, and the spec has several"
    return None
