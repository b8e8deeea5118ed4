"""Formulas that differ in numbers alone, as one formula of those numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from attnspec.compile.standalone.expressions import Expression, Operand, flat, name

_NAMES = "rstuvw"


@dataclass(frozen=True)
class Family:
    """Formulas of one shape: the places of its members in a list, what they have in common, and the
    names and values of the numbers that they do not."""

    members: tuple[int, ...]
    formula: tuple[Expression, ...]
    names: tuple[str, ...] = ()
    values: tuple[tuple[int | float, ...], ...] = ()


def families(formulas: Sequence[tuple[Expression, ...]]) -> list[Family]:
    """The formulas, each a tuple of expressions, gathered by their shapes."""
    shapes: dict[tuple[str, ...], list[int]] = {}
    for place, formula in enumerate(formulas):
        shapes.setdefault(tuple(flat(_blank(each)) for each in formula), []).append(place)
    found = []
    for members in shapes.values():
        family = _family(members, [formulas[place] for place in members])
        found += [family] if family else [Family((m,), formulas[m]) for m in members]
    return found


def _family(members: Sequence[int], formulas: Sequence[tuple[Expression, ...]]) -> Family | None:
    """One formula of the numbers that differ; None where there are more than have names."""
    numbers = [tuple(x for each in formula for x in _numbers(each)) for formula in formulas]
    columns = list(zip(*numbers, strict=True))
    different = list(dict.fromkeys(column for column in columns if len(set(column)) > 1))
    if len(different) > len(_NAMES):
        return None
    names = dict(zip(different, _NAMES, strict=False))
    given = iter([name(names[column]) if column in names else column[0] for column in columns])
    formula = tuple(_filled(each, given) for each in formulas[0])
    return Family(
        tuple(members), formula, tuple(names.values()), tuple(zip(*different, strict=True))
    )


def _is_number(operand: Operand) -> bool:
    return not isinstance(operand, Expression | bool)


def _numbers(expression: Expression) -> Iterator[int | float]:
    for arg in expression.args:
        if isinstance(arg, Expression):
            yield from _numbers(arg)
        elif _is_number(arg):
            yield arg


def _blank(expression: Expression) -> Expression:
    return _filled(expression, iter([name("#")] * sum(1 for _ in _numbers(expression))))


def _filled(expression: Expression, numbers: Iterator[Operand]) -> Expression:
    """The expression with its numbers replaced, in the order in which they stand."""
    args: list[Operand] = []
    for arg in expression.args:
        if isinstance(arg, Expression):
            args.append(_filled(arg, numbers))
        else:
            args.append(next(numbers) if _is_number(arg) else arg)
    return replace(expression, args=tuple(args))
