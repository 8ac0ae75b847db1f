"""What a model says of exact tokens: the log-probability of each trained token, and a teacher's
likeliest tokens beside it.

Begin with `store` (reading) and `writer` (shards that outlive a kill). `scoring` makes rows of
tokens and scores of logits; `whole_model` and `streamed_model` run the model. It loads no model
itself: stages hand one in."""
