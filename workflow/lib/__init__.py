"""How the workflow does what it does: a package per concern, described in its docstring.

Imports go one way, in this order: `system`, `settings`, `model`, `data`, `artifacts`, `planning`,
`distributed`, `training`, `export`, `evaluation`, `report`, `benchmark`. A package imports those
before it, never those after it; `pyproject.toml` states this as contracts of import-linter, and
`make lint` checks them. Nothing here reads a command line, ends the process or knows Snakemake.
"""
