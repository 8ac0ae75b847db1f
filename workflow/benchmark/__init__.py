"""Speed and memory of the training engine on this machine, and of its peers: a tool without a rule.

Begin with `cases` and `measure`; `record` is a line of the results. It imports the library, which
does not import it."""
