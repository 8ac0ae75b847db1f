"""The GPU kernels in Triton. Its language is not Python's: no type checker reads this package, and
it is imported only where Triton is installed (`kernel_launch`)."""
