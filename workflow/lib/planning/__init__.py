"""Whether a run fits, how fast it is, and the fastest plan that fits; without torch.

`memory` counts bytes, `timing` counts seconds, `preflight` searches plans and gives the verdict,
for a `machine` and `token_counts`. It imports `settings`, `model.architecture` and `artifacts`."""
