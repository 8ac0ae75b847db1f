"""The library: a package per concern, described in its docstring.

Imports go one way, in the order of the table in `workflow/docs/architecture.md`; `pyproject.toml`
states it as contracts of import-linter, and `make lint` checks them. Nothing here reads a command
line, ends the process or knows Snakemake."""
