"""Converted models in files: what `save_pretrained` writes is loaded as it was saved.

transformers knows nothing of a spec, and would load such a model with its own attention without a
word. So its config holds what `convert` was given, its model card says so, and where attnspec is
imported `from_pretrained` of transformers gives the model its specs again.
"""

from __future__ import annotations

import functools
import json
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from attnspec.text.diagnostics import AttnSpecError

FIELD = "attnspec"
"""Where the config of a converted model holds the arguments of `convert`."""

COMPILED = "compiled"
"""What stands there for classes that `attnspec compile` wrote, which no config can hold."""

_HEAD = "## Sparse attention"

_NOTE = """{head}

This model was converted by [attnspec](https://pypi.org/project/attnspec/) and its weights belong to
the attention below. transformers alone loads it with the attention of its architecture, without a
warning, and its outputs are then others. With attnspec it loads as it was saved:

```python
import attnspec
from transformers import {kind}

model = {kind}.from_pretrained(path)
```

```json
{words}
```
"""


def watch_files() -> None:
    """Have transformers load and save converted models as such; done once."""
    kind = import_module("transformers.modeling_utils").PreTrainedModel
    if not hasattr(kind.save_pretrained, "_of_attnspec"):
        kind.save_pretrained = _saving(kind.save_pretrained)
        kind.from_pretrained = classmethod(_loading(kind.from_pretrained.__func__))


def loaded(kind: Any, path: Any, *arguments: Any, **settings: Any) -> tuple[Any, Any]:
    """What `kind.from_pretrained` returns for a converted model, and the Conversion."""
    done: list[Any] = []

    def built(model: Any, *given: Any, **others: Any) -> None:
        kind.__init__(model, *given, **others)
        # `undo` gives back a model that was not converted
        words = vars(model.config).pop(FIELD)
        done.append(_converted(model, words))

    # what the specs learn must be there before weights are read
    same = {"__init__": built, "__module__": kind.__module__, "_of_attnspec": True}
    converted: Any = type(kind.__name__, (kind,), same)
    result = converted.from_pretrained(path, *arguments, **settings)
    done[-1].model.__class__ = kind
    return result, done[-1]


def _converted(model: Any, words: dict[str, Any]) -> Any:
    # with torch and the compiler, which an import of this package does not load
    face = import_module("attnspec.integrations.transformers")
    parse = import_module("attnspec.spec").parse
    if COMPILED in words:
        raise AttnSpecError(
            f"`{words[COMPILED]}`, which `attnspec compile` wrote, is not a text that a config can"
            " hold: load the model without attnspec, `convert` it and load its state dict"
        )
    sides = ("spec", "encoder", "decoder", "cross")
    specs = {side: parse(words[side]) for side in sides if side in words}
    rest = {name: value for name, value in words.items() if name not in sides}
    for name in ("only", "skip"):
        if name in rest:
            rest[name] = [_rooted(model, path) for path in rest[name]]
    return face.convert(model, **specs, **rest)


def _rooted(model: Any, path: str) -> str:
    """A dotted name of a model, which may be saved with a head and loaded without, or the other way
    round."""
    paths, prefix = dict(model.named_modules()), f"{model.base_model_prefix}."
    return next((x for x in (path, path.removeprefix(prefix), prefix + path) if x in paths), path)


def _loading(method: Any) -> Any:
    @functools.wraps(method)
    def from_pretrained(kind: Any, path: Any = None, *arguments: Any, **settings: Any) -> Any:
        if hasattr(kind, "_of_attnspec") or not _words_in(kind, path, settings):
            return method(kind, path, *arguments, **settings)
        try:
            return loaded(kind, path, *arguments, **settings)[0]
        except AttnSpecError as error:
            warnings.warn(
                f"the model in {path} was saved with sparse attention and is now loaded with its"
                f" original attention, so that its outputs differ: {error}",
                stacklevel=2,
            )
            return method(kind, path, *arguments, **settings)

    return from_pretrained


def _words_in(kind: Any, path: Any, settings: dict[str, Any]) -> Any:
    """What the config of a saved model holds for `convert`, None for another model."""
    config = settings.get("config")
    if config is not None and not isinstance(config, str | Path):
        return getattr(config, FIELD, None)
    hub = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
    present = {name: settings[name] for name in hub if name in settings}
    try:
        words, _ = kind.config_class.get_config_dict(config or path, **present)
    except Exception:
        # transformers says by itself what is wrong with a path
        return None
    return words.get(FIELD)


def _saving(method: Any) -> Any:
    @functools.wraps(method)
    def save_pretrained(model: Any, directory: Any, *arguments: Any, **settings: Any) -> Any:
        result = method(model, directory, *arguments, **settings)
        words = getattr(getattr(model, "config", None), FIELD, None)
        if words and settings.get("is_main_process", True):
            card = Path(directory) / "README.md"
            before = card.read_text(encoding="utf-8") if card.exists() else ""
            text = json.dumps(words, indent=2)
            note = _NOTE.format(head=_HEAD, kind=type(model).__name__, words=text)
            kept = before.partition(_HEAD)[0].rstrip()
            card.write_text(f"{kept}\n\n{note}".lstrip(), encoding="utf-8")
        return result

    save_pretrained._of_attnspec = True  # type: ignore[attr-defined]
    return save_pretrained
