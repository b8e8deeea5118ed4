"""What a file does to scores: their factor, and what they become, as FlexAttention takes it."""

from __future__ import annotations

import re
from typing import Any

from attnspec.compile.standalone.expressions import Expression, Operand, call, closure, tensor_of
from attnspec.compile.standalone.formulas import said
from attnspec.compile.standalone.lifting import Text
from attnspec.compile.standalone.page import Page, StandaloneError, argument_of
from attnspec.graphs.predicates.inputs import READ, inputs_read
from attnspec.ir.crossing import QUERIES
from attnspec.ir.program import Program
from attnspec.ir.scalars import SCORE, Apply, Scalar, Symbol, fold, symbols
from attnspec.ir.scores import HEAD, NAMED, TABLE, Scores, alibi_slopes, bias
from attnspec.lower.lower import bias_tables, buckets_of

REALS = ".to(score.dtype)"
"""The method by which what a score reads becomes real."""


def score_text(program: Program) -> Text:
    """The functions that give the factor of scores, and what they become.

    Raises StandaloneError for what no short file says.
    """
    attend = program.attends[0]
    for name in ("scale", "scores", "normalize"):
        if len({getattr(each, name) for each in program.attends}) > 1:
            raise StandaloneError(f"its heads or layers differ in `{name.removesuffix('s')}`")
    page, tables = Page(program, REALS), bias_tables(program)
    q, k = page.symbol("q"), page.symbol("k")
    values: dict[str, Operand] = {SCORE: Expression("score", "score", REALS), "q": q, "k": k}
    for entry in program.inputs:
        if entry.kind in (*READ, "length", "pairs"):
            values |= page.readings(entry, q, k)
    before, statements, read = list[str](), list[str](), set[str]()
    parts, adds = dict[str, object](), attend.normalize == "softmax"
    for place, score in enumerate(attend.scores):
        arguments: dict[str, Any] = dict(score.arguments)
        if score.name == "alibi" and program.heads is None:
            values["slope"] = page.made("slopes", "slopes_of(q)", "[h]", "real")
        elif score.name == "alibi":
            slopes = score.slopes or alibi_slopes(program.head_count)
            arguments["slope"] = Apply("item", (HEAD, *slopes))
        if score.name == "bias":
            table, buckets = tables[place, score], buckets_of(score)
            distance = int(arguments["max_distance"])
            arguments["bias"] = bias(buckets, distance, not program.causal, table)
            # in half types the gradients of all pairs would not add up
            before.append(f'{table} = learned["{table}"].to(kind).expand(q.shape[1], -1)')
            values[table + TABLE] = Expression(table, "score", REALS)
            # how the table starts
            parts[table] = (program.layer_count, program.head_count, buckets), "constant_", 0.0
        value = fold(fold(NAMED.get(score.name, Symbol("value")), arguments), page.known)
        read.update(inputs_read(value))
        statements.append(f"score = {_of_score(said(value, values, page), value, page)}")
        adds &= Scores((value,)).added is not None
    for entry in program.inputs:
        if entry.name in read:
            made = f'numbers("{entry.name}", x, kind)'
            if entry.kind == "pairs":
                made = f'x["{entry.name}"].to(kind).expand(-1, q.shape[1], -1, -1)'
            before.append(f"{argument_of(entry)} = {made}")
    before += [f"{name} = {made}" for name, made in page.lists.items()]
    if not program.cross and re.search(r"\bq\b", " ".join(statements)):
        # positions of queries are counted from the last ones
        statements.insert(0, "q = q + (n - n_q)")
    doc = "What changes the score of query q and key k in head h."
    kind = "torch.promote_types(q.dtype, torch.float32)"
    sizes = {"n_q": "q.shape[2]", QUERIES: "q.shape[2]", "n": "k.shape[2]", "kind": kind}
    inner = ["score_mod(score, b, h, q, k)", *statements, "return score"]
    score_mod = closure("score_mod_of(q, k, layer, x, learned)", doc, sizes, before, inner)
    functions = {"scale_of": _scale(program), "score_mod_of": score_mod}
    changed = bool(attend.scores)
    settings = {"NORMALIZE": attend.normalize, "CHANGED": changed, "FUSED": adds, "PARTS": parts}
    return Text(functions, settings)


def _of_score(change: Operand, value: Scalar, page: Page) -> str:
    """What is assigned: one number for each pair, not a number where a list is read outside."""
    if not tensor_of(change):
        return call("torch.full_like", Expression("score"), change).text
    if SCORE not in symbols(value) or change.kind in ("int", "bool"):
        change = Expression("torch.zeros_like(score)", "score", REALS) + change
    for inside in page.inside:
        change = call("torch.where", inside, change, Expression("torch.nan"), kind="score")
    page.inside.clear()
    return str(change.text)


def _scale(program: Program) -> str:
    """The function that gives the factor of scores."""
    scale, text = program.attends[0].scale, "1 / math.sqrt(size)"
    if isinstance(scale, Symbol | Apply):
        if QUERIES in symbols(scale):
            raise StandaloneError("its scale depends on the number of queries")
        factor = said(scale, {}, Page(program))
        text = factor.text
        if tensor_of(factor):
            raise StandaloneError("its scale depends on the head")
    elif scale is not None:
        text = repr(float(scale))
    return f'''\
def scale_of(size, n, layer):
    """The factor of the scores, for heads of a size."""
    return {text}'''
