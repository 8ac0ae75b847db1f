"""Rounds: prompts of a run's rows, answers sampled to them, their rewards, and the tokens made of
both. Begin with `answers`, the artifact; `prompts` and `generation` fill it, `reward_processes`
reads it, `packing` makes the tokens folder. No stage of a training is here: a round trains as every
run does."""
