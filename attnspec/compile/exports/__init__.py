"""Graphs in the formats of other libraries: FlexAttention, MagiAttention, FlashInfer."""
