# The workflow, for commands in this folder: Snakemake looks for the file here too.
include: "workflow/Snakefile"


localrules:
    default,


# What `snakemake` without a target makes: of an included file Snakemake takes no default target.
rule default:
    default_target: True
    input:
        rules.all.input,
