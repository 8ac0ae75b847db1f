"""Objectives of a step: a loss from the log-probabilities of trained tokens.

Begin with `objective`, the interface and the first ones. The output head gives log-probabilities;
an objective computes the loss from them, and the divisor of a step's loss. `pairs` has those on
preferences, and `from_settings` the table of all. Models, data and the steps import objectives, not
the other way round."""
