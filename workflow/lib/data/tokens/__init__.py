"""Documents on disk: shards of encoded rows, splits, repeated rows, packing, the tokens folder.

Begin with `corpus` (rows to documents on all cores), `splits`, `packing` and `token_store`
(`TokenStore`: the folder that training and evaluation read by memory map).
It imports `reading` and `encoding`. It draws nothing that is not a function of a seed."""
