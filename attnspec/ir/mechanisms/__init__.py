"""The mechanisms of the language: one file each, one line each here."""

from __future__ import annotations

from attnspec.ir.mechanisms.declaration import MechanismDeclaration
from attnspec.ir.mechanisms.efficient import Efficient
from attnspec.ir.mechanisms.favor import Favor
from attnspec.ir.mechanisms.fourier import Fourier
from attnspec.ir.mechanisms.gmlp import Gmlp
from attnspec.ir.mechanisms.linear import Linear
from attnspec.ir.mechanisms.linformer import Linformer
from attnspec.ir.mechanisms.mixer import Mixer
from attnspec.ir.mechanisms.nystrom import Nystrom
from attnspec.ir.mechanisms.rbf import Rbf
from attnspec.ir.mechanisms.rfa import Rfa
from attnspec.ir.mechanisms.synthesizer import Synthesizer
from attnspec.ir.mechanisms.taylor import Taylor

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
