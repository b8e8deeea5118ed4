"""The patterns of the language: one file each, one line each here."""

from __future__ import annotations

from attnspec.graphs.patterns.axial import Axial
from attnspec.graphs.patterns.block import Block
from attnspec.graphs.patterns.causal import Causal
from attnspec.graphs.patterns.chosen import Chosen
from attnspec.graphs.patterns.cluster import Cluster
from attnspec.graphs.patterns.columns_rows import Columns, Rows
from attnspec.graphs.patterns.dilated import Dilated
from attnspec.graphs.patterns.expander import Expander
from attnspec.graphs.patterns.fixed import Fixed
from attnspec.graphs.patterns.full import Full
from attnspec.graphs.patterns.global_ import Global
from attnspec.graphs.patterns.lsh import Lsh
from attnspec.graphs.patterns.neighborhood import Neighborhood
from attnspec.graphs.patterns.powers import Powers
from attnspec.graphs.patterns.prefix import Prefix
from attnspec.graphs.patterns.random_ import Random
from attnspec.graphs.patterns.random_blocks import RandomBlocks
from attnspec.graphs.patterns.residue import Residue
from attnspec.graphs.patterns.same import Same
from attnspec.graphs.patterns.self import Self
from attnspec.graphs.patterns.sinkhorn import Sinkhorn
from attnspec.graphs.patterns.strided import Strided
from attnspec.graphs.patterns.summary import Summary
from attnspec.graphs.patterns.topk import TopK
from attnspec.graphs.patterns.where import Where
from attnspec.graphs.patterns.where_inputs import WhereInputs
from attnspec.graphs.patterns.window import Window
from attnspec.graphs.relation import Relation

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
    WhereInputs,
    Chosen,
    TopK,
    Lsh,
    Cluster,
    Sinkhorn,
)

BY_NAME: dict[str, type[Relation]] = {pattern.name: pattern for pattern in PATTERNS}
