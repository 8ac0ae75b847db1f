"""Configs of other trainers as configs of this workflow: a tool, run by `scripts/import_config.py`.

`reading` finds out whose file it is, and reads it; `rules` and `datasets` translate it into a
`Draft`, which keeps account of each key. What a key is called, and why one is not needed, stands in
`workflow/resources/trainers/`, a table a trainer. Our own settings are described by their models
alone."""
