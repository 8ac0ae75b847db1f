"""Speed and memory of the training engine on this machine, beside its peers.

Begin with `cases` and `measure`; `page` renders the results. It imports all packages but
`evaluation` and `export`; none imports it."""
