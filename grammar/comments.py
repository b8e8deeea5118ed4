"""Gives every comment of a text to the node beside which the printer will put it back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from attnspec.grammar.nodes import Attention, File, Item, Line, Scope, Statement
from attnspec.grammar.scanner import Comment, Scan

_Simple = TypeVar("_Simple", bound=Line)
_Braced = TypeVar("_Braced", Attention, Scope)


def attach(file: File, scan: Scan) -> File:
    """The same tree with the comments and blank lines of `scan` in it, none lost and in order."""
    walk = _Walk(scan)
    items = tuple(walk.item(item) for item in file.items)
    return replace(file, items=items, closing=walk.closing(len(scan.source.text), leading=False))


class _Walk:
    """Comments not yet given away, in the order of the text; the walk has come to `place`."""

    def __init__(self, scan: Scan) -> None:
        words = scan.words
        self.text = scan.source.text
        self.comments: deque[Comment] = deque(scan.comments)
        self.place = 0
        self.opening = {words[c].end: words[o].start for o, c in scan.closers.items()}

    def item(self, item: Item) -> Item:
        above = self.above(item.span.start, leading=False)
        return self.braced(item, above) if isinstance(item, Attention) else self.simple(item, above)

    def statement(self, statement: Statement, leading: bool) -> Statement:
        above = self.above(statement.span.start, leading)
        if isinstance(statement, Scope):
            return self.braced(statement, above)
        return self.simple(statement, above)

    def statements(self, body: Sequence[Statement]) -> tuple[Statement, ...]:
        return tuple(self.statement(node, leading=number > 0) for number, node in enumerate(body))

    def simple(self, node: _Simple, above: tuple[str, ...]) -> _Simple:
        comments = above + self.inside(node.span.end)
        return replace(node, comments=comments, trailing=self.beside(node.span.end))

    def braced(self, node: _Braced, above: tuple[str, ...]) -> _Braced:
        end = node.span.end
        brace = self.opening[end]
        comments = above + self.inside(brace)
        trailing = self.beside(brace + 1)
        body = self.statements(node.body)
        closing = self.closing(end - 1, leading=bool(body))
        ending = self.beside(end)
        return replace(
            node, body=body, comments=comments, trailing=trailing, closing=closing, ending=ending
        )

    def above(self, end: int, leading: bool) -> tuple[str, ...]:
        """The comments before `end`, "" for blank lines; `leading`: may begin with one."""
        lines: list[str] = []
        while self.comments and self.comments[0].start < end:
            comment = self.comments.popleft()
            if self.blank_line(comment.start) and (lines or leading):
                lines.append("")
            lines.append(comment.text)
            self.place = comment.start + len(comment.text)
        if self.blank_line(end) and (lines or leading):
            lines.append("")
        return tuple(lines)

    def closing(self, end: int, leading: bool) -> tuple[str, ...]:
        lines = self.above(end, leading)
        return lines[:-1] if lines and not lines[-1] else lines

    def inside(self, end: int) -> tuple[str, ...]:
        """The comments within a node, which is not a place that the printer could keep."""
        lines = []
        while self.comments and self.comments[0].start < end:
            lines.append(self.comments.popleft().text)
        return tuple(lines)

    def beside(self, end: int) -> str | None:
        """The comment that follows the word ending at `end` on its line, if there is one."""
        self.place = end
        if self.comments and self.comments[0].after == end and not self.comments[0].own_line:
            comment = self.comments.popleft()
            self.place = comment.start + len(comment.text)
            return comment.text
        return None

    def blank_line(self, end: int) -> bool:
        return self.text.count("\n", self.place, end) > 1
