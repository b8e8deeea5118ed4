"""The file of a spec whose heads are graphs: the mask as a function, and what runs it."""

from __future__ import annotations

import re
from itertools import chain

from attnspec.compile.standalone.expressions import closure
from attnspec.compile.standalone.formulas import formula_of
from attnspec.compile.standalone.lifting import Text
from attnspec.compile.standalone.page import Page, argument_of
from attnspec.ir.crossing import QUERIES
from attnspec.ir.program import Program, inputs_of
from attnspec.limits import LIMITS


def mask_text(program: Program) -> Text:
    """The function that says which pairs there are, as FlexAttention takes it. BY_LENGTH is a
    setting that says whether formulas read a length."""
    page, slots = Page(program), list[list[str]]()
    terms = program.graphs
    for term in terms:
        # what one draws, all may name
        page.checks.clear()
        formula = formula_of(term, page)
        slots.append([*page.checks, f"{'pairs' if terms[1:] else 'held'} = {formula.text}"])
    read = {name for term in terms for name in inputs_of(term)}
    before = _lengths(page)
    for entry in (x for x in program.inputs if x.name in read):
        made = f'x["{entry.name}"]'
        if entry.name in page.numbers:
            most, whole = page.numbers[entry.name]
            more = "" if most is None else f", most=2**{most.bit_length() - 1}"
            made = f'numbers("{entry.name}", x{more}{", whole=True" * whole})'
        before.append(f"{argument_of(entry)} = {made}")
    before += [f"{name} = {made}" for name, made in page.lists.items()]
    statements = [] if program.cross else ["q = q + (n - n_q)"]
    if len(slots) == 1:
        statements += slots[0]
    else:
        row = "0" if program.layers is None else "layer"
        before.append(f"slots = SLOTS[{row}]" + " * heads" * (program.heads is None))
        before.append("slot_of = torch.tensor(slots, device=device)")
        statements.append("held = q != q")
        for slot, lines in enumerate(slots):
            lines.append(f"held = torch.where(slot_of[h] == {slot}, pairs, held)")
            statements += [f"if {slot} in slots:", *(f"    {line}" for line in lines)]
    statements.append(
        'return held & x["key padding mask"][b, k] if "key padding mask" in x else held'
    )
    queries, last = "n_q", "the last n_q of n positions"
    if program.cross:
        queries, last = QUERIES, f"{QUERIES} queries and n keys"
    doc = f"The mask of {last}; `size` is (B, H, {queries}, n)."
    sizes = {"heads": "size[1]", queries: "size[2]", "n": "size[3]"}
    inner = ["mask_mod(b, h, q, k)", *statements]
    function = closure("mask_mod_of(layer, size, device, x)", doc, sizes, before, inner)
    by_length = re.search(rf"\b(n|{QUERIES})\b", " ".join(chain.from_iterable(slots)))
    settings = {
        "SCORED": tuple(x.name for x in program.inputs if x.name not in read),
        "BY_LENGTH": by_length is not None,
    }
    return Text({"mask_mod_of": function}, settings)


def _lengths(page: Page) -> list[str]:
    """Statements that refuse a length."""
    fixed, longer = page.program.fixed_length, "max(m, n)" if page.program.cross else "n"
    if fixed is not None:
        message = f"the grid has {fixed} positions, got n = {{n}}"
        return [f"if n != {fixed}:", f'    raise ValueError(f"{message}")']
    if page.most < LIMITS.length:
        message = f"numbers fit in 64 bits up to n = {page.most}, got {{{longer}}}"
        return [f"if {longer} > {page.most}:", f'    raise ValueError(f"{message}")']
    return []
