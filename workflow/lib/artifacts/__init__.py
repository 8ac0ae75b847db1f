"""Paths of all artifacts, their keys, and their records.

Begin with `layout` (folders, keys, and each stage's inputs) and `records` (the JSON files, as
types). It imports `settings`, `data.reading` and `system`, and no torch."""
