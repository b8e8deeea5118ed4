"""What could be written at a place: the parser says which words and which kinds of words can come
next, the declarations which names are meant there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from attnspec.editor.document import Document, specs_below
from attnspec.editor.documentation import declaration_of, formula_and_source, meaning, page_of
from attnspec.editor.symbols import Definition
from attnspec.editor.words import GRID, REACH, words
from attnspec.elaborate.arguments import parameters_of
from attnspec.elaborate.names import INPUTS, SCORES, TOKEN_SETS
from attnspec.grammar.parser import expected, keywords
from attnspec.grammar.syntax_errors import ITEMS, STATEMENTS
from attnspec.graphs.predicates.inputs import READ
from attnspec.ir.crossing import QUERIES
from attnspec.ir.parameters import Parameter
from attnspec.text.diagnostics import SpecError
from attnspec.text.source import Source


@dataclass(frozen=True)
class Offer:
    """A word that could be written: its kind (a key of `words`, or that of a definition,
    "argument" or "file"), what it is in a few words, and what to write where that is more."""

    label: str
    kind: str
    detail: str = ""
    insert: str = ""


@dataclass(frozen=True)
class Spot:
    """Where something is written: the words before it, and the bracket that is open there."""

    document: Document
    before: int
    opener: int

    def text(self, back: int) -> str:
        """A word before the place, the last one for 1."""
        index = self.before - back
        return self.document.scan.words[index].text if index >= 0 else ""


def offers(document: Document, offset: int) -> list[Offer]:
    """What could be written at a place, in place of the word that is begun there; each label once.

    Nothing inside comments, and nothing that would be a new name.
    """
    start = begun(document, offset)
    if start is None:
        return []
    try:
        accepted = expected(Source(document.name, document.source.text[:start]))
    except SpecError:
        return []
    words = document.scan.words
    before = sum(1 for word in words if word.end <= start)
    inside = document.scan.enclosing[before] if before < len(document.scan.enclosing) else -1
    spot = Spot(document, before, inside)
    offered = list(_named(spot)) if "NAME" in accepted else []
    if "STRING" in accepted:
        offered += _files(document)
    offered += [Offer(word, "keyword") for word in sorted(accepted & keywords())]
    return list({offer.label: offer for offer in reversed(offered)}.values())[::-1]


def begun(document: Document, offset: int) -> int | None:
    """Where the word starts that is being written at a place: the place itself between words, None
    in comments and strings."""
    if document.is_comment(offset):
        return None
    for word in document.scan.words:
        if word.start < offset <= word.end and word.kind in ("name", "string", "number"):
            return word.start if word.kind == "name" else None
    return offset


# --- names ------------------------------------------------------------------------------------


def _named(spot: Spot) -> Iterator[Offer]:
    """The names that may stand at a place."""
    last = spot.text(1)
    named = last in ("let", "graph", "attention", "input") and spot.text(2) not in ("=", ",", "(")
    if named or (last in ("(", ",") and _is_header(spot, spot.opener)):
        # a new name
        return
    if last == ".":
        yield from _of("coordinate")
    elif spot.text(3) == "input" and last == ":":
        yield from (Offer(kind, "input", text) for kind, (text, _) in INPUTS.items())
    elif last == "normalize":
        yield from _of("normalizer")
    elif last == "score":
        yield from _calls("score")
    elif last == "sequence":
        yield Offer(GRID, "statement", "positions are cells", f"{GRID}(")
    elif last in ("layer", "head"):
        yield from [*_of("selector"), *_numbers(spot)]
    elif _keyword(spot) == "from":
        yield from _importable(spot)
    else:
        yield from _expression(spot)


def _of(kind: str) -> Iterator[Offer]:
    return (Offer(word, kind) for word in words()[kind])


def _calls(*kinds: str) -> Iterator[Offer]:
    return (Offer(x, kind, insert=f"{x}(") for kind in kinds for x in words()[kind])


def _keyword(spot: Spot) -> str:
    """The keyword of the statement, or item, in which a place lies; "" at the start of a body."""
    index = _statement(spot)
    return "" if index is None else spot.document.scan.words[index].text


def _statement(spot: Spot) -> int | None:
    """The word that is that keyword."""
    scan, body = spot.document.scan, spot.opener
    # the brace of the body around a place, -1 for the file
    while body >= 0 and scan.words[body].text != "{":
        body = scan.enclosing[body]
    for index in range(spot.before - 1, body, -1):
        if scan.words[index].text in STATEMENTS | ITEMS and scan.enclosing[index] == body:
            return index
    return None


def _expression(spot: Spot) -> Iterator[Offer]:
    """What an expression may be made of at a place, by the brackets and the statement around it."""
    call = _call(spot)
    if call is not None:
        callee, opener = call
        yield from _in_call(spot, callee, opener)
    elif (keyword := _keyword(spot)) == "require":
        yield from [*_of("property"), *_of("figure"), Offer(REACH, "property", insert="reach(")]
        yield from _anything(spot)
    elif keyword in ("layers", "heads", "extra_tokens", "scale", "layer", "head"):
        yield from _numbers(spot)
    else:
        yield from _anything(spot)


def _call(spot: Spot) -> tuple[str, int] | None:
    """The innermost call around a place and its opening bracket; brackets that group are passed."""
    scan, opener = spot.document.scan, spot.opener
    while opener > 0 and scan.words[opener].text != "{":
        before, sign = scan.words[opener - 1], scan.words[opener].text
        called = sign == "(" and before.kind == "name" and before.text not in keywords()
        if called and not _is_header(spot, opener):
            return before.text, opener
        opener = scan.enclosing[opener]
    return None


def _is_header(spot: Spot, opener: int) -> bool:
    """Whether a bracket holds the parameters of a graph or attention."""
    return any(opener == item.first + 2 for item in spot.document.symbols.items)


def _in_call(spot: Spot, callee: str, opener: int) -> Iterator[Offer]:
    scan = spot.document.scan
    # an input is read at a position, as `time(q)`
    if _in_predicate(spot) and callee in (each.name for each in _inputs(spot, set(READ))):
        # of two sequences the inputs belong to the keys
        crosses = spot.document.symbols.crosses(spot.before)
        yield from (x for x in _of("position") if x.label == "k" or not crosses)
        return
    inside = [i for i in range(opener + 1, spot.before) if scan.enclosing[i] == opener]
    commas = [i for i in inside if scan.words[i].text == ","]
    started = [i for i in inside if i > (commas[-1] if commas else opener)]
    parameters = _parameters(spot.document, callee)
    if _keyword(spot) == "input" and callee in INPUTS:
        parameters = INPUTS[callee][1]
    names = {scan.words[i - 1].text for i in inside if scan.words[i].text == "="}
    if not started:
        for name, parameter in parameters.items():
            if name not in names and not parameter.positional:
                yield Offer(name, "argument", meaning(parameter), f"{name} = ")
    named = len(started) > 1 and scan.words[started[1]].text == "="
    if named:
        chosen = parameters.get(scan.words[started[0]].text)
    else:
        chosen = next((each for each in parameters.values() if each.positional), None)
    if callee in words()["function"]:
        chosen = Parameter("predicate" if _in_predicate(spot) else "real", "")
    if chosen is not None:
        yield from _values(spot, chosen)
    elif not named and (not parameters or callee in words()["operation"]):
        yield from _anything(spot)


def _in_predicate(spot: Spot) -> bool:
    """Whether a bracket around a place is that of `where`."""
    scan, opener = spot.document.scan, spot.opener
    while opener > 0 and scan.words[opener - 1].text != "where":
        opener = scan.enclosing[opener]
    return opener > 0


def _parameters(document: Document, callee: str) -> Mapping[str, Parameter]:
    """The arguments of what is called."""
    graph = document.symbols.graph(callee)
    if graph is not None:
        return {
            each.name: Parameter("any", " ".join(document.symbols.text(each).split()))
            for each in document.symbols.parameters(graph)
        }
    declaration = declaration_of(callee)
    if declaration is not None:
        return parameters_of(declaration)
    if callee in SCORES:
        return SCORES[callee]
    if callee == "shift":
        return {"by": Parameter("integer", "how many positions later")}
    if callee == REACH:
        return {"layers": Parameter("integer", "the number of layers")}
    return TOKEN_SETS.get(callee, {})


# --- values -----------------------------------------------------------------------------------


def _values(spot: Spot, parameter: Parameter) -> Iterator[Offer]:
    """What an argument may be."""
    match parameter.kind:
        case "integer" | "real" | "extents":
            yield from _numbers(spot)
        case "boolean":
            yield from _of("constant")
        case "choice":
            yield from (Offer(choice, "option", parameter.doc) for choice in parameter.choices)
            yield from _named_inputs(spot, {parameter.input})
        case "tokens":
            yield from _calls("set")
            yield from _named_inputs(spot, {"tokens"})
            yield from _own(spot, ("parameter", "let"))
        case "predicate":
            yield from _of("position")
            for read in _inputs(spot, set(READ)):
                yield replace(_defined(spot.document, read), insert=f"{read.name}(")
            yield from _named_inputs(spot, {"length"})
            yield from _numbers(spot)
        case "any" | "graph":
            yield from _anything(spot)
        case kind:
            yield from _named_inputs(spot, {kind, parameter.input})
            yield from _own(spot, ("parameter",))


def _numbers(spot: Spot) -> Iterator[Offer]:
    yield from _own(spot, ("parameter", "let"))
    yield from _computed(spot)


def _computed(spot: Spot) -> Iterator[Offer]:
    yield from _of("scalar")
    if spot.document.symbols.crosses(spot.before):
        yield Offer(QUERIES, "scalar", "how many queries there are")
    yield from _calls("function")


def _anything(spot: Spot) -> Iterator[Offer]:
    """Graphs, mechanisms, token sets and numbers."""
    yield from _own(spot, ("parameter", "let", "input"))
    yield from _own(spot, ("graph", "import"))
    for kind in ("pattern", "mechanism"):
        for name in words()[kind]:
            declaration = declaration_of(name)
            formula = formula_and_source(page_of(declaration))[0] if declaration else ""
            takes = declaration is not None and parameters_of(declaration)
            yield Offer(name, kind, formula, f"{name}(" if takes else "")
    yield from _calls("operation", "set")
    yield from _computed(spot)


def _own(spot: Spot, kinds: Iterable[str]) -> Iterator[Offer]:
    """What is defined for a place: graphs and inputs anywhere, numbers before it."""
    statement = _statement(spot)
    assigned = spot.before - 2 if spot.text(1) == "=" else None
    for each in spot.document.symbols.visible(spot.before):
        late = each.kind in ("parameter", "let") and each.word >= spot.before
        # what is being defined does not define itself
        itself = each.word == assigned or statement == each.word - 1
        if each.kind in kinds and not late and not itself:
            yield _defined(spot.document, each)


def _inputs(spot: Spot, kinds: set[str]) -> Iterator[Definition]:
    """The inputs of some kinds."""
    document = spot.document
    for each in document.symbols.visible(spot.before):
        kind = document.scan.words[each.word + 2 : each.word + 3]
        if each.kind == "input" and kind and kind[0].text in kinds:
            yield each


def _named_inputs(spot: Spot, kinds: set[str]) -> Iterator[Offer]:
    return (_defined(spot.document, each) for each in _inputs(spot, kinds))


def _defined(document: Document, definition: Definition) -> Offer:
    text = " ".join(document.symbols.text(definition).split())
    return Offer(definition.name, definition.kind, text)


# --- imports ----------------------------------------------------------------------------------


def _files(document: Document) -> list[Offer]:
    """The other specs in the folder of this one, and below."""
    if document.path is None:
        return []
    folder = document.path.parent
    paths = [path for path in specs_below(folder) if path != document.path]
    names = [path.relative_to(folder).as_posix() for path in paths]
    return [Offer(f'"{name}"', "file") for name in names]


def _importable(spot: Spot) -> Iterator[Offer]:
    """The graphs of the file that an import names."""
    document = spot.document
    item = document.symbols.items[document.symbols.home(spot.before - 1)]
    other = document.imported(item.first + 1)
    if other is not None:
        for each in other.symbols.definitions:
            if each.kind == "graph":
                yield _defined(other, each)
