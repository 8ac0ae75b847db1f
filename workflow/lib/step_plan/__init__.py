"""How a step of training runs, described once and without torch.

Begin with `plan.StepPlan`. Settings make it (`planning.preflight.planning_inputs`),
`preflight.json` holds it, `training.build` follows it, `recording` builds from it, and the time
model counts it. Nothing here knows how much memory or time a plan takes."""
