"""The same questions to base, tuned and merged model, and what the answers say.

Begin with `questions` (`measure`) and `results`. A part that was measured is kept by its key
(`measurement_cache`). It imports `export`, `distributed`, `model` and `data.tokens`."""
