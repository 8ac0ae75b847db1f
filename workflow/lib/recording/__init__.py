"""The GPU allocations of the engine, recorded from the engine itself, without GPU or weights.

Begin with `engine_run`: it builds a model as training does and runs start-up checks and two steps
on fake tensors. `allocation_recorder` notes every storage on a `Tape`, which
`planning.memory.replay` replays; `recorded_gpu` is the device. This package must not know what a
layer computes: that is the engine's part."""
