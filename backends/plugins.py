"""Backends that other distributions offer.

A distribution offers a backend by an entry point of the group `attnspec.backends`: its name is the
backend's name, and it leads to an object with the attributes of `lower.work.Backend`. Entry
points are read when the name of a backend is first asked for, and their modules imported when a
plan is first made. A backend that cannot be had is an error that names the distribution; none is
passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from attnspec.backends import BACKENDS
from attnspec.lower.work import Backend, BackendError

GROUP = "attnspec.backends"

RESERVED = "auto"
"""Stands in place of a name for the choice among all backends."""

_NEEDED = ("name", "refuses", "cost", "steps", "build")


def installed_names() -> list[str]:
    """The names of the backends of other distributions; none is imported.

    Raises BackendError where two backends have one name.
    """
    return list(_offered())


@cache
def installed() -> tuple[Backend, ...]:
    """The backends of other distributions; raises BackendError for one that cannot be had."""
    return tuple(_loaded(name, point) for name, point in _offered().items())


def owner_of(name: str) -> str:
    """The distribution that a backend comes from, with its version."""
    point = _offered().get(name)
    return "attnspec" if point is None else _owner(point)


@cache
def _offered() -> Mapping[str, EntryPoint]:
    """The entry points of other distributions by the name of their backend."""
    owners = {RESERVED: "attnspec", **{backend.name: "attnspec" for backend in BACKENDS}}
    found: dict[str, EntryPoint] = {}
    # in an order that does not depend on the file system; a folder named twice counts once
    points = {
        (point.name, _owner(point), point.value): point for point in entry_points(group=GROUP)
    }
    for (name, owner, _), point in sorted(points.items(), key=lambda item: item[0]):
        if name in owners:
            raise BackendError(
                f"a backend `{name}` is offered by {owners[name]} and by {owner}, and a name can"
                " be offered only once: uninstall one of them"
            )
        owners[name] = owner
        found[name] = point
    return found


def _loaded(name: str, point: EntryPoint) -> Backend:
    """The backend that an entry point leads to."""
    start = f"the backend `{name}` of {_owner(point)}"
    try:
        backend: Backend = point.load()
    except Exception as error:
        what = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
        raise BackendError(
            f"{start} cannot be imported from {point.value}: {what}; repair or uninstall it"
        ) from error
    missing = [each for each in _NEEDED if not hasattr(backend, each)]
    if isinstance(backend, type) or missing:
        kind = f"the class {backend.__name__}" if isinstance(backend, type) else repr(backend)
        lacks = f" without {', '.join(missing)}" if missing else ", whose instance is meant"
        raise BackendError(
            f"{start} must be an object like attnspec.lower.work.Backend,"
            f" got {kind:.80}{lacks} at {point.value}"
        )
    if backend.name != name:
        raise BackendError(
            f"{start} calls itself {backend.name!r}: the class must have the name of its entry"
            " point"
        )
    return backend


def _owner(point: EntryPoint) -> str:
    distribution = point.dist
    return (
        "a distribution without a name"
        if distribution is None
        else f"{distribution.name} {distribution.version}"
    )
