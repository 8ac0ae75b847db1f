"""FSDP-QLoRA fine-tuning as a Snakemake workflow: the code in `lib`, its order in `scripts`,
dependencies in `rules`."""

VERSION = "0.2.0"  # of the release; pyproject.toml, CITATION.cff and CHANGELOG.md name it too
