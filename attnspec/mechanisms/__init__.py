"""The mechanisms of the language: one file each, one line each here."""

from __future__ import annotations

from attnspec.mechanism import MechanismDeclaration
from attnspec.mechanisms.efficient import Efficient
from attnspec.mechanisms.favor import Favor
from attnspec.mechanisms.fourier import Fourier
from attnspec.mechanisms.gmlp import Gmlp
from attnspec.mechanisms.linear import Linear
from attnspec.mechanisms.linformer import Linformer
from attnspec.mechanisms.mixer import Mixer
from attnspec.mechanisms.nystrom import Nystrom
from attnspec.mechanisms.rbf import Rbf
from attnspec.mechanisms.rfa import Rfa
from attnspec.mechanisms.synthesizer import Synthesizer
from attnspec.mechanisms.taylor import Taylor

__all__ = ["BY_NAME", "MECHANISMS", "MechanismDeclaration"]

MECHANISMS: tuple[type[MechanismDeclaration], ...] = (
    Linear,
    Favor,
    Rfa,
    Taylor,
    Efficient,
    Rbf,
    Linformer,
    Nystrom,
    Fourier,
    Synthesizer,
    Mixer,
    Gmlp,
)

BY_NAME: dict[str, type[MechanismDeclaration]] = {m.name: m for m in MECHANISMS}
