"""Text to syntax tree, and after a mistake on to the next place where reading is sound again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import cache, lru_cache

from lark import Token, Tree
from lark.exceptions import UnexpectedInput
from lark.parsers.lalr_interactive_parser import InteractiveParser

from attnspec.grammar.builder import build
from attnspec.grammar.comments import attach
from attnspec.grammar.nodes import Expression, File
from attnspec.grammar.scanner import Scan, is_members, scan
from attnspec.grammar.syntax_errors import ITEMS, RESERVED, STATEMENTS, empty_file, unexpected
from attnspec.grammar.tables import lark_parser
from attnspec.text.diagnostics import SHOWN, Diagnostic, SpecError
from attnspec.text.source import Source


@lru_cache(maxsize=64)
def parse(source: Source) -> File:
    """The syntax tree of a text, kept for a while: repairs and sizes are tried on the same one.

    Raises SpecError with every independent mistake of the text (A1xx), and nothing else.
    """
    first = scan(source)
    if not first.words and not first.problems:
        raise SpecError(empty_file(first))
    run = _Run(first)
    tree = run.finish()
    if first.problems or run.problems or tree is None:
        raise SpecError([*first.problems, *run.problems])
    return attach(build(tree, source), first)


@lru_cache(maxsize=64)
def parse_expression(source: Source) -> Expression | None:
    """The expression that a text is, None for what is not an expression.

    Raises SpecError with what is wrong with its words alone.
    """
    first = scan(source)
    if first.problems:
        raise SpecError(first.problems)
    try:
        tree = lark_parser().parse(first.mended, start="expression")
    except UnexpectedInput:
        return None
    expression: Expression = build(tree, source)
    return expression


def keywords() -> frozenset[str]:
    """Every word that the grammar asks for somewhere."""
    return frozenset(word for word in _written().values() if word.islower())


def expected(source: Source) -> frozenset[str]:
    """The words and signs that could come next behind a text, as they are written, and the open
    classes of words by their names: NAME, INTEGER, REAL, STRING, $END.

    Mistakes before the end are set aside as `parse` does; empty where reading is not sound again
    before the end. Raises SpecError where a limit is exceeded.
    """
    run = _Run(scan(source))
    stopped = run.read()
    while stopped is not None:
        if not run.recover(stopped):
            return frozenset()
        stopped = run.read()
    return frozenset(_written()[name] for name in run.accepts())


@cache
def _written() -> dict[str, str]:
    """How each terminal is written: words and signs as they are, open classes by their name."""
    shown = {"$END": "$END"}
    for terminal in lark_parser().terminals:
        pattern = terminal.pattern
        word = pattern.value.removesuffix(r"\b")
        shown[terminal.name] = (
            word if pattern.type == "str" or word.isidentifier() else terminal.name
        )
    return shown


@cache
def _terminal() -> dict[str, str]:
    """The terminal of each word and sign."""
    return {written: name for name, written in _written().items()}


class _Run:
    """One run of the parser over a text.

    It goes on after a mistake where that cannot invent another one: at a closing brace of a body
    around the place, or at the start of a line that starts a statement of that body, or an item. To
    do so it drops what the parser holds until that is acceptable.
    """

    def __init__(self, scan: Scan) -> None:
        self.scan = scan
        self.starts = [word.start for word in scan.words]
        self.explained = {problem.span.line for problem in scan.problems if problem.span}
        self.problems: list[Diagnostic] = []
        self.resumed = -1
        self.parser: InteractiveParser = lark_parser().parse_interactive(scan.mended, "file")
        # lark leaves these two without types
        self.accepts: Callable[[], set[str]] = self.parser.accepts
        self.choices: Callable[[], Mapping[str, object]] = self.parser.choices

    def finish(self) -> Tree[Token] | None:
        """The tree, or None where there are mistakes."""
        tree = self._go_on()
        while isinstance(tree, int):
            stopped = tree
            if not self._is_explained(stopped):
                accepts = {_written()[name] for name in self.accepts()}
                problem = unexpected(self.scan, stopped, accepts)
                self.problems.append(problem)
                if problem.span and problem.span.end < self.scan.span(stopped).start:
                    # the fault is a keyword that was read as a name: go on with it as a keyword
                    stopped -= 1
            if len(self.problems) == SHOWN or not self.recover(stopped):
                return None
            tree = self._go_on()
        return None if self.problems else tree

    def _go_on(self) -> Tree[Token] | int:
        """Reads to the end; where a word cannot stand where it does, its index."""
        stopped = self.read()
        if stopped is not None:
            return stopped
        try:
            tree: Tree[Token] = self.parser.feed_token(Token("$END", ""))
        except UnexpectedInput:
            return len(self.starts)
        return tree

    def read(self) -> int | None:
        """Reads all words; where one cannot stand where it does, its index."""
        try:
            for _ in self.parser.iter_parse():
                pass
        except UnexpectedInput as error:
            # the attribute's declared type is None
            place: int = vars(error).get("pos_in_stream") or 0
            return max(0, bisect_right(self.starts, place) - 1)
        return None

    def _is_explained(self, stopped: int) -> bool:
        """Whether a word that could not be read stands on the line of word `stopped`, or before."""
        lines = {self.scan.span(index).line for index in (stopped, stopped - 1) if index >= 0}
        return bool(lines & self.explained)

    def recover(self, stopped: int) -> bool:
        """Moves the parser to the next place where reading is sound; False if there is none."""
        body, index = self._resumption(stopped)
        lexer = self.parser.lexer_thread.state
        if index is None or index <= self.resumed or lexer is None:
            return False
        self.resumed = index
        word = self.scan.words[index].text
        if word not in ITEMS | STATEMENTS | {"}"}:
            # a misspelt keyword is read, and reported, where one is expected
            outside = self._enclosing(index, through="({[") < 0
            word = "attention" if outside else "attend"
        terminal = _terminal()[word]
        state = self.parser.parser_state
        while (
            self._waits_inside(body)
            or terminal not in self.choices()
            or terminal not in self.accepts()
        ):
            if not state.value_stack:
                return False
            state.state_stack.pop()
            state.value_stack.pop()
        lexer.line_ctr.char_pos = self.starts[index]
        return True

    def _waits_inside(self, body: int) -> bool:
        """Whether the parser waits for the end of a bracket that was opened inside the body."""
        first = self.starts[body] if body >= 0 else -1
        return any(
            isinstance(item, Token)
            and item.value in ("(", "{", "[")
            and (item.start_pos or 0) > first
            for item in self.parser.parser_state.value_stack
        )

    def _resumption(self, stopped: int) -> tuple[int, int | None]:
        """The body around a place, -1 for the file, and the word to go on with, if there is one."""
        words = self.scan.words
        body = self._enclosing(stopped, through="([")
        while body >= 0 and (words[body].text in "([" or is_members(self.scan, body)):
            body = self._enclosing(body, through="([")
        for index in range(stopped, len(words)):
            if body >= 0 and self.scan.closers.get(body) == index:
                return body, index
            # what stopped the parser cannot be where it goes on, unless it is a keyword
            if not self._starts(index, guess=index > stopped):
                continue
            if words[index].text in ITEMS or body < 0:
                if self._enclosing(index, through="({[") < 0:
                    return -1, index
            elif self._enclosing(index, through="([") == body:
                return body, index
        return body, None

    def _starts(self, index: int, guess: bool) -> bool:
        """Whether a line starts here with a keyword or, if `guess`, with what was meant as one."""
        words = self.scan.words
        word, after = words[index], words[index + 1 : index + 2]
        if not word.first:
            return False
        if word.text in ITEMS | STATEMENTS:
            return not after or after[0].text not in ("=", ",", ")")
        # a word and a value side by side are nothing else in this language
        return (
            guess
            and word.kind == "name"
            and bool(after)
            and not after[0].first
            and after[0].kind in ("name", "number")
            and not {word.text, after[0].text} & RESERVED
        )

    def _enclosing(self, index: int, through: str) -> int:
        """The innermost bracket open at word `index`, past those of `through` that never close."""
        opener = self.scan.enclosing[index]
        while opener >= 0 and opener not in self.scan.closers:
            if self.scan.words[opener].text not in through:
                break
            opener = self.scan.enclosing[opener]
        return opener
