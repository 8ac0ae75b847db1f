"""A model's scores of exact tokens: the log-probability of each trained token, and a teacher's
likeliest tokens.

Begin with `store` (reading, and writing of shards that survive a kill). `scoring` makes rows of
tokens and runs a whole model, `streamed_model` one layer by layer. It loads no model itself: stages
pass one."""
