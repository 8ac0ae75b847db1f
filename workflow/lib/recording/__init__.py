"""What the engine asks of a GPU's allocator, recorded from the engine itself: without a GPU,
without weights.

Begin with `engine_run`. It builds a model as `training.build` does and runs the start-up checks'
forwards and two steps, on fake tensors: they have shapes and no values. `allocation_recorder` notes
every storage that is made, resized and released, and on which stream; `recorded_gpu` is the device.
The recording is a `planning.memory.allocation_tape.Tape`, which `planning.memory.replay` replays.
This package must not know what a layer computes: all of that is the engine's."""
