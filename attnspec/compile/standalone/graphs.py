"""The file of a spec whose heads are graphs: the mask as a function, and what runs it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

from attnspec.compile.standalone.expressions import lines
from attnspec.compile.standalone.formulas import formula_of
from attnspec.compile.standalone.page import Page, Text, argument_of
from attnspec.compile.standalone.scores import score_text
from attnspec.ir.crossing import QUERIES
from attnspec.ir.program import Program, Term, inputs_of
from attnspec.limits import LIMITS

NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?\b")
"""A number in a text."""


def graph_text(program: Program) -> Text:
    """The functions of a file. Raises StandaloneError for what cannot be said."""
    mask, scores = mask_text(program), score_text(program)
    settings = {**mask.settings, **scores.settings, "SIZED": False, "DRAWN": False}
    names = {"weigh": program.attends[0].normalize}
    return Text({**mask.functions, **scores.functions}, settings, names)


def mask_text(program: Program) -> Text:
    """The functions that say which pairs there are."""
    pages, cases = _masks(program)
    read = {x.name for page in pages for x in page.inputs}
    settings: dict[str, object] = {
        "NUMBERS": dict(sorted(each for case in cases for each in case.numbers)),
        "SCORED": tuple(x.name for x in program.inputs if x.name not in read),
    }
    functions = {"mask": _mask(program, pages, cases), "mask_mod_of": _mask_mod(program, pages)}
    return Text(functions, settings)


# --- the mask ------------------------------------------------------------------------------------


class Case(NamedTuple):
    """The statements of the slots whose masks differ in numbers alone: heads and expressions, the
    names of these numbers, and the numbers of each slot."""

    slots: tuple[int, ...]
    statements: tuple[tuple[str, str], ...]
    names: tuple[str, ...] = ()
    numbers: tuple[tuple[int, tuple[object, ...]], ...] = ()


def _masks(program: Program) -> tuple[list[Page], list[Case]]:
    """A page for each distinct graph, and the cases of the mask."""
    pages: list[Page] = []
    texts = []
    for attend in program.attends:
        term = cast(Term, attend.graph)
        read = inputs_of(term)
        declared = tuple(x for x in program.inputs if x.name in read)
        page = Page(program, declared)
        if pages:
            # what one draws, all may name
            page.tables, page.lists = pages[0].tables, pages[0].lists
        formula = formula_of(term, page)
        pages.append(page)
        statements = [f"{size} = \t{value}" for size, value in page.sizes.items()]
        statements += [f"\t{check}" for check in page.checks]
        texts.append("\n".join([*statements, f"return \t{formula.text}"]))
    return pages, list(_cases(texts))


def _cases(texts: Sequence[str], names: str = "rstuvw") -> Iterator[Case]:
    """The texts of slots, gathered by what they are without their numbers, unless more of these
    differ than have names."""
    shapes: dict[str, list[int]] = {}
    for slot, text in enumerate(texts):
        shapes.setdefault(NUMBER.sub("#", text), []).append(slot)
    for slots in shapes.values():
        columns = list(zip(*(NUMBER.findall(texts[slot]) for slot in slots), strict=True))
        differing = [each for each in dict.fromkeys(columns) if len(set(each)) > 1]
        if len(differing) > len(names):
            yield from (Case((slot,), _statements(texts[slot])) for slot in slots)
            continue
        named = dict(zip(differing, names, strict=False))
        shown = iter([named.get(each, each[0]) for each in columns])
        text = NUMBER.sub(lambda _, shown=shown: next(shown), texts[slots[0]])  # type: ignore[misc]
        rows = [tuple(map(ast.literal_eval, row)) for row in zip(*differing, strict=True)]
        numbers = tuple(zip(slots, rows, strict=bool(rows)))
        yield Case(tuple(slots), _statements(text), tuple(named.values()), numbers)


def _statements(text: str) -> tuple[tuple[str, str], ...]:
    heads = (line.partition("\t") for line in text.split("\n"))
    return tuple((head, rest) for head, _, rest in heads)


def _arguments(program: Program, pages: Sequence[Page]) -> list[str]:
    """What the mask takes besides slot, q and k."""
    symbols = [each for each in ("layer", "h") if any(each in page.symbols for page in pages)]
    inputs = [argument_of(x) for x in program.inputs if any(x in page.inputs for page in pages)]
    lengths = [QUERIES, "n"] if program.cross else ["n"]
    drawn = *pages[0].tables, *pages[0].lists
    return [*lengths, *symbols, *(["b", *inputs] if inputs else []), *drawn]


def _mask(program: Program, pages: Sequence[Page], cases: Sequence[Case]) -> str:
    several = len(pages) > 1
    arguments = [*(["slot"] if several else []), "q", "k", *_arguments(program, pages)]
    of = "m queries and n keys" if program.cross else "n positions"
    found = [
        f"def mask({', '.join(arguments)}):",
        f'    """Whether query q reads key k of {of}{", in a slot" if several else ""}."""',
    ]
    for case in cases:
        indent = 4
        if case is not cases[-1]:
            one = len(case.slots) == 1
            asked = f"== {case.slots[0]}" if one else f"in {case.slots!r}"
            found.append(f"    if slot {asked}:")
            indent = 8
        if case.names:
            shown = ", ".join(case.names)
            shown = f"({shown},)" if len(case.names) == 1 else shown
            found.append(f"{' ' * indent}{shown} = NUMBERS[slot]")
        for head, text in case.statements:
            found += lines(text, head, indent)
    return "\n".join(found)


def _mask_mod(program: Program, pages: Sequence[Page]) -> str:
    """The function that gives what FlexAttention takes."""
    last = "m queries and n keys" if program.cross else "the last n_q of n positions"
    queries, several = "m" if program.cross else "n_q", len(pages) > 1
    counted, repeated = f"heads, {queries}, n = size[1:]", several and program.heads is None
    found = [
        "def mask_mod_of(layer, size, device, x):",
        f'    """The mask of {last}; `size` is (B, H, {queries}, n)."""',
        f"    {counted}" if pages[0].tables or repeated else f"    {queries}, n = size[2:]",
    ]
    fixed, most = program.fixed_length, min(page.most for page in pages)
    if fixed is not None:
        message = f"the grid has {fixed} positions, got n = {{n}}"
        found += [f"    if n != {fixed}:", f'        raise ValueError(f"{message}")']
    elif most < LIMITS.length:
        longer = "max(m, n)" if program.cross else "n"
        message = f"numbers fit in 64 bits up to n = {most}, got {{{longer}}}"
        found += [f"    if {longer} > {most}:", f'        raise ValueError(f"{message}")']
    found += [f'    x = {{**x, "{read}": {text}}}' for read, text in _numbers(pages)]
    for table, drawn in pages[0].tables.items():
        found.append(f"    {table} = [{drawn} for head in range(heads)]")
        found.append(f"    {table} = torch.stack({table}).to(device)")
    for name, made in pages[0].lists.items():
        found += lines(made, f"{name} = ", 4)
    inputs = {argument_of(x): f'x["{x.name}"]' for x in program.inputs}
    arguments = ", ".join(inputs.get(x, x) for x in ["q", "k", *_arguments(program, pages)])
    if several:
        row = "0" if program.layers is None else "layer"
        found += [
            f"    slots = SLOTS[{row}]" + " * heads" * repeated,
            "    wanted, slot_of = sorted(set(slots)), torch.tensor(slots, device=device)",
        ]
    found += ["", "    def mask_mod(b, h, q, k):"]
    found += [] if program.cross else ["        q = q + (n - n_q)"]
    if several:
        found += [
            f"        held, *others = [mask(slot, {arguments}) for slot in wanted]",
            "        for slot, other in zip(wanted[1:], others, strict=True):",
            "            held = torch.where(slot_of[h] == slot, other, held)",
        ]
    else:
        found.append(f"        held = mask({arguments})")
    padded = 'held & x["key padding"][b, k] if "key padding" in x else held'
    return "\n".join([*found, f"        return {padded}", "", "    return mask_mod"])


def _numbers(pages: Sequence[Page]) -> Iterator[tuple[str, str]]:
    """The inputs that predicates read, and what makes numbers of them."""
    for read in sorted({each for page in pages for each in page.numbers}):
        asked = [page.numbers[read] for page in pages if read in page.numbers]
        rooms = [most for most, _ in asked if most is not None]
        bound = f", most=2**{min(rooms).bit_length() - 1}" if rooms else ""
        whole = ", whole=True" if any(whole for _, whole in asked) else ""
        yield read, f'numbers("{read}", x{bound}{whole})'
