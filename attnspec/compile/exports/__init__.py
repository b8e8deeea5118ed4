"""Graphs in the formats of other libraries: FlexAttention, FlashInfer."""
