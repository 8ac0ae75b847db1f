"""The same questions to base, tuned and merged model, and statistics of their answers.

Begin with `questions` (`measure`, and `Archive`: measured parts by their keys) and `results`. It
imports `export`, `distributed`, `model` and `data.tokens`."""
