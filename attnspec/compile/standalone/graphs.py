"""The file of a spec whose heads are graphs: the mask as a function, and what runs it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import cast

from attnspec.compile.standalone.expressions import broken, closure
from attnspec.compile.standalone.formulas import formula_of
from attnspec.compile.standalone.lifting import Text
from attnspec.compile.standalone.page import Page, argument_of
from attnspec.compile.standalone.scores import score_text
from attnspec.ir.crossing import QUERIES
from attnspec.ir.program import Program, Term, inputs_of
from attnspec.limits import LIMITS


def graph_text(program: Program) -> Text:
    """The functions of a file. Raises StandaloneError for what cannot be said."""
    mask, scores = mask_text(program), score_text(program)
    settings = {**mask.settings, **scores.settings, "SCALED": False}
    return Text({**mask.functions, **scores.functions}, settings)


def mask_text(program: Program) -> Text:
    """The functions that say which pairs there are: `mask`, and what FlexAttention takes."""
    pages, texts = list[Page](), list[list[str]]()
    for attend in program.attends:
        term = cast(Term, attend.graph)
        read = inputs_of(term)
        page = Page(program, tuple(x for x in program.inputs if x.name in read))
        if pages:
            # what one draws, all may name
            page.lists = pages[0].lists
        formula = formula_of(term, page)
        pages.append(page)
        texts.append([*page.checks, f"return {formula.text}"])
    written = " ".join(chain.from_iterable(texts))
    symbols = [each for each in ("layer", "h") if re.search(rf"\b{each}\b", written)]
    inputs = [x for x in program.inputs if any(x in page.inputs for page in pages)]
    more = [*([QUERIES] if program.cross else []), "n", *symbols, *(["b"] if inputs else [])]
    several = len(pages) > 1
    arguments = ["slot"] * several + ["q", "k", *more, *map(argument_of, inputs), *pages[0].lists]
    of = "m queries and n keys" if program.cross else "n positions"
    mask = [
        f"def mask({', '.join(arguments)}):",
        f'    """Whether query q reads key k of {of}{", in a slot" if several else ""}."""',
    ]
    for slot, text in enumerate(texts, 1):
        mask += [f"    if slot == {slot - 1}:"] if slot < len(texts) else []
        mask += [x for each in text for x in broken(each, 8 if slot < len(texts) else 4)]
    call = ", ".join(["q", "k", *more, *(f'x["{x.name}"]' for x in inputs), *pages[0].lists])
    functions = {"mask": "\n".join(mask), "mask_mod_of": _mask_mod(program, pages, call)}
    scored = tuple(x.name for x in program.inputs if x not in inputs)
    return Text(functions, {"SCORED": scored})


def _mask_mod(program: Program, pages: Sequence[Page], arguments: str) -> str:
    """The function that gives what FlexAttention takes."""
    last = "m queries and n keys" if program.cross else "the last n_q of n positions"
    queries, several = "m" if program.cross else "n_q", len(pages) > 1
    repeated = several and program.heads is None
    made = [f"{name} = {text}" for name, text in pages[0].lists.items()]
    counted = repeated or any("range(heads)" in text for text in made)
    before = [f"heads, {queries}, n = size[1:]" if counted else f"{queries}, n = size[2:]"]
    fixed, most = program.fixed_length, min(page.most for page in pages)
    if fixed is not None:
        message = f"the grid has {fixed} positions, got n = {{n}}"
        before += [f"if n != {fixed}:", f'    raise ValueError(f"{message}")']
    elif most < LIMITS.length:
        longer = "max(m, n)" if program.cross else "n"
        message = f"numbers fit in 64 bits up to n = {most}, got {{{longer}}}"
        before += [f"if {longer} > {most}:", f'    raise ValueError(f"{message}")']
    for read in sorted({each for page in pages for each in page.numbers}):
        asked = [page.numbers[read] for page in pages if read in page.numbers]
        rooms = [room for room, _ in asked if room is not None]
        more = f", most=2**{min(rooms).bit_length() - 1}" if rooms else ""
        more += ", whole=True" * any(whole for _, whole in asked)
        before.append(f'x = {{**x, "{read}": numbers("{read}", x{more})}}')
    before += made
    statements = [] if program.cross else ["q = q + (n - n_q)"]
    if several:
        row = "0" if program.layers is None else "layer"
        before += [
            f"slots = SLOTS[{row}]" + " * heads" * repeated,
            "wanted, slot_of = sorted(set(slots)), torch.tensor(slots, device=device)",
        ]
        statements += [
            f"held, *others = [mask(slot, {arguments}) for slot in wanted]",
            "for slot, other in zip(wanted[1:], others, strict=True):",
            "    held = torch.where(slot_of[h] == slot, other, held)",
        ]
    else:
        statements.append(f"held = mask({arguments})")
    statements.append('return held & x["key padding"][b, k] if "key padding" in x else held')
    doc = f"The mask of {last}; `size` is (B, H, {queries}, n)."
    return closure(
        "mask_mod_of(layer, size, device, x)", doc, before, "mask_mod(b, h, q, k)", statements
    )
