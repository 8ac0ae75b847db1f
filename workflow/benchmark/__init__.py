"""Speed and memory of the training engine on this machine, beside its peers: a tool beside the
workflow, which no rule runs.

Begin with `cases` and `measure`; `record` is a line of the results. It imports the library, which
does not import it."""
