"""The training: its processes, its steps, its checkpoints.

Begin with `build` (the model, in the one right order), `loop` (the steps) and `checkpoint`.
`launch` starts and watches the processes; `failure_causes` finds why one failed. It imports
`distributed`, `model`, `planning`, `data.tokens` and `settings`."""
