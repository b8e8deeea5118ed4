"""The file of a spec whose heads are graphs: the mask as a function, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from attnspec.backends.common.score_formula import thresholds
from attnspec.compile.standalone.alike import Family, families
from attnspec.compile.standalone.expressions import WIDTH, Expression, flat, lines, name
from attnspec.compile.standalone.formulas import formula_of, number_of
from attnspec.compile.standalone.lifting import imported, lifted
from attnspec.compile.standalone.page import Page, StandaloneError, argument_of
from attnspec.compile.standalone.sources import drawing, graph, helpers, module
from attnspec.ir.crossing import QUERIES
from attnspec.ir.program import Attend, Program, Term, inputs_of
from attnspec.ir.scalars import Apply, Scalar, Symbol, symbols
from attnspec.limits import LIMITS

_IMPORTS = """\
import math
from functools import lru_cache

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import dropout, scaled_dot_product_attention"""

_HELPERS = (
    drawing.philox,
    drawing.distinct,
    drawing.cycles,
    helpers.required,
    helpers.isqrt,
    helpers.is_power,
    helpers.listed,
    helpers.numbers,
)


def graph_module(program: Program, class_name: str) -> str:
    """All but the docstring; raises StandaloneError for what cannot be said."""
    attend = _common(program)
    pages, masks = _masks(program)
    softmax = attend.normalize == "softmax"
    changes = {score.name for score in attend.scores}
    used = {helper for page in pages for helper in page.helpers}
    used |= {"philox"} if pages[0].tables else set()
    kind = graph.Biased if "bias" in changes else module.Attention
    if softmax and not changes:
        runs: list[Callable[..., Any]] = [graph.attend_plain]
    elif softmax and changes <= {"alibi", "bias"}:
        runs = [graph.attend_shifted]
    else:
        runs = [getattr(graph, attend.normalize), graph.attend_weighed]
        runs += [graph.attend_on_gpu] if softmax else []
    names = {kind.__name__: class_name, runs[-1].__name__: "attend"}
    names |= dict.fromkeys(("softmax", attend.normalize), "weigh") if len(runs) > 1 else {}
    if "bias" in changes:
        names["attend_shifted"] = "attend"
    names |= module.TWO_SEQUENCES if program.cross else {}
    # with scores as they are, one function says it all
    asked: list[object] = [] if softmax and not changes else [graph.mask_of]
    asked += [graph.fits_flex] if softmax and changes else []
    asked += [graph.flex] if softmax else []
    sections = [
        _constants(program, attend, pages, masks),
        _mask(program, pages, masks),
        _mask_mod(program, pages, masks),
        *lifted([each for each in _HELPERS if each.__name__ in used], names),
        *lifted([graph.masked], names),
        "kept = lru_cache(maxsize=8)(masked)",
        *lifted(asked, names),
        _scale_of(program, attend),
        *([_changed(program, attend)] if changes or not softmax else []),
        *lifted([*runs, module.given, kind], names),
    ]
    text = "\n\n\n".join(sections) + "\n"
    return f"{imported(_IMPORTS, text)}\n\n{text}"


def _common(program: Program) -> Attend:
    """An attend whose scale, scores and normaliser are those of all."""
    first = program.attends[0]
    for other in program.attends:
        if other.graph is None or other.mechanism is not None:
            raise StandaloneError("some heads are graphs and others mechanisms")
        if replace(other, graph=first.graph) != first:
            raise StandaloneError("its heads or layers weigh their scores in different ways")
    if sum(score.name == "bias" for score in first.scores) > 1:
        raise StandaloneError("its scores have several learned tables")
    return first


# --- the mask ------------------------------------------------------------------------------------


def _masks(program: Program) -> tuple[list[Page], list[Family]]:
    """A page for each distinct graph, and the formulas, the sizes and the values that are checked
    behind them."""
    pages: list[Page] = []
    formulas = []
    for attend in program.attends:
        term = cast(Term, attend.graph)
        read = inputs_of(term)
        declared = tuple(x for x in program.inputs if x.name in read)
        page = Page(declared, program.fixed_length, program.cross)
        if pages:
            # what one draws, all may name
            page.tables = pages[0].tables
        formula = formula_of(term, program, page)
        pages.append(page)
        told = [name(f"{each.name} {each.least} {each.most}") for each in page.checks]
        told += [name(each) for each in page.sizes]
        numbers = [*page.sizes.values(), *[each.value for each in page.checks]]
        formulas.append((formula, *numbers, *told))
    return pages, families(formulas)


def _arguments(program: Program, pages: Sequence[Page]) -> list[str]:
    """What the mask takes besides slot, q, k and the lengths."""
    symbols = [each for each in ("layer", "h") if any(each in page.symbols for page in pages)]
    inputs = [argument_of(x) for x in program.inputs if any(x in page.inputs for page in pages)]
    return [*symbols, *(["b", *inputs] if inputs else []), *pages[0].tables]


def _mask(program: Program, pages: Sequence[Page], masks: Sequence[Family]) -> str:
    several = len(pages) > 1
    arguments = [*(["slot"] if several else []), "q", "k", *_lengths(program)]
    arguments += _arguments(program, pages)
    of = "m queries and n keys" if program.cross else "n positions"
    found = [
        f"def mask({', '.join(arguments)}):",
        f'    """Whether query q reads key k of {of}{", in a slot" if several else ""}."""',
    ]
    for family in masks:
        page = pages[family.members[0]]
        indent = 4
        if family is not masks[-1]:
            slots = repr(family.members) if len(family.members) > 1 else str(family.members[0])
            found.append(f"    if slot {'in' if len(family.members) > 1 else '=='} {slots}:")
            indent = 8
        margin = " " * indent
        if family.names:
            found.append(
                f"{margin}{', '.join(family.names)}{',' * (len(family.names) == 1)} = NUMBERS[slot]"
            )
        formula, *numbers = family.formula
        for size, value in zip(page.sizes, numbers, strict=False):
            found.append(f"{margin}{size} = {flat(value)}")
        for check, value in zip(page.checks, numbers[len(page.sizes) :], strict=False):
            found.append(f"{margin}{replace(check, value=value).text}")
        found += lines(formula, "return ", indent)
    return "\n".join(found)


def _mask_mod(program: Program, pages: Sequence[Page], masks: Sequence[Family]) -> str:
    """The function that gives what FlexAttention takes."""
    last = "m queries and n keys" if program.cross else "the last n_q of n positions"
    queries = "m" if program.cross else "n_q"
    found = [
        "def mask_mod_of(layer, size, device, x):",
        f'    """The mask of {last}; `size` is (B, H, {queries}, n)."""',
        f"    heads, {queries}, n = size[1:]"
        if pages[0].tables or len(pages) > 1
        else f"    {queries}, n = size[2:]",
    ]
    fixed, most = program.fixed_length, min(page.most for page in pages)
    if fixed is not None:
        found += [
            f"    if n != {fixed}:",
            f'        raise ValueError(f"the grid has {fixed} positions, got n = {{n}}")',
        ]
    elif most < LIMITS.length:
        longer = "max(m, n)" if program.cross else "n"
        told = f"numbers fit in 64 bits up to n = {most}, got {{{longer}}}"
        found += [f"    if {longer} > {most}:", f'        raise ValueError(f"{told}")']
    found += [f'    x = {{**x, "{read}": {text}}}' for read, text in _numbers(pages)]
    for table, drawn in pages[0].tables.items():
        found.append(f"    {table} = [{flat(drawn)} for head in range(heads)]")
        found.append(f"    {table} = torch.stack({table}).to(device)")
    inputs = {argument_of(x): f'x["{x.name}"]' for x in program.inputs}
    rest = [inputs.get(arg, arg) for arg in _arguments(program, pages)]
    given = ", ".join(["q", "k", *_lengths(program), *rest])
    if len(pages) > 1:
        found += _slots_told(program)
    found += [
        "",
        "    def mask_mod(b, h, q, k):",
        *([] if program.cross else ["        q = q + (n - n_q)"]),
    ]
    if len(pages) == 1:
        found.append(f"        held = mask({given})")
    else:
        found += [
            f"        held, *others = [mask(slot, {given}) for slot in wanted]",
            "        for slot, other in zip(wanted[1:], others, strict=True):",
            "            held = torch.where(slot_of[h] == slot, other, held)",
        ]
    found += [
        '        return held & x["key padding"][b, k] if "key padding" in x else held',
        "",
        "    return mask_mod",
    ]
    return "\n".join(found)


def _lengths(program: Program) -> list[str]:
    return [QUERIES, "n"] if program.cross else ["n"]


def _numbers(pages: Sequence[Page]) -> Iterator[tuple[str, str]]:
    """The inputs that predicates read, and what makes numbers of them."""
    for read in sorted({each for page in pages for each in page.numbers}):
        asked = [page.numbers[read] for page in pages if read in page.numbers]
        rooms = [most for most, _ in asked if most is not None]
        told = f", most=2**{min(rooms).bit_length() - 1}" if rooms else ""
        whole = ", whole=True" if any(whole for _, whole in asked) else ""
        yield read, f'numbers("{read}", x{told}{whole})'


def _slots_told(program: Program) -> list[str]:
    layer = "0" if program.layers is None else "layer"
    slots = f"SLOTS[{layer}]" + (" * heads" if program.heads is None else "")
    return [
        f"    slots = {slots}",
        "    wanted, slot_of = sorted(set(slots)), torch.tensor(slots, device=device)",
    ]


# --- numbers and scores --------------------------------------------------------------------------


def _constants(
    program: Program, attend: Attend, pages: Sequence[Page], masks: Sequence[Family]
) -> str:
    inputs = [f'"{x.name}": ("{x.kind}", {x.at_most})' for x in program.inputs]
    found = [f"HEADS, LAYERS = {program.heads}, {program.layers}", *_table("INPUTS", inputs, "{}")]
    if len(pages) > 1:
        found += _table("SLOTS", [repr(row) for row in program.slots])
    numbers = {m: row for each in masks for m, row in zip(each.members, each.values, strict=False)}
    if numbers:
        rows = [f"{slot}: {row!r}" for slot, row in sorted(numbers.items())]
        found += _table("NUMBERS", rows, "{}")
    for place, score in enumerate(attend.scores):
        if score.slopes:
            found += _table(f"SLOPES_{place}", [repr(slope) for slope in score.slopes])
        if score.name == "bias":
            found += _buckets(dict(score.arguments), not program.causal)
    return "\n".join(found)


def _table(called: str, entries: Sequence[str], brackets: str = "()") -> list[str]:
    """A constant on one line, or as many entries on a line as fit."""
    end = "," if len(entries) == 1 and brackets == "()" else ""
    one = f"{called} = {brackets[0]}{', '.join(entries)}{end}{brackets[1]}"
    if len(one) <= WIDTH:
        return [one]
    rows: list[str] = []
    row = "   "
    for entry in entries:
        if len(row) + len(entry) + 2 > WIDTH:
            rows, row = [*rows, row], "   "
        row += f" {entry},"
    return [f"{called} = {brackets[0]}  # fmt: skip", *rows, row, brackets[1]]


def _buckets(arguments: dict[str, Scalar], two_sided: bool) -> list[str]:
    if any(isinstance(value, Symbol | Apply) for value in arguments.values()):
        raise StandaloneError("its learned table depends on n")
    buckets, distance = int(arguments["buckets"]), int(arguments["max_distance"])  # type: ignore[arg-type]
    steps = thresholds(buckets // 2 if two_sided else buckets, distance)
    return [f"STEPS, TWO_SIDED = {tuple(steps)!r}, {two_sided}"]


def _number(scalar: Scalar, program: Program) -> str:
    """A scalar of n and layer as text."""
    if not isinstance(scalar, Symbol | Apply):
        return repr(float(scalar))
    if QUERIES in symbols(scalar):
        raise StandaloneError("its scores are weighed by the number of queries")
    page = Page((), program.fixed_length, program.cross)
    number: Expression = number_of(scalar, page)
    if "h" in page.symbols:
        raise StandaloneError("its scores are weighed by the number of the head")
    return flat(number)


def _scale_of(program: Program, attend: Attend) -> str:
    text = "1 / math.sqrt(size)" if attend.scale is None else _number(attend.scale, program)
    return "\n".join(
        [
            "def scale_of(size, n, layer):",
            '    """The factor of the scores, for heads of a size."""',
            f"    return {text}",
        ]
    )


_PAPERS_SLOPE = [
    "    power = 1 << (heads.bit_length() - 1)",
    "    eighths = torch.where(h < power, 8 * h + 8, 8 * (h - power) + 4)",
    "    slope = torch.exp2(-eighths.to(score.dtype) / power)",
]


def _given_slope(place: int) -> list[str]:
    # looked up without an index, which FlexAttention would have to be handed as a tensor
    return [
        f"    ours = enumerate(SLOPES_{place})",
        "    slope = sum((h == head).to(score.dtype) * slope for head, slope in ours)",
    ]


def _changed(program: Program, attend: Attend) -> str:
    found = [
        "def changed(score, h, q, k, heads, learned):",
        '    """The score of query q and key k in head h, changed; the bias is [H, 2 n - 1]."""'
        if any(score.name == "bias" for score in attend.scores)
        else '    """The score of query q and key k in head h, changed."""',
    ]
    for place, score in enumerate(attend.scores):
        match score.name:
            case "softcap":
                cap = dict(score.arguments)["cap"]
                if isinstance(cap, Symbol | Apply):
                    raise StandaloneError("the cap of its scores depends on n or the layer")
                found.append(f"    score = {float(cap)} * torch.tanh(score / {float(cap)})")
            case "alibi":
                found += _given_slope(place) if score.slopes else _PAPERS_SLOPE
                found.append("    score = score - slope * abs(q - k)")
            case "bias":
                found.append('    bias = learned["bias"]')
                found.append("    score = score + bias[h, q - k + bias.shape[1] // 2]")
            case _:
                raise StandaloneError(f"`score {score.name}` is not a change that it knows")
    return "\n".join([*found, "    return score"])
