"""The file of a spec whose heads are graphs: the mask as a function, and what runs it."""

from __future__ import annotations

import re
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
    page, texts = Page(program), list[list[str]]()
    terms = [cast(Term, attend.graph) for attend in program.attends]
    for term in terms:
        # what one draws, all may name
        page.checks.clear()
        formula = formula_of(term, page)
        texts.append([*page.checks, f"return {formula.text}"])
    written = " ".join(chain.from_iterable(texts))
    symbols = [each for each in ("layer", "h") if re.search(rf"\b{each}\b", written)]
    read = {name for term in terms for name in inputs_of(term)}
    inputs = [x for x in program.inputs if x.name in read]
    more = [*([QUERIES] if program.cross else []), "n", *symbols, *(["b"] if inputs else [])]
    several = len(texts) > 1
    arguments = ["slot"] * several + ["q", "k", *more, *map(argument_of, inputs), *page.lists]
    of = "m queries and n keys" if program.cross else "n positions"
    mask = [
        f"def mask({', '.join(arguments)}):",
        f'    """Whether query q reads key k of {of}{", in a slot" if several else ""}."""',
    ]
    for slot, text in enumerate(texts, 1):
        mask += [f"    if slot == {slot - 1}:"] if slot < len(texts) else []
        mask += [x for each in text for x in broken(each, 8 if slot < len(texts) else 4)]
    call = ", ".join(["q", "k", *more, *(f'x["{x.name}"]' for x in inputs), *page.lists])
    functions = {"mask": "\n".join(mask), "mask_mod_of": _mask_mod(page, call)}
    scored = tuple(x.name for x in program.inputs if x not in inputs)
    return Text(functions, {"SCORED": scored})


def _mask_mod(page: Page, arguments: str) -> str:
    """The function that gives what FlexAttention takes."""
    program, several = page.program, len(page.program.attends) > 1
    last = "m queries and n keys" if program.cross else "the last n_q of n positions"
    queries = "m" if program.cross else "n_q"
    before = list[str]()
    fixed = program.fixed_length
    if fixed is not None:
        message = f"the grid has {fixed} positions, got n = {{n}}"
        before += [f"if n != {fixed}:", f'    raise ValueError(f"{message}")']
    elif page.most < LIMITS.length:
        longer = "max(m, n)" if program.cross else "n"
        message = f"numbers fit in 64 bits up to n = {page.most}, got {{{longer}}}"
        before += [f"if {longer} > {page.most}:", f'    raise ValueError(f"{message}")']
    for read, (most, whole) in sorted(page.numbers.items()):
        more = "" if most is None else f", most=2**{most.bit_length() - 1}"
        more += ", whole=True" * whole
        before.append(f'x = {{**x, "{read}": numbers("{read}", x{more})}}')
    before += [f"{name} = {text}" for name, text in page.lists.items()]
    statements = [] if program.cross else ["q = q + (n - n_q)"]
    if several:
        row = "0" if program.layers is None else "layer"
        before += [
            f"slots = SLOTS[{row}]" + " * heads" * (program.heads is None),
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
    sizes = {"heads": "size[1]", queries: "size[2]", "n": "size[3]"}
    inner = ["mask_mod(b, h, q, k)", *statements]
    return closure("mask_mod_of(layer, size, device, x)", doc, sizes, before, inner)
