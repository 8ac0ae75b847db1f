"""Grouped matmuls of a mixture: each row with the weights of its expert. Begin with `Routing` in
`grouped_matmul`."""
