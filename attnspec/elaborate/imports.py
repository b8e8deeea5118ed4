"""Files and what they define: loading imports inside one folder tree, each file once."""

from __future__ import annotations

from pathlib import Path, PureWindowsPath

from attnspec.elaborate.names import RESERVED
from attnspec.elaborate.scope import Collector, Failed, Module
from attnspec.grammar import nodes
from attnspec.grammar.parser import parse
from attnspec.limits import LIMITS
from attnspec.text.decoding import read_source
from attnspec.text.diagnostics import SpecError, did_you_mean
from attnspec.text.source import Source, Span


class Loader:
    """Loads a file and everything it imports."""

    def __init__(self, collector: Collector, builtin: frozenset[str]) -> None:
        self.collector = collector
        self.builtin = builtin
        self.root: Path | None = None
        self.loaded: dict[Path, Module] = {}
        self.unreadable: set[Path] = set()
        self.loading: list[Path] = []

    def load(self, source: Source) -> Module:
        """The module of the main file; its folder is the tree that imports may not leave."""
        if source.path is not None:
            # where the path leads, not where a link at its end does: imports start there, too
            self.root = source.path.parent.resolve()
            self.loading.append(source.path.resolve())
        return self._define(source, parse(source))

    def _define(self, source: Source, file: nodes.File) -> Module:
        module = Module(source, file)
        places: dict[str, Span] = {}
        for item in file.items:
            if isinstance(item, nodes.Import):
                try:
                    self._import(module, item, places)
                except Failed:
                    pass
                module.broken.update({name.name for name in item.names} - module.graphs.keys())
                continue
            self._claim(item.name, item.name_span, places, isinstance(item, nodes.Graph))
            if isinstance(item, nodes.Graph):
                if not self._has_good_parameters(item):
                    module.broken.add(item.name)
                if item.name not in self.builtin | RESERVED:
                    module.graphs.setdefault(item.name, (item, module))
            else:
                module.attentions.setdefault(item.name, item)
        return module

    def _has_good_parameters(self, graph: nodes.Graph) -> bool:
        places: dict[str, Span] = {}
        good = True
        for parameter in graph.parameters:
            name, span = parameter.name, parameter.name_span
            good = good and name not in RESERVED | places.keys()
            if name in RESERVED:
                message = f"`{name}` is a reserved word and cannot be a name"
                self.collector.add("A204", message, span)
            elif name in places:
                self.collector.add_twice(name, span, places[name])
            places.setdefault(name, span)
        return good

    def _claim(self, name: str, span: Span, places: dict[str, Span], called: bool = True) -> None:
        # an attention is never called, so it may be named after the pattern that it is about
        if name in RESERVED or (called and name in self.builtin):
            message = f"`{name}` is a reserved word and cannot be defined again"
            self.collector.add("A202", message, span, help="choose another name")
        if name in places:
            self.collector.add_twice(name, span, places[name])
        places.setdefault(name, span)

    def _import(self, module: Module, item: nodes.Import, places: dict[str, Span]) -> None:
        imported = self._resolve(module, item)
        for name in item.names:
            self._claim(name.name, name.span, places)
            if name.name in imported.graphs:
                module.graphs.setdefault(name.name, imported.graphs[name.name])
            elif name.name in imported.broken:
                continue
            elif name.name in imported.attentions:
                message = f"`{name.name}` is an attention; only graphs can be imported"
                self.collector.add("A507", message, name.span)
            else:
                message = f"{item.path!r} defines no graph `{name.name}`"
                advice = did_you_mean(name.name, imported.graphs)
                self.collector.add("A506", message, name.span, help=advice)

    def _resolve(self, module: Module, item: nodes.Import) -> Module:
        span = item.path_span
        fail = self.collector.fail
        if module.source.path is None or self.root is None:
            message = "imports need a spec that is a file; this one is a text"
            fail("A501", message, span, help="write it to a file and use `attnspec.load`")
        if "\0" in item.path or not item.path:
            fail("A502", "an import needs the path of a file", span)
        windows = PureWindowsPath(item.path)
        if (
            item.path.startswith(("/", "~"))
            or windows.drive
            or "\\" in item.path
            or "://" in item.path
            or item.path.startswith("file:")
        ):
            message = "an import's path is relative to the file that imports"
            fail("A503", f"{message}, with `/` between folders", span)
        try:
            path = (module.source.path.parent / item.path).resolve()
        except (OSError, RuntimeError, ValueError):
            fail("A502", f"the path {item.path!r} cannot be followed", span)
        if not path.is_relative_to(self.root):
            fail("A504", "an import may not leave the folder tree of the spec", span)
        if path in self.loading:
            cycle = [*self.loading[self.loading.index(path) :], path]
            names = [each.relative_to(self.root).as_posix() for each in cycle]
            fail("A505", f"imports form a cycle: {' -> '.join(names)}", span)
        if path in self.unreadable:
            raise Failed
        if path in self.loaded:
            return self.loaded[path]
        if len(self.loaded) >= LIMITS.files or len(self.loading) >= LIMITS.files_deep:
            message = f"a spec may import at most {LIMITS.files} files"
            fail("A195", f"{message}, nested at most {LIMITS.files_deep} deep", span)
        return self._load_file(path, item, span)

    def _load_file(self, path: Path, item: nodes.Import, span: Span) -> Module:
        # a file that cannot be read or parsed says so once, however many import it
        self.unreadable.add(path)
        try:
            if path.is_file() and path.name not in {p.name for p in path.parent.iterdir()}:
                message = f"the file's name differs from {item.path!r} in upper and lower case"
                self.collector.fail("A508", message, span)
            shown = path.relative_to(self.root).as_posix() if self.root else item.path
            source = read_source(path, shown)
            file = parse(source)
        except OSError:
            self.collector.fail("A509", f"{item.path!r} cannot be read", span)
        except SpecError as error:
            for diagnostic in error.diagnostics:
                if diagnostic.span is None:
                    self.collector.add("A509", f"cannot import: {diagnostic.message}", span)
                else:
                    self.collector.diagnostics.append(diagnostic)
            raise Failed from None
        self.loading.append(path)
        try:
            module = self._define(source, file)
        finally:
            self.loading.pop()
        self.unreadable.remove(path)
        self.loaded[path] = module
        return module
