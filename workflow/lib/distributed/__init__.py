"""Processes that share a model: FSDP2, slices of the vocabulary, weights in host memory.

Begin with `world` (process groups) and `fsdp` (`shard_`). `weight_checks` proves that gathered
weights equal the checkpoint. `heartbeat` shows whether processes hang. It imports `model` and
`system`. It trains nothing."""
