"""The patterns of the language: one file each, one line each here."""

from __future__ import annotations

from attnspec.patterns.axial import Axial
from attnspec.patterns.block import Block
from attnspec.patterns.causal import Causal
from attnspec.patterns.cluster import Cluster
from attnspec.patterns.columns import Columns
from attnspec.patterns.dilated import Dilated
from attnspec.patterns.expander import Expander
from attnspec.patterns.fixed import Fixed
from attnspec.patterns.full import Full
from attnspec.patterns.global_ import Global
from attnspec.patterns.lsh import Lsh
from attnspec.patterns.neighborhood import Neighborhood
from attnspec.patterns.powers import Powers
from attnspec.patterns.prefix import Prefix
from attnspec.patterns.random_ import Random
from attnspec.patterns.random_blocks import RandomBlocks
from attnspec.patterns.residue import Residue
from attnspec.patterns.rows import Rows
from attnspec.patterns.same import Same
from attnspec.patterns.self import Self
from attnspec.patterns.sinkhorn import Sinkhorn
from attnspec.patterns.strided import Strided
from attnspec.patterns.summary import Summary
from attnspec.patterns.topk import TopK
from attnspec.patterns.where import Where
from attnspec.patterns.window import Window
from attnspec.relations import Relation

PATTERNS: tuple[type[Relation], ...] = (
    Full,
    Self,
    Causal,
    Window,
    Dilated,
    Residue,
    Strided,
    Block,
    Summary,
    Fixed,
    Global,
    Rows,
    Columns,
    Powers,
    Random,
    RandomBlocks,
    Expander,
    Neighborhood,
    Axial,
    Same,
    Prefix,
    Where,
    Lsh,
    Cluster,
    Sinkhorn,
    TopK,
)

BY_NAME: dict[str, type[Relation]] = {pattern.name: pattern for pattern in PATTERNS}
