"""Attention over packed documents: `packed` (FlashAttention, cuDNN), `wide` (wider heads), `flex`
(caps, sinks and chunks of scores), and `reference`, a family's own, for comparison."""
