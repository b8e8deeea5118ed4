"""`attnspec.zoo`: the specs that ship with the package, by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import overload

from attnspec.ir.program import ParameterValue
from attnspec.spec import Spec, parse
from attnspec.text.diagnostics import AttnSpecError, hinted

SUFFIX = ".attn"


@overload
def zoo() -> list[str]: ...


@overload
def zoo(
    entry: str,
    /,
    *,
    name: str | None = None,
    parameters: Mapping[str, ParameterValue] | None = None,
    **more: ParameterValue,
) -> Spec: ...


def zoo(
    entry: str | None = None,
    /,
    *,
    name: str | None = None,
    parameters: Mapping[str, ParameterValue] | None = None,
    **more: ParameterValue,
) -> Spec | list[str]:
    """The spec of a name that ships with the package; without one, the list of names.

    `name` chooses one of several attentions of an entry, keywords and `parameters` set its
    parameters, as in `attnspec.load`. Raises AttnSpecError for an entry that there is not.
    """
    texts = zoo_texts()
    if entry is None:
        return list(texts)
    if not isinstance(entry, str):
        raise TypeError(f"the zoo has specs by name, got {type(entry).__name__}")
    wanted = entry.removesuffix(SUFFIX)
    if wanted not in texts:
        message = f"the zoo has no spec {entry!r}"
        hint = hinted(message, wanted, texts)
        raise AttnSpecError(hint if hint != message else f"{message}; `attnspec.zoo()` lists them")
    return parse(texts[wanted], name=name, parameters=parameters, **more)


def zoo_texts() -> dict[str, str]:
    """The text of each spec by name, in the order of the alphabet."""
    files = sorted(resources.files("attnspec.examples").iterdir(), key=lambda file: file.name)
    specs = [file for file in files if file.name.endswith(SUFFIX)]
    return {file.name.removesuffix(SUFFIX): file.read_text(encoding="utf-8") for file in specs}
