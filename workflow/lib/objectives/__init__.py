"""What a step trains: a loss from the log-probabilities of trained tokens.

Begin with `objective`: the seam. The output head gives log-probabilities, an objective makes the
loss of them and says what the loss of a step is divided by; `next_token` is the first, `pairs` what
objectives on preferences share, and `from_settings` the table of all. Models, data and the steps
know objectives, not the other way round."""
