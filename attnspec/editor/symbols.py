"""What the names of a text stand for, from its words alone, so that a mistake elsewhere in the
text leaves them known.

A name means one thing in all of an attention: parameters, `let`s and inputs cannot be defined twice
there, whatever scopes they stand in. Graphs and imports are known in the whole file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from attnspec.grammar.scanner import Scan
from attnspec.grammar.syntax_errors import ITEMS, RESERVED, STATEMENTS

Kind = Literal["attention", "graph", "import", "parameter", "let", "input"]

FILE = -1
"""The home of what is known in the whole file."""


@dataclass(frozen=True)
class Definition:
    """Where a name is defined: the number of that word, and the item it holds in, or FILE."""

    kind: Kind
    name: str
    word: int
    home: int


@dataclass(frozen=True)
class Item:
    """An import, a graph or an attention: its words, from the keyword to the next item's."""

    keyword: str
    first: int
    end: int


class Symbols:
    """The definitions of a text, and which of them each word means."""

    def __init__(self, scan: Scan) -> None:
        self.scan = scan
        self.items = tuple(self._items())
        definitions = [each for number in range(len(self.items)) for each in self._defined(number)]
        self.definitions = tuple(definitions)
        self._by_word = {each.word: each for each in definitions}
        self._by_name = {(each.home, each.name): each for each in reversed(definitions)}
        # an attention is never meant by its name, so a graph may have the same
        graphs = [each for each in reversed(definitions) if each.kind in ("graph", "import")]
        self._graphs = {each.name: each for each in graphs}

    # --- what there is -------------------------------------------------------------------------

    def _items(self) -> Iterator[Item]:
        words = self.scan.words
        starts = [i for i, word in enumerate(words) if word.text in ITEMS and self._is_item(i)]
        for first, end in pairwise([*starts, len(words)]):
            yield Item(words[first].text, first, end)

    def _is_item(self, index: int) -> bool:
        """Whether a keyword starts an item; a bracket that never closes does not hide it."""
        words, opener = self.scan.words, self.scan.enclosing[index]
        while opener >= 0 and opener not in self.scan.closers:
            opener = self.scan.enclosing[opener]
        after = self._text(index + 1)
        named = index + 1 < len(words) and words[index + 1].kind in ("name", "string")
        return opener < 0 and named and after not in RESERVED

    def _defined(self, number: int) -> Iterator[Definition]:
        item, words = self.items[number], self.scan.words
        if item.keyword == "from":
            for index in range(item.first + 3, item.end):
                if words[index].kind == "name":
                    yield Definition("import", words[index].text, index, FILE)
            return
        kind: Kind = "graph" if item.keyword == "graph" else "attention"
        name = item.first + 1
        yield Definition(kind, words[name].text, name, FILE)
        opener = name + 1 if self._text(name + 1) == "(" else None
        for index in range(name + 1, item.end):
            word, before = words[index], self._text(index - 1)
            if word.kind != "name":
                continue
            if opener is not None and self.scan.enclosing[index] == opener and before in ("(", ","):
                yield Definition("parameter", word.text, index, number)
            elif kind == "attention" and before in ("let", "input") and self._starts(index - 1):
                yield Definition("let" if before == "let" else "input", word.text, index, number)

    def _starts(self, index: int) -> bool:
        """Whether a keyword starts a statement of a body."""
        opener = self.scan.enclosing[index]
        inside = opener >= 0 and self.scan.words[opener].text == "{"
        return inside and self._text(index) in STATEMENTS and self._text(index + 1) != "="

    def _text(self, index: int) -> str:
        words = self.scan.words
        return words[index].text if 0 <= index < len(words) else ""

    # --- what a word means ---------------------------------------------------------------------

    def home(self, index: int) -> int:
        """The item in which a word stands, FILE before the first."""
        return bisect_right(self.items, index, key=lambda item: item.first) - 1

    def resolve(self, index: int) -> Definition | None:
        """The definition that a word is or means, None where it means none of this file."""
        if index in self._by_word:
            return self._by_word[index]
        word = self.scan.words[index]
        if word.kind != "name" or word.text in RESERVED or self._text(index - 1) == ".":
            return None
        callee = self.argument_of(index)
        if callee is not None:
            graph = self._graphs.get(self._text(callee))
            return None if graph is None else self._by_name.get((self._item_of(graph), word.text))
        if word.first and self._starts(index):
            return None
        definition = self._by_name.get((self.home(index), word.text))
        graph = self._graphs.get(word.text)
        called = self._text(index + 1) == "("
        return (graph or definition) if called else (definition or graph)

    def _item_of(self, definition: Definition) -> int:
        """The item that a graph is; what is imported is none of this file."""
        return self.home(definition.word) if definition.kind == "graph" else FILE

    def argument_of(self, index: int) -> int | None:
        """The word before the brackets in which a word is the name of an argument, else None."""
        opener = self.scan.enclosing[index]
        if opener <= 0 or self._text(opener) != "(" or self._text(index + 1) != "=":
            return None
        called = self.scan.words[opener - 1].kind == "name" and self._text(index - 1) in ("(", ",")
        return opener - 1 if called else None

    def visible(self, index: int) -> list[Definition]:
        """What may be named where a word would stand, in the order of the text."""
        homes = (self.home(index), FILE)
        return [each for each in self.definitions if each.home in homes]

    def declares(self, index: int) -> bool:
        """Whether a word is the kind of an input."""
        return self._text(index - 1) == ":" and index - 2 in self._by_word

    def crosses(self, index: int) -> bool:
        """Whether the attention around a word says `cross`."""
        home = self.home(index)
        within = range(self.items[home].first, self.items[home].end) if home != FILE else ()
        return any(self._text(each) == "cross" and self._starts(each) for each in within)

    def graph(self, name: str) -> Definition | None:
        """The graph or import of a name."""
        return self._graphs.get(name)

    def parameters(self, graph: Definition) -> list[Definition]:
        """The parameters of a graph of this file."""
        home = self._item_of(graph)
        return [each for each in self.definitions if each.home == home and home != FILE]

    def text(self, definition: Definition) -> str:
        """How a definition is written: to the end of its graph, statement, or parameter."""
        words, first = self.scan.words, definition.word
        if definition.kind in ("graph", "let", "input", "attention"):
            first -= 1
        end = definition.word + 1
        level = self.scan.enclosing[definition.word]
        while end < len(words) and not self._ends(definition, end, level):
            end += 1
        return self.scan.source.text[words[first].start : words[end - 1].end]

    def _ends(self, definition: Definition, index: int, level: int) -> bool:
        """Whether a word no longer belongs to a definition."""
        inside = self.scan.enclosing[index] > level
        text = self._text(index)
        match definition.kind:
            case "import":
                return True
            case "attention":
                return text == "{" and not inside
            case "graph":
                return any(item.first == index for item in self.items)
            case "parameter":
                return not inside and text in (",", ")")
            case _:
                closes = self.scan.closers.get(level) == index
                return closes or (not inside and text in STATEMENTS and self._starts(index))
