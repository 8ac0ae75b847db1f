"""Configs of other trainers as configs of this workflow: a tool, run by `scripts/import_config.py`.

`reading` detects the trainer, and reads the file; `rules` and `datasets` translate it into a
`Draft`, which accounts for each key. `workflow/resources/trainers/` has a table per trainer, with
names of keys and reasons why keys are not needed. Our own settings are described by their models
alone."""
