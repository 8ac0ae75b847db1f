# Inputs, outputs and options of single stages; `common.smk` has the shared ones.


def checkpoint_folder(wildcards, input):
    """Return the folder of a run's checkpoints, named by its settings and the content of the inputs that decide its adapter."""
    name = wildcards.run
    # The error of a missing input makes Snakemake ask again later.
    scores = [placed(folder) for folder in scores_folder(name)]
    for path in (input.tokens, input.base, *input.start, *scores):
        Path(path).stat()
    folder = placed(layout.checkpoint_dir(name, RUNS[name]))
    start = layout.start_adapter(RUNS[name])
    content = trained_content(
        Path(input.tokens),
        Path(input.base),
        start=start and Path(located(start)),
        scores=Path(*scores) if scores else None,
        chooses_by_heldout=RUNS[name].train.chooses_by_heldout,
    )
    return f"{folder}-{content}"


def start_options(run):
    """Return the options of a stage for a run's start adapter, and for its ancestors."""
    folder, led = layout.start_adapter(run), json.dumps(layout.lineage(run))
    return ["--start", located(folder), "--lineage", led] if folder else []


def start_files(run):
    """Return the files of a run's start adapter as inputs."""
    return inputs_in(layout.start_adapter(run), layout.start_files(run))


def data_files(run):
    """Return the raw data as inputs: the user's files, or the download's folder."""
    return inputs_in(layout.dataset_dir(run), layout.data_files(run))


def scored_files(name):
    """Return the files of the model that scores a run's tokens as inputs."""
    return inputs_in(SCORED[name].model, SCORED[name].files)


def is_kept(wildcards):
    """Whether the checkpoint of a step is kept for its export."""
    return int(wildcards.step) in RUNS[wildcards.run].export.steps


def step_adapters(name):
    """Return the folders of a run's adapters of single steps."""
    return [f"{layout.stage_dir(name, 'export_step')}/{step}" for step in RUNS[name].export.steps]


def scores_folder(name):
    """Return the folder of the scores of a run's training, if it reads any."""
    return [SCORED[name].scores] if name in SCORED else []


def several_nodes(run, value):
    """Return a resource of runs on several nodes; None, which omits it, for others."""
    return value if run.hardware.nodes > 1 else None


def on_each_node(run, threads):
    """Return the command prefix that starts once on every node of a Slurm job; empty on a single one."""
    nodes = run.hardware.nodes
    if nodes == 1:
        return []
    tasks = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    return ["srun", *tasks, f"--cpus-per-task={threads}", "--kill-on-bad-exit=1"]


SERVER_OPTIONS = {"vllm": "--python", "llama_cpp": "--gguf"}


def server(name):
    """Return the input of a run's server: vLLM's Python, or the GGUF files."""
    gguf = layout.folder_of_form(name, "gguf")
    return {"vllm": layout.SERVING, "llama_cpp": gguf}[RUNS[name].export.serve]


def served_check(name):
    """Return the check of a run's exported files in a server, if there is one."""
    return f"{layout.stage_dir(name, 'check_served')}/served.json" if name in SERVED else []


def evaluated_scores(name):
    """Return the scores of a run's reference or teacher as input, if the evaluation measures its objective's loss."""
    return SCORED[name].scores if name in SCORED and RUNS[name].evaluate.heldout else []


def evaluated_options(run, input):
    """Return the options of the evaluation for the models and the scores, if they are inputs."""
    return [*form_options(run, input), *(["--scores", input.scores] if input.scores else [])]


def task_files(run):
    """Return task files as inputs."""
    folder = run.evaluate.tasks_dir
    return inputs_in(folder, layout.local_files(folder, layout.TASK_PATTERNS)) if folder else []


def published_files(name):
    """Return a run's published files as inputs."""
    form, folder = RUNS[name].export.hub_form, layout.stage_dir(name, "consolidate")
    if form == "adapter":
        return [f"{folder}/adapter/{file}" for file in ADAPTER_FILES]
    return [layout.folder_of_form(name, form)]


def published_folder(name, files):
    """Return a run's published folder, from a job's `published_files`."""
    adapter = RUNS[name].export.hub_form == "adapter"
    return subpath(files[0], parent=True) if adapter else files[0]


def publications():
    """Return the records of publication, of runs that name a repository."""
    named = [name for name, run in RUNS.items() if run.export.hub_repo]
    return [f"{layout.stage_dir(name, 'publish_run')}/published.json" for name in named]


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
    name: run.evaluate.model_dump(mode="json", include={"require", "require_by"})
    for name, run in RUNS.items()
    if run.evaluate.require
}


def requirements():
    """Return the proof of required gains, if there are any."""
    return rules.require_gain.output if REQUIRED else []
