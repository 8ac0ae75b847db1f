"""Operations on rows of tokens in one pass over memory: norms, rotary positions, gates, and the
addition of an adapter's part. They know no linear."""
