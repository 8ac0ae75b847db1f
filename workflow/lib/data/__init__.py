"""From a user's rows to packed tokens: `reading`, then `encoding`, then `tokens`.

`reading` opens files of any type and gives rows. `encoding` turns a row into token ids and a loss
mask. `tokens` stores documents, splits and packs them, and writes the result. Each imports those
before it, `system` and `settings`. Of `model` they read a tokenizer's folder alone."""
