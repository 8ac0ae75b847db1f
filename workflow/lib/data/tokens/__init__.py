"""Documents on disk: shards of encoded rows, splits, repeated rows, packing, the tokens folder.

Begin with `corpus` (rows to documents on all cores), `splits`, `packing` and `token_store`
(`TokenStore`: the folder that training and evaluation read by memory map). It imports `reading` and
`encoding`. All draws are functions of a seed."""
