"""The syntax tree. Every node knows its place in the text; places do not count in comparisons.

Chains of operators of one level are one flat node, so the depth of a tree is bounded by the nesting
of brackets and prefixes, which the parser limits: code that walks a tree may recurse.

Comments are kept beside the nodes, each with its `#`. `comments` stand on lines of their own above
a node, "" among them being a blank line; `trailing` follows on the line of a statement, or after
the opening brace of a body; `closing` are the lines before a closing brace or the end of the file;
`ending` follows a closing brace.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from attnspec.text.source import Span


@dataclass(frozen=True)
class Node:
    """What stands at a place in the text."""

    span: Span = field(compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Line(Node):
    """What has a line of its own, or several."""

    comments: tuple[str, ...] = field(default=(), compare=False, repr=False, kw_only=True)
    trailing: str | None = field(default=None, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Braced(Line):
    """What has a body between braces."""

    closing: tuple[str, ...] = field(default=(), compare=False, repr=False, kw_only=True)
    ending: str | None = field(default=None, compare=False, repr=False, kw_only=True)


# --- expressions -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Integer(Node):
    """`written` are its digits as they stand in the text, where it stands in one."""

    value: int
    written: str = field(default="", compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Real(Node):
    """`written` as of an integer."""

    value: float
    written: str = field(default="", compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Boolean(Node):
    value: bool


@dataclass(frozen=True)
class Name(Node):
    """A bare word: a parameter, a `let`, a scalar, an input, an option, or a graph like `full`."""

    name: str


@dataclass(frozen=True)
class Attribute(Node):
    """`q.row`: a grid coordinate of a position."""

    base: Name
    attribute: str


@dataclass(frozen=True)
class Argument(Node):
    """`radius = 3` (named) or `3` (name is None) inside a call; `name_span` is the name's place."""

    name: str | None
    value: Expression
    name_span: Span | None = field(default=None, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Call(Node):
    """`window(radius = 3)`; `name_span` is the place of the word before the bracket."""

    name: str
    arguments: tuple[Argument, ...]
    name_span: Span = field(compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Prefix(Node):
    """`-x`, `~g`, `not p`; operator is "-", "~" or "not"."""

    operator: str
    operand: Expression


@dataclass(frozen=True)
class Chain(Node):
    """Operators of one level, left to right: `a - b + c` is (a, b, c) with operators ("-", "+").

    The levels: `or`; `and`; comparisons (`== != < <= > >= in subset`); `|`; `&`; `+ -`; `* / // %`;
    `**` (of two operands, right-associative by nesting). `operator_spans` are their places.
    """

    operands: tuple[Expression, ...]
    operators: tuple[str, ...]
    operator_spans: tuple[Span, ...] = field(default=(), compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Range(Node):
    """`a..b`, both ends included."""

    first: Expression
    last: Expression


@dataclass(frozen=True)
class Members(Node):
    """`{1, 2, 4}` after `in`."""

    items: tuple[Expression, ...]


@dataclass(frozen=True)
class List(Node):
    """`[8, 16, 32]`: numbers, of which an index takes one."""

    items: tuple[Expression, ...]


@dataclass(frozen=True)
class Index(Node):
    """`radii[head]`: one number of a list."""

    base: Expression
    index: Expression


Expression: TypeAlias = (
    Integer
    | Real
    | Boolean
    | Name
    | Attribute
    | Call
    | Prefix
    | Chain
    | Range
    | Members
    | List
    | Index
)


# --- statements --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Let(Line):
    name: str
    value: Expression
    name_span: Span = field(compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Input(Line):
    """`input x: tokens(at_most = 64)`; `kind` is the word after the colon."""

    name: str
    kind: str
    arguments: tuple[Argument, ...]
    name_span: Span = field(compare=False, repr=False, kw_only=True)
    kind_span: Span = field(compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Setting(Line):
    """A statement that is a keyword and values: `layers 12`, `heads h`, `extra_tokens 4`, `causal`,
    `scale 0.5`, `normalize relu`, `score s + 1`, `sequence grid(8, 8)`, `attend full`.

    `keyword` is that word; `value` its expression, None for `causal`. `normalize relu` has a
    `Name`, `sequence` has a `Call`.
    """

    keyword: str
    value: Expression | None
    keyword_span: Span = field(compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Scope(Braced):
    """`layer 6..11 { … }` or `head even { … }`.

    `kind` is "layer" or "head"; `items` are expressions, ranges and calls of `every`, or a `Name`:
    even, odd, all.
    """

    kind: str
    items: tuple[Expression, ...]
    body: tuple[Statement, ...]
    items_span: Span = field(compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Require(Line):
    """`require CLAIM at n = 1, 2`, or `for n >= EXPR`, which is `since`; without either, both None,
    the claim is about every n."""

    claim: Expression
    at: tuple[Integer, ...] | None
    since: Expression | None = None


Statement: TypeAlias = Let | Input | Setting | Scope | Require


# --- files -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter(Node):
    """`radius = 256` in the head of an attention or a named graph; `default` may be missing."""

    name: str
    default: Expression | None
    name_span: Span = field(compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Import(Line):
    """`from "patterns/local.attn" import a, b`."""

    path: str
    names: tuple[Name, ...]
    path_span: Span = field(compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Graph(Line):
    """`graph ring(r) = window(radius = r) | …`."""

    name: str
    parameters: tuple[Parameter, ...]
    body: Expression
    name_span: Span = field(compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Attention(Braced):
    """`attention name(parameters) { body }`; `closing` are comments before the last brace."""

    name: str
    parameters: tuple[Parameter, ...]
    body: tuple[Statement, ...]
    name_span: Span = field(compare=False, repr=False, kw_only=True)


Item: TypeAlias = Import | Graph | Attention


@dataclass(frozen=True)
class File(Node):
    """A whole text; `closing` are the comments after the last item."""

    items: tuple[Item, ...]
    closing: tuple[str, ...] = field(default=(), compare=False, repr=False, kw_only=True)
