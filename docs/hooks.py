"""What mkdocs is told beyond mkdocs.yml: pages that are files of the repository, links, pictures.

A text stands in one place; what is taken over, and the pictures of the zoo, are made at each build.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments.formatters import HtmlFormatter

from attnspec.examples.gallery import pictures

ROOT = Path(__file__).resolve().parent.parent

TAKEN = {
    "backends.md": "backends/README.md",
    "benchmarks.md": "benchmarks/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "devices.md": "attnspec/distributed/README.md",
    "editors.md": "editors/vscode/README.md",
    "inside.md": "attnspec/README.md",
    "language.md": "grammar/README.md",
    "masks.md": "attnspec/interchange/README.md",
    "models.md": "attnspec/integrations/README.md",
    "torch.md": "attnspec/runtime/README.md",
    "zoo.md": "examples/README.md",
}
"""The pages that are files of the repository, by where they stand on the site."""

AWAITED: tuple[str, ...] = ()
"""Pages that are being written: while their file is missing, the site is built without them. All
other pages must have theirs."""

LIGHT, DARK = "default", "github-dark"
"""Styles of Pygments."""


def taken() -> dict[str, str]:
    """`TAKEN` without what is still awaited; raises FileNotFoundError for any other file."""
    found = {}
    for page, source in TAKEN.items():
        if (ROOT / source).exists():
            found[page] = source
        elif page not in AWAITED:
            raise FileNotFoundError(f"docs/hooks.py takes the page {page} from {source}")
    return found


def source_of(page: str) -> str:
    """The file of the repository in which the text of a page stands."""
    return TAKEN.get(page, f"docs/{page}")


def page_of(source: str) -> str | None:
    """The page that has the text of a file of the repository, None where no page has it."""
    if source == "README.md":
        return "index.md"
    for page, file in taken().items():
        if file == source:
            return page
    if source.startswith("docs/") and source.endswith(".md"):
        return source.removeprefix("docs/")
    if source.startswith("examples/") and source.endswith(".attn"):
        return f"zoo/{Path(source).stem}.md"
    return None


_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(
    r"(?P<code>`[^`\n]*`)"
    r"|(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)"
)


def relinked(text: str, page: str, copied: Callable[[str], None] = lambda source: None) -> str:
    """A page's Markdown with links between files of the repository turned into links between pages.

    Images are told to `copied` and stand at their path; a file that has no page is named by its
    path. A link to what is not in the repository stays, and is found when the site is built.
    """
    folder = posixpath.dirname(source_of(page))

    def link(found: re.Match[str]) -> str:
        target, words = found["target"], found["text"]
        if found["code"] or not target or "://" in target:
            return found[0]
        source = posixpath.normpath(posixpath.join(folder, target))
        to, anchor = page_of(source), found["anchor"] or ""
        if found["image"]:
            copied(source)
            to = source
        elif to is None and (ROOT / source).exists():
            plain = words.strip("`")
            return f"`{source}`" if source.endswith(plain.rstrip("/")) else f"{words} (`{source}`)"
        to = posixpath.relpath(to or source, posixpath.dirname(page) or ".")
        return f"{found['image']}[{words}]({to}{anchor})"

    parts = _FENCED.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


_COMMENT = re.compile(r"^<!-- .*? -->$", re.MULTILINE)
_DOCTEST = re.compile(r"^```python\n(?=>>> )", re.MULTILINE)


def as_read_elsewhere(text: str) -> str:
    """The Markdown of repositories as this site's renderer reads it: comments stand between
    paragraphs, sessions of Python have a language of their own, and strokes inside of code in
    tables need no backslash."""
    text = _DOCTEST.sub("```pycon\n", _COMMENT.sub("\n", text))
    parts = _FENCED.split(text)
    return "".join(
        part if part.startswith("```") else re.sub(r"`[^`\n]*`", _unescaped, part) for part in parts
    )


def _unescaped(code: re.Match[str]) -> str:
    return code[0].replace("\\|", "|")


def slug(heading: str, separator: str) -> str:
    """The anchor of a heading, as on the pages of repositories: `Who reads whom?` is
    `who-reads-whom`."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def without(entries: list[Any], pages: set[str]) -> Iterator[Any]:
    """The entries of a navigation but for some pages."""
    for entry in entries:
        ((title, content),) = entry.items()
        if isinstance(content, list):
            yield {title: list(without(content, pages))}
        elif content not in pages:
            yield entry


def spec_page(path: Path, picture: str | None) -> str:
    """The page of a spec of the zoo."""
    name, spec = path.stem, path.read_text(encoding="utf-8")
    shown = (
        "A formula: it has no pairs to draw." if picture is None else _image(name, f"{name}.svg")
    )
    return f"# {name}\n\n{shown}\n\n```attn\n{spec}```\n"


def with_pictures(zoo: str, drawn: Callable[[str], bool]) -> str:
    """The page of the zoo with a small picture before the name of each spec that has one."""

    def row(found: re.Match[str]) -> str:
        name = found[1]
        image = f"zoo/{name}.svg"
        return f"| {_image(name, image)} {found[0][2:]}" if drawn(image) else found[0]

    return re.sub(r"^\| \[(\w+)\]\(zoo/\1\.md\)(?= \|)", row, zoo, flags=re.MULTILINE)


def _image(name: str, target: str) -> str:
    return f"![who reads whom in {name}]({target})"


def colours() -> str:
    """The style sheet of code, light and dark."""
    light: str = HtmlFormatter(style=LIGHT).get_style_defs(".codehilite")
    dark: str = HtmlFormatter(style=DARK).get_style_defs("[data-bs-theme=dark] .codehilite")
    return f"{light}\n{dark}\n"


def on_config(config: MkDocsConfig) -> None:
    """Anchors as on the pages of repositories; no entries for what is awaited."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    config.nav = list(without(config.nav or [], set(TAKEN) - set(taken())))


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages that are taken over, those of the zoo with their pictures, and the colours."""

    def add(path: str, content: str) -> None:
        files.append(File.generated(config, path, content=content))

    for page, source in taken().items():
        add(page, (ROOT / source).read_text(encoding="utf-8"))
    for path, picture in pictures(sorted((ROOT / "examples").glob("*.attn"))).items():
        add(f"zoo/{path.stem}.md", spec_page(path, picture))
        if picture is not None:
            add(f"zoo/{path.stem}.svg", picture)
    add("colours.css", colours())


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """A page with what the theme's switch for the dark turns off: without its own colours of code
    there is nothing by these names, and the switch fails."""
    return output.replace("</head>", '<meta id="hljs-light"><meta id="hljs-dark"></head>')


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A page with links between pages, and its images copied beside it."""
    name = page.file.src_uri

    def copied(source: str) -> None:
        if (ROOT / source).exists() and files.get_file_from_path(source) is None:
            content = (ROOT / source).read_bytes()
            files.append(File.generated(config, source, content=content))

    if name.startswith("zoo/"):
        return markdown
    text = as_read_elsewhere(relinked(markdown, name, copied))
    if name == "zoo.md":
        text = with_pictures(text, lambda image: files.get_file_from_path(image) is not None)
    return text
