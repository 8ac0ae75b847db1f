"""FSDP-QLoRA fine-tuning as a Snakemake workflow: `lib` holds how, `scripts` in what order, `rules`
what depends on what.
"""
