"""Syntax trees at random, as the parser could have made them, with comments and no places."""

from __future__ import annotations

from typing import TypedDict

from hypothesis import strategies as st

from attnspec.grammar import nodes
from attnspec.grammar.syntax_errors import ITEMS, RESERVED, STATEMENTS
from attnspec.text.source import Source, Span

NOWHERE = Span(Source("nowhere", ""), 0, 0)

NAMES = st.one_of(
    st.sampled_from(sorted(ITEMS | STATEMENTS | {"at", "n", "import", "q", "_", "a1"})),
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).filter(
        lambda name: name not in RESERVED
    ),
)
LEAVES = st.one_of(
    NAMES.map(lambda name: nodes.Name(name, span=NOWHERE)),
    st.integers(0, 2**63 - 1).map(lambda value: nodes.Integer(value, span=NOWHERE)),
    st.floats(min_value=0, allow_infinity=False, allow_nan=False).map(
        lambda value: nodes.Real(abs(value), span=NOWHERE)
    ),
    st.booleans().map(lambda value: nodes.Boolean(value, span=NOWHERE)),
    st.builds(
        lambda base, name: nodes.Attribute(nodes.Name(base, span=NOWHERE), name, span=NOWHERE),
        NAMES,
        NAMES,
    ),
)
LEVELS = (("or",), ("and",), ("<", "<="), ("|",), ("&",), ("+", "-"), ("*", "/", "//", "%"))


def larger(inside: st.SearchStrategy[nodes.Expression]) -> st.SearchStrategy[nodes.Expression]:
    ranges = st.builds(lambda a, b: nodes.Range(a, b, span=NOWHERE), inside, inside)
    members = st.lists(inside, min_size=1, max_size=3).map(
        lambda items: nodes.Members(tuple(items), span=NOWHERE)
    )

    @st.composite
    def chains(draw: st.DrawFn) -> nodes.Expression:
        operators = draw(
            st.lists(st.sampled_from(draw(st.sampled_from(LEVELS))), min_size=1, max_size=3)
        )
        operands = [draw(inside) for _ in range(len(operators) + 1)]
        return nodes.Chain(tuple(operands), tuple(operators), span=NOWHERE)

    pairs = st.builds(
        lambda a, b, operator: nodes.Chain((a, b), (operator,), span=NOWHERE),
        inside,
        inside,
        st.sampled_from(["==", "!=", ">", ">=", "subset", "in", "**"]),
    )
    memberships = st.builds(
        lambda a, b: nodes.Chain((a, b), ("in",), span=NOWHERE), inside, ranges | members
    )
    prefixes = st.builds(
        lambda operator, a: nodes.Prefix(operator, a, span=NOWHERE),
        st.sampled_from(["-", "~", "not"]),
        inside,
    )
    arguments = st.one_of(
        (inside | ranges).map(lambda value: nodes.Argument(None, value, span=NOWHERE)),
        st.builds(lambda name, value: nodes.Argument(name, value, span=NOWHERE), NAMES, inside),
    )
    calls = st.builds(
        lambda name, found: nodes.Call(name, tuple(found), span=NOWHERE, name_span=NOWHERE),
        NAMES,
        st.lists(arguments, max_size=3),
    )
    return st.one_of(chains(), pairs, memberships, prefixes, calls)


EXPRESSIONS: st.SearchStrategy[nodes.Expression] = st.recursive(LEAVES, larger, max_leaves=12)
COMMENT_TEXTS = st.text(st.characters(codec="ascii", categories=("L", "N", "P", "Zs")), max_size=9)
COMMENTS = COMMENT_TEXTS.map(lambda text: f"# {text}".rstrip())
COMMENT_LINES = st.lists(COMMENTS, max_size=2).map(tuple)


class Kept(TypedDict):
    """The comments that every statement and item may have."""

    comments: tuple[str, ...]
    trailing: str | None


@st.composite
def kept(draw: st.DrawFn) -> Kept:
    return {"comments": draw(COMMENT_LINES), "trailing": draw(st.none() | COMMENTS)}


@st.composite
def statements(draw: st.DrawFn, depth: int = 2) -> nodes.Statement:
    about = draw(kept())
    kind = draw(st.sampled_from(["let", "set", "causal", "require", *["scope"] * (depth > 0)]))
    expression = draw(EXPRESSIONS)
    name = draw(NAMES)
    match kind:
        case "let":
            return nodes.Let(name, expression, span=NOWHERE, name_span=NOWHERE, **about)
        case "set":
            keyword = draw(st.sampled_from(["attend", "layers", "heads", "scale", "extra_tokens"]))
            return nodes.Setting(keyword, expression, span=NOWHERE, keyword_span=NOWHERE, **about)
        case "causal":
            return nodes.Setting("causal", None, span=NOWHERE, keyword_span=NOWHERE, **about)
        case "require":
            sizes = draw(st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=3))
            at = None if sizes is None else tuple(nodes.Integer(n, span=NOWHERE) for n in sizes)
            return nodes.Require(expression, at, span=NOWHERE, **about)
        case _:
            return nodes.Scope(
                draw(st.sampled_from(["layer", "head"])),
                (expression, nodes.Range(expression, draw(EXPRESSIONS), span=NOWHERE)),
                tuple(draw(st.lists(statements(depth - 1), max_size=2))),
                span=NOWHERE,
                items_span=NOWHERE,
                closing=draw(COMMENT_LINES),
                ending=draw(st.none() | COMMENTS),
                **about,
            )


@st.composite
def files(draw: st.DrawFn) -> nodes.File:
    items: list[nodes.Item] = []
    for kind in draw(
        st.lists(st.sampled_from(["graph", "import", "attention"]), min_size=1, max_size=3)
    ):
        about = draw(kept())
        name = draw(NAMES)
        parameters = tuple(
            nodes.Parameter(p, draw(st.none() | EXPRESSIONS), span=NOWHERE, name_span=NOWHERE)
            for p in draw(st.lists(NAMES, max_size=2))
        )
        if kind == "graph":
            body = draw(EXPRESSIONS)
            items.append(
                nodes.Graph(name, parameters, body, span=NOWHERE, name_span=NOWHERE, **about)
            )
        elif kind == "import":
            names = (nodes.Name(name, span=NOWHERE),)
            items.append(nodes.Import("a.attn", names, span=NOWHERE, path_span=NOWHERE, **about))
        else:
            items.append(
                nodes.Attention(
                    name,
                    parameters,
                    tuple(draw(st.lists(statements(), max_size=3))),
                    span=NOWHERE,
                    name_span=NOWHERE,
                    closing=draw(COMMENT_LINES),
                    ending=draw(st.none() | COMMENTS),
                    **about,
                )
            )
    return nodes.File(tuple(items), span=NOWHERE, closing=draw(COMMENT_LINES))
