"""How: functions and types that take the values they need. Nothing here parses arguments, exits or knows Snakemake."""
