"""Each step as compiled FlexAttention in its own order of tokens."""
