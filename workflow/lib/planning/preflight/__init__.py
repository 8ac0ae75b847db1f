"""The verdict before anything expensive starts: does it fit, by which plan, and if not, what would.

Begin with `decision` (`decide`) and `plan_search`. `checks` comes before them, `forecast` makes
`preflight.json` of what they say, `table` shows it. `cluster_request` says what a job asks a
cluster for; `what_if` answers for models and GPUs that are not at hand.
It imports `planning.memory` and `planning.timing`, and no torch."""
