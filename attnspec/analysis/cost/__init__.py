"""Operations, bytes and memory of a plan."""
