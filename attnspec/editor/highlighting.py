"""A lexer for Pygments, which documentation and terminals colour specs with."""

from __future__ import annotations

from typing import ClassVar

from pygments.lexer import RegexLexer, bygroups, words
from pygments.token import Comment, Keyword, Name, Number, Operator, Punctuation, String, Whitespace

from attnspec.editor.words import words as words_of

COLOURED = (
    (Keyword.Declaration, "item"),
    (Keyword, "statement connective"),
    (Operator.Word, "operator"),
    (Keyword.Constant, "constant selector normalizer"),
    (Name.Builtin, "pattern mechanism"),
    (Name.Function, "operation set function score"),
    (Keyword.Type, "input"),
    (Name.Constant, "property figure"),
    (Name.Variable, "scalar position"),
)
"""What the kinds of words are for Pygments, the first of several kinds; coordinates stand behind a
point, so they need no word."""

NAME = r"[A-Za-z_][A-Za-z0-9_]*"


class AttnLexer(RegexLexer):  # type: ignore[misc]
    """The language `.attn`."""

    name = "attn"
    aliases: ClassVar = ["attn", "attnspec"]
    filenames: ClassVar = ["*.attn"]
    tokens: ClassVar = {
        "root": [
            (r"[ \t\r\n]+", Whitespace),
            (r"#[^\n]*", Comment.Single),
            (r'"[^"\n]*"', String.Double),
            (
                rf"(attention|graph|let|input)(\s+)({NAME})",
                bygroups(Keyword, Whitespace, Name.Class),
            ),
            (rf"({NAME})(\s*)(=)(?!=)", bygroups(Name.Attribute, Whitespace, Punctuation)),
            (rf"(\.)({NAME})", bygroups(Punctuation, Name.Attribute)),
            *(
                (words(words_of()[kind], prefix=r"\b", suffix=r"\b"), token)
                for token, kinds in COLOURED
                for kind in kinds.split()
            ),
            (NAME, Name),
            (
                r"[0-9][0-9_]*\.[0-9][0-9_]*(?:[eE][+-]?[0-9]+)?|[0-9][0-9_]*[eE][+-]?[0-9]+",
                Number.Float,
            ),
            (r"[0-9][0-9_]*", Number.Integer),
            (r"\.\.|\*\*|//|==|!=|<=|>=|[-+*/%|&~<>]", Operator),
            (r"[(){}\[\],:=.]", Punctuation),
        ]
    }
