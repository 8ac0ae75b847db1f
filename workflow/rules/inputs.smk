# Inputs and params of single stages; `common.smk` has the shared ones.


def only(condition, files):
    """Return the input function for files that some runs' jobs read: a path, or a function of the run."""
    return from_run(
        lambda run: [] if not condition(run) else files(run) if callable(files) else files
    )


def several_nodes(value):
    """Return the function for a resource of runs on several nodes; None, which omits it, for others."""
    return from_run(lambda run: value(run) if run.hardware.nodes > 1 else None)


def checkpoint_folder(wildcards, input):
    """Return the folder of a run's checkpoints, named by its settings and the content of the inputs that decide its adapter."""
    name, run = wildcards.run, run_of(wildcards)
    # The error of a missing input makes Snakemake ask again later.
    scores = [with_prefix(folder) for folder in scores_folder(wildcards)]
    for path in (input.tokens, input.base, *input.start, *scores):
        Path(path).stat()
    folder = with_prefix(layout.checkpoint_dir(name, run))
    start = layout.start_adapter(run)
    content = trained_content(
        Path(input.tokens),
        Path(input.base),
        start=start and Path(made_or_own(start)),
        scores=Path(*scores) if scores else None,
        chooses_by_heldout=run.train.chooses_by_heldout,
    )
    return f"{folder}-{content}"


def measured_text(run):
    """Return the text on which sensitivities are measured too, if one is named."""
    return optional_input(run.quantize.calibration_text)


def sensitivities(run):
    """Return what decides a run's kept linears, with quantize.keep: auto."""
    decides = run.quantize.measures and run.start is None
    return [layout.sensitivity_path(run)] if decides else []


def base_of_start(run):
    """Return the base of a run that starts from another, which has decided its kept linears."""
    follows = run.quantize.measures and run.start is not None
    return [layout.base_dir(run)] if follows else []


def bit_decision(wildcards):
    """Return the prediction that decides a base's kept linears, with quantize.keep: auto."""
    names = BITS_DECIDED_BY.get(wildcards.base, [])
    return of_runs("preflight_run", "preflight.json", names=names)


def start_files(run):
    """Return the files of a run's start adapter as inputs."""
    return inputs_in(layout.start_adapter(run), layout.start_files(run))


def scores_folder(wildcards):
    """Return the folder of the scores of a run's training, if it reads any."""
    name = wildcards.run
    return [SCORED[name].scores] if name in SCORED else []


def reward_files(run):
    """Return the users' files of reward functions as inputs."""
    return sorted({f.file for f in run.rewards.functions.values() if f.file is not None})


def plan_settings(wildcards, input):
    """Return the files with all settings of `preflight_run`, for the plan of this start."""
    parts = layout.stage_settings, layout.free_settings
    return [
        with_prefix(
            settings_file("preflight_run", wildcards, part("preflight_run", run_of(wildcards)))
        )
        for part in parts
    ]


def srun(wildcards, threads):
    """Return the command prefix that starts once on every node of a Slurm job; empty on a single one."""
    nodes = run_of(wildcards).hardware.nodes
    if nodes == 1:
        return []
    tasks = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    return ["srun", *tasks, f"--cpus-per-task={threads}", "--kill-on-bad-exit=1"]


def reported_settings(_):
    """Return the settings of the report, and where it finds each run."""
    folders = [
        {
            "folder": with_prefix(str(layout.RESULTS / "runs" / name)),
            "tokens": with_prefix(layout.tokens_dir(run)),
            "exports": [form for form in EXPORTS if name in EXPORTING[form]],
            "served": name in SERVED,
            **sampled_files(name),
            "last_round": last_round(name),
        }
        for name, run in RUNS.items()
    ]
    return layout.report_settings(REPORT, RUNS) | {"folders": folders}


def sampled_files(name):
    """Return where the report finds a run's sampled answers and rewards, if it has any: its own, after its training, and
    of the first round."""
    if name not in NEXT_ROUNDS:
        return {}
    run, after = RUNS[name], NEXT_ROUNDS[name]
    files = [layout.rewards_file(run), layout.rewards_file(after), *layout.first_rewards(after)]
    return {
        "answers": with_prefix(layout.answers_dir(run)),
        "rewards": [with_prefix(file) for file in files],
    }


def last_round(name):
    """Whether no later round starts from a run."""
    return name not in NEXT_ROUNDS or not NEXT_ROUNDS[name].answers.prompts_per_round


def published_files(wildcards):
    """Return a run's published files as inputs."""
    name, form = wildcards.run, run_of(wildcards).export.hub_form
    if form == "adapter":
        return of_runs("consolidate", *[f"adapter/{file}" for file in ADAPTER_FILES], names=[name])
    return [layout.folder_of_form(name, form)]


def is_named(target):
    """Whether the command line names this target, also within a module's prefix."""
    return any(re.fullmatch(rf"\w*{target}", word) for word in sys.argv)


# Here, since Snakemake shows a traceback for errors of a rule's functions.
if workflow.is_main_process:
    if is_named("publish") and not any(run.export.hub_repo for run in RUNS.values()):
        raise WorkflowError(
            "export.hub_repo names no repository, so there is nothing to publish. Set it to owner/name."
        )


# Required gains, by run.
REQUIRED = {
    name: judged.model_dump(mode="json", include={"require", "require_by"}) | sampled_files(name)
    for name, run in RUNS.items()
    if (judged := run.evaluate.judged(last_round=last_round(name))).require
}


def requirements(_=None):
    """Return the proof of required gains, if there are any."""
    return rules.require_gain.output if REQUIRED else []
