"""Tools that write configs: from those of other trainers (`scripts/import_config.py`), and by the
`guide` for a model and a file (`scripts/new_config.py`).

`reading` detects the trainer, and reads the file; `rules` and `datasets` translate it into a
`Draft`, which accounts for each key. `workflow/resources/trainers/` has a table per trainer, with
names of keys and reasons why keys are not needed. Our own settings are described by their models
alone."""
