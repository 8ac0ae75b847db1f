"""Attention over packed documents: `packed` (FlashAttention, cuDNN), `document_attention` (kernels
of the project, for short documents and wide heads), `flex` (caps, sinks and chunks of scores), all
over rows that processes share too (`head_exchange`), and `reference`, a family's own, for
comparison.
`attention_choice` decides which of them a model takes; `answer_rows` has their work."""
