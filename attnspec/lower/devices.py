"""The devices that torch knows, by name."""

from __future__ import annotations

from attnspec.text.diagnostics import AttnSpecError


def device_of(device: object) -> str:
    """The name of a device, given by it or as a torch.device; "cuda:1" has the type cuda.

    Raises TypeError for anything else, AttnSpecError for a name that torch does not know.
    """
    if not isinstance(device, str) and type(device).__module__.partition(".")[0] != "torch":
        raise TypeError(
            "the device must be a torch.device or its name, for example 'cpu' or 'cuda',"
            f" got {type(device).__name__}"
        )
    name = str(device)
    if name not in ("cpu", "cuda"):
        import torch

        try:
            torch.device(name)
        except RuntimeError:
            raise AttnSpecError(
                "the device must be one that torch knows, for example 'cpu' or 'cuda',"
                f" got {name!r:.60}"
            ) from None
    return name
