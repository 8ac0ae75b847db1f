"""Operations on rows of tokens in one pass over memory: norms, rotary positions, gates, and the
adapter's part that is added to a value. They know no linear."""
