"""Where every artifact lies, by which key, and which records it holds.

Begin with `layout` (folders, keys, and what each stage reads) and `records` (the JSON files, as
types). It imports `settings`, `data.reading` and `system`, and no torch."""
