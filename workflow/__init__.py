"""FSDP-QLoRA fine-tuning as a Snakemake workflow: `lib` holds how, `scripts` in what order, `rules`
what depends on what.
"""

VERSION = "0.1.0"  # of the release; pyproject.toml, CITATION.cff and CHANGELOG.md name it too
