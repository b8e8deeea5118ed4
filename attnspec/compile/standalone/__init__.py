"""Files that need torch alone and can be read in one sitting: what `--standalone` writes.

A graph becomes a function of (q, k, n), traced from the relations that define it; everything else
is ordinary source of `attnspec.compile.standalone.sources`, taken over as it stands.
"""

from __future__ import annotations

from typing import Any

from attnspec.backends.factored.definitions import TEXTS, settings_of
from attnspec.compile.standalone.formulas import LEAST
from attnspec.compile.standalone.graphs import mask_text
from attnspec.compile.standalone.lifting import Text
from attnspec.compile.standalone.page import StandaloneError
from attnspec.compile.standalone.scores import score_text
from attnspec.graphs.bind import Situation
from attnspec.graphs.relation import chosen_text
from attnspec.ir.crossing import QUERIES
from attnspec.ir.mechanisms import BY_NAME as MECHANISMS
from attnspec.ir.program import Program, scalars_of
from attnspec.ir.scalars import Apply, Scalar, Symbol, parts_of, symbols
from attnspec.lower.lower import decided_leaves
from attnspec.lower.mechanism_sizes import bind_mechanism, learned_parts

__all__ = ["StandaloneError", "standalone_module"]


def standalone_module(program: Program, class_name: str) -> str:
    """All but the docstring of the file; raises StandaloneError for what no short file says."""
    refusal, graphs = _refusal(program), not program.mechanisms
    try:
        for leaf in decided_leaves(program):
            raise StandaloneError(chosen_text(leaf.pattern))
        if graphs:
            mask, scores = mask_text(program), score_text(program)
            settings = mask.settings | scores.settings | {"SCALED": False}
            text = Text(mask.functions | scores.functions, settings)
        else:
            text = _mechanism_text(program)
        text.settings["REFUSED"] = bool(refusal)
        text.names.update({"Attention": class_name, "exportable(k)": refusal})
        roots = ("mask_mod_of", "attend", "Attention") if graphs else ("Attention",)
        return text.file(program, roots)
    except StandaloneError as error:
        raise StandaloneError(
            f"`{program.name}` cannot be compiled as a standalone file:"
            f" {error}{', or' if ': write' in str(error) else ';'} leave `standalone` out"
        ) from None


def _refusal(program: Program) -> str:
    """The statement that refuses a trace of torch.export before torch does, with the reason; none
    where one program serves every length."""
    unless, refused = " and isinstance(k.shape[2], torch.SymInt)", " with a dynamic length"
    patterns = {leaf.pattern for leaf in program.leaves}
    if patterns & {"random", "random_blocks"}:
        why, unless, refused = "its pairs are drawn at random", "", ""
    elif "expander" in patterns:
        why = "its pairs are drawn for one length"
    elif any(MECHANISMS[each.name].drawn for each in program.mechanisms):
        why, refused = "it draws features", " without `strict=True`"
        unless = " and not torch.compiler.is_dynamo_compiling()"
    elif program.mechanisms and program.causal:
        why = "its mechanism is computed in chunks"
    elif any("n" in symbols(each.scale or 0) for each in program.attends):
        why = "its scale depends on n"
    elif any(_reads_root(x) for graph in program.graphs for _, _, x in scalars_of(graph)):
        why = "its mask takes a root or logarithm of n"
    elif any(_reads_root(value) for each in program.attends for value in each.numbers):
        why = "its scores take a root or logarithm of n"
    else:
        return ""
    mend = "pass `strict=True`, or " * ("strict" in refused)
    return f'''\
if torch.compiler.is_exporting(){unless}:
            why = "{why}; {mend}compile the spec without --standalone"
            raise ValueError(f"this file cannot be exported{refused}: {{why}}")'''


def _reads_root(scalar: Scalar) -> bool:
    """Whether a root or logarithm is taken of n, not of a tensor."""
    return any(
        part.op in (*LEAST, "exp", "tanh")
        and {"n", QUERIES} & {*part.symbols}
        and {*part.symbols} <= {"n", QUERIES, "layer"}
        for part in parts_of(scalar)
    )


def _mechanism_text(program: Program) -> Text:
    """The settings of a file whose heads have one mechanism, linear in n where that is. Raises
    StandaloneError for what cannot be said."""
    attend = program.attends[0]
    if len(program.attends) > 1:
        raise StandaloneError("its heads or layers have different mechanisms")
    if attend.mechanism is None or attend.graph is not None:
        raise StandaloneError("it adds a mechanism to a graph")
    if any(isinstance(value, Symbol | Apply) for _, value in attend.mechanism.arguments):
        raise StandaloneError("the arguments of its mechanism depend on n, the layer or the head")
    if isinstance(attend.scale, Symbol | Apply):
        raise StandaloneError("its scale depends on n, the layer or the head")
    layers, heads = program.layer_count, program.head_count
    at = Situation(1, {}, layers=layers, heads=program.heads)
    declared: Any = bind_mechanism(attend.mechanism, at)
    if getattr(declared, "redraw", 0):
        raise StandaloneError("`redraw` draws its features anew in training")
    parts = {}
    for (_, part), name in learned_parts(program).items():
        shape = 1 if part.layers else layers, 1 if part.heads else heads, *part.shape
        by = {"uniform": (-part.by, part.by), "normal": (0.0, part.by)}.get(part.start, (part.by,))
        # the function of `torch.nn.init`, and its arguments
        parts[name] = (shape, f"{part.start}_", *(() if part.start in ("zeros", "ones") else by))
    chosen, names = settings_of(declared, program.causal, attend.scale)
    if not all(any(name in vars(text) for text in TEXTS) for name in names.values()):
        raise StandaloneError(f"`{declared.name}` is not a mechanism that it knows")
    settings = {
        "INPUTS": {},
        "PAIRS": False,
        **chosen,
        "PARTS": parts,
        "SCALED": any(part.start == "scaled" for _, part in learned_parts(program)),
    }
    return Text({}, settings, names, tuple(text.__name__ for text in TEXTS))
