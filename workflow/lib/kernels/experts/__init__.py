"""Grouped matmuls of a mixture: each row with the weights of the expert that it goes to. Begin with
`routing`, then `grouped_matmul`."""
