"""The verdict before anything expensive starts: whether it fits, by which plan, or what would fit.

Begin with `decision` (`decide`) and `plan_search`. `checks` comes before them, `forecast` makes
`preflight.json` of their result, `table` shows it. `cluster_request` has a job's resources on a
cluster; `what_if` answers for models and GPUs that are not available. It imports `planning.memory`
and `planning.timing`, and no torch."""
