"""Bytes of a training step in each process, from recordings of the engine (`lib/recording`).

`recorded_peaks` draws lines between a few of them, for the search of plans. `replay` runs one (an
`allocation_tape`) through a model of PyTorch's allocator. It imports `model.architecture`, and no
torch."""
