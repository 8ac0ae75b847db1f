"""Attention over packed documents: `packed` (FlashAttention, cuDNN), `wide` (heads wider than
theirs), `flex` (caps, sinks and chunks of scores), and `reference`, a family's
own, to compare with."""
