"""The file of a spec whose heads are graphs: the mask as a function, and what runs it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from attnspec.backends.factored import text_of_draws
from attnspec.compile.standalone.expressions import lines
from attnspec.compile.standalone.formulas import formula_of, number_of
from attnspec.compile.standalone.lifting import file_of
from attnspec.compile.standalone.page import Page, StandaloneError, argument_of
from attnspec.compile.standalone.sources import graph, module
from attnspec.ir.crossing import QUERIES
from attnspec.ir.program import Attend, Program, Term, inputs_of
from attnspec.ir.scalars import Apply, Scalar, Symbol, symbols
from attnspec.ir.scores import thresholds
from attnspec.limits import LIMITS

NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?\b")
"""A number in a text."""


def graph_module(program: Program, class_name: str, refusal: str = "") -> str:
    """All but the docstring; `refusal` is a statement that refuses a trace, where there is one.

    Raises StandaloneError for what cannot be said.
    """
    attend = _common(program)
    pages, cases = _masks(program)
    changes = {score.name for score in attend.scores}
    softmax = attend.normalize == "softmax"
    settings: dict[str, object] = {
        "HEADS": program.heads,
        "LAYERS": program.layers,
        "INPUTS": {x.name: (x.kind, x.at_most) for x in program.inputs},
        "SLOTS": program.slots,
        "NUMBERS": dict(sorted(each for case in cases for each in case.numbers)),
        "CROSS": program.cross,
        "REFUSED": bool(refusal),
        "CHANGED": bool(changes),
        "FUSED": softmax and changes <= {"alibi", "bias"},
        "NORMALIZE": attend.normalize,
        **{"PARTS": {}, "SIZED": False, "DRAWN": False},
    }
    for place, score in enumerate(attend.scores):
        settings[f"SLOPES_{place}"] = score.slopes
        if score.name == "bias":
            settings |= _buckets(program, dict(score.arguments))
    written = {
        "mask": _mask(program, pages, cases),
        "mask_mod_of": _mask_mod(program, pages),
        "scale_of": _scale_of(program, attend),
        "score_mod_of": _score_mod(attend),
    }
    names = {"Attention": class_name, "weigh": attend.normalize, "exportable(k)": refusal}
    names |= module.TWO_SEQUENCES if program.cross else {}
    roots = "mask", "mask_mod_of", "attend", "Attention"
    return file_of(roots, (text_of_draws, graph, module), written, settings, names)


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
        page = Page(declared, program.fixed_length, program.cross)
        if pages:
            # what one draws, all may name
            page.tables = pages[0].tables
        formula = formula_of(term, program, page)
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
    return [*lengths, *symbols, *(["b", *inputs] if inputs else []), *pages[0].tables]


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
        told = f"the grid has {fixed} positions, got n = {{n}}"
        found += [f"    if n != {fixed}:", f'        raise ValueError(f"{told}")']
    elif most < LIMITS.length:
        longer = "max(m, n)" if program.cross else "n"
        told = f"numbers fit in 64 bits up to n = {most}, got {{{longer}}}"
        found += [f"    if {longer} > {most}:", f'        raise ValueError(f"{told}")']
    found += [f'    x = {{**x, "{read}": {text}}}' for read, text in _numbers(pages)]
    for table, drawn in pages[0].tables.items():
        found.append(f"    {table} = [{drawn} for head in range(heads)]")
        found.append(f"    {table} = torch.stack({table}).to(device)")
    inputs = {argument_of(x): f'x["{x.name}"]' for x in program.inputs}
    given = ", ".join(inputs.get(x, x) for x in ["q", "k", *_arguments(program, pages)])
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
            f"        held, *others = [mask(slot, {given}) for slot in wanted]",
            "        for slot, other in zip(wanted[1:], others, strict=True):",
            "            held = torch.where(slot_of[h] == slot, other, held)",
        ]
    else:
        found.append(f"        held = mask({given})")
    padded = 'held & x["key padding"][b, k] if "key padding" in x else held'
    return "\n".join([*found, f"        return {padded}", "", "    return mask_mod"])


def _numbers(pages: Sequence[Page]) -> Iterator[tuple[str, str]]:
    """The inputs that predicates read, and what makes numbers of them."""
    for read in sorted({each for page in pages for each in page.numbers}):
        asked = [page.numbers[read] for page in pages if read in page.numbers]
        rooms = [most for most, _ in asked if most is not None]
        told = f", most=2**{min(rooms).bit_length() - 1}" if rooms else ""
        whole = ", whole=True" if any(whole for _, whole in asked) else ""
        yield read, f'numbers("{read}", x{told}{whole})'


# --- scores --------------------------------------------------------------------------------------


def _buckets(program: Program, arguments: dict[str, Scalar]) -> dict[str, object]:
    """The settings of a learned table of distances."""
    if any(isinstance(value, Symbol | Apply) for value in arguments.values()):
        raise StandaloneError("its learned table depends on n")
    buckets, distance = int(arguments["buckets"]), int(arguments["max_distance"])  # type: ignore[arg-type]
    two_sided = not program.causal
    steps = tuple(thresholds(buckets // 2 if two_sided else buckets, distance))
    shape = program.layers or 1, program.heads or 1, (len(steps) + 1) * (1 + two_sided)
    parts = {"bias_0": (shape, "constant", 0.0)}
    return {"STEPS": steps, "TWO_SIDED": two_sided, "PARTS": parts}


def _scale_of(program: Program, attend: Attend) -> str:
    scale, text = attend.scale, "1 / math.sqrt(size)"
    if isinstance(scale, Symbol | Apply):
        if QUERIES in symbols(scale):
            raise StandaloneError("its scores are weighed by the number of queries")
        page = Page((), program.fixed_length, program.cross)
        text = number_of(scale, page).text
        if "h" in page.symbols:
            raise StandaloneError("its scores are weighed by the number of the head")
    elif scale is not None:
        text = repr(float(scale))
    return f'''\
def scale_of(size, n, layer):
    """The factor of the scores, for heads of a size."""
    return {text}'''


_PAPERS_SLOPE = """\
power = 1 << (heads.bit_length() - 1)
eighths = torch.where(h < power, 8 * h + 8, 8 * (h - power) + 4)
slope = torch.exp2(-eighths.to(score.dtype) / power)"""

_GIVEN_SLOPE = """\
ours = enumerate(SLOPES)
slope = sum((h == head).to(score.dtype) * slope for head, slope in ours)"""
"""Looked up without an index, which FlexAttention would have to be handed as a tensor."""


def _score_mod(attend: Attend) -> str:
    """The function that gives what changes scores, as FlexAttention takes it."""
    before, found = ["n_q, n = q.shape[2], k.shape[2]"], ["q = q + (n - n_q)"]
    for place, score in enumerate(attend.scores):
        match score.name:
            case "softcap":
                cap = dict(score.arguments)["cap"]
                if isinstance(cap, Symbol | Apply):
                    raise StandaloneError("the cap of its scores depends on n or the layer")
                found.append(f"score = {float(cap)} * torch.tanh(score / {float(cap)})")
            case "alibi":
                slope = _GIVEN_SLOPE.replace("SLOPES", f"SLOPES_{place}")
                before += [] if score.slopes else ["heads = q.shape[1]"]
                found += (slope if score.slopes else _PAPERS_SLOPE).split("\n")
                found.append("score = score - slope * abs(q - k)")
            case "bias":
                before.append('bias = bias_of(learned["bias_0"], q, n)')
                found.append("score = score + bias[h, q - k + n - 1]")
            case _:
                raise StandaloneError("`score` has an expression")
    return "\n".join(
        [
            "def score_mod_of(q, k, learned):",
            '    """What changes the score of query q and key k in head h."""',
            *(f"    {line}" for line in before),
            "",
            "    def score_mod(score, b, h, q, k):",
            *(f"        {line}" for line in [*found, "return score"]),
            "",
            "    return score_mod",
        ]
    )
