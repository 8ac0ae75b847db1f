import importlib.util
import json
import os
import re
import sys
import time
from functools import partial
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger
from snakemake.settings.types import DeploymentMethod
from snakemake.utils import update_config

# A Snakefile from a git host comes without the folders beside it.
if not all(importlib.util.find_spec(name) for name in ("workflow", "workflow.lib")):
    raise WorkflowError(
        "The Snakefile is not in a checkout, and the library that its stages run is not installed. Install it as of the "
        "same tag or commit: pip install 'fsdp-qlora-workflow @ git+https://github.com/OWNER/NAME@TAG_OR_COMMIT'"
    )

from workflow.lib.artifacts import layout
from workflow.lib.artifacts.checkpoint_folder import begin_anew
from workflow.lib.artifacts.closing_lines import closing_lines
from workflow.lib.artifacts.local_inputs import check_local_paths, check_prefix
from workflow.lib.artifacts.scored_models import made_folders, scored_models
from workflow.lib.artifacts.stage_logs import ERRORS_FROM_LOG, FailedJobs, from_the_future
from workflow.lib.artifacts.starts import with_starts
from workflow.lib.artifacts.trained_content import check_records, trained_content
from workflow.lib.evaluation.task_files import refuse_code
from workflow.lib.checkpoints.files.model_files import (
    MODEL_PATTERNS,
    TOKENIZER_PATTERNS,
)
from workflow.lib.planning.machine import check_place, requested_processes
from workflow.lib.planning.preflight import cluster_request
from workflow.lib.planning.preflight.checks import check_model
from workflow.lib.recording.recording_process import plan_recorder
from workflow.lib.settings.command_line import as_in_yaml, check_options, is_dry_run
from workflow.lib.settings.config import (
    check_sources,
    ineffective_settings,
    load_config,
)
from workflow.lib.settings.forms import EXPORTS, FORMS, TRAINED
from workflow.lib.settings.overrides import overridden
from workflow.lib.settings.yaml_files import check_yaml
from workflow.lib.system import interrupts
from workflow.lib.system.environment import SOURCES, use_this_interpreter
from workflow.lib.system.errors import UserError
from workflow.lib.system.hardware import (
    check_processes_can_work,
    check_writable,
    visible_gpus,
)

# Not `workflow.basedir`: it belongs to the Snakefile that imports this one as a module.
use_this_interpreter(SOURCES)

# Adds a module's `prefix` to a path of `layout`, or logs. Snakemake adds it to inputs and outputs, not to params.
placed = workflow.modifier.path_modifier.replace_prefix

if workflow.is_main_process:
    interrupts.end_at_signals()

# Before Snakemake reads them, if possible: its message names no file, and it accepts repeated keys.
try:
    if workflow.is_main_process:
        check_options(sys.argv)
    given = as_in_yaml(workflow.config_settings.config)
    for file in workflow.overwrite_configfiles or [Path("config.yaml")]:
        if file.exists():
            check_yaml(file)
except UserError as error:
    raise WorkflowError(str(error)) from None


# Another file named by --configfile takes its place.
if not workflow.overwrite_configfiles:

    configfile: "config.yaml"


def shipped(settings):
    """Return settings with full paths of the workflow's own files, as the demo's; a user's file takes precedence."""
    if isinstance(settings, dict):
        return {key: shipped(value) for key, value in settings.items()}
    if isinstance(settings, list):
        return [shipped(value) for value in settings]
    is_shipped = str(settings).startswith("workflow/resources/") and not Path(settings).exists()
    return str(SOURCES / settings) if is_shipped else settings


if workflow.modifier.namespace:
    config |= shipped(config)

config = overridden(config, given)

STARTED = time.time()
FAILED_JOBS = FailedJobs(Path(placed("logs")), since=STARTED)


def located(path):
    """Return the path of a folder or file; one that the workflow makes has a module's prefix."""
    return placed(path) if path in MADE else path


def users(path):
    """Return a user's file as input; empty if none is named."""
    return local(path) if path else []


def inputs_in(folder, files):
    """Return files of a folder as inputs: a user's, or those that the workflow makes."""
    return files if folder in MADE else [local(file) for file in files]


def description_of(config_json):
    """Return the shape of a config.json's model."""
    # Loading torch takes seconds.
    from workflow.lib.model.describe_model import describe_file

    return describe_file(config_json)


# Here, since Snakemake shows a traceback for errors of a rule's functions.
try:
    check_prefix(placed(""))
    if workflow.is_main_process:
        check_writable([Path(".snakemake"), Path(placed("logs")), Path(placed("results"))])
    origins = [*workflow.configfiles, *(["--config"] if given else [])]
    REPORT, RUNS = load_config(config, origin=", ".join(map(str, origins)))
    check_sources(RUNS)
    if workflow.is_main_process and (ineffective := ineffective_settings(config)):
        print(
            f"Without effect above runs:, since every run sets its own: {', '.join(ineffective)}.",
            file=sys.stderr,
        )
    for name, settings in RUNS.items():
        check_local_paths(name, settings)
    RUNS = with_starts(RUNS, placed)
    SCORED = scored_models(RUNS)
    MADE = made_folders(RUNS, SCORED)
    for name, settings in RUNS.items():
        check_model(
            name,
            settings,
            folder=Path(located(layout.model_dir(settings))),
            description=Path(placed(layout.description(settings))),
            describe=description_of if is_dry_run(sys.argv) else None,
        )
        check_records(*(Path(placed(of(settings))) for of in (layout.tokens_dir, layout.base_dir)))
        tested = settings.evaluate
        if tested.tasks and tested.tasks_dir and not tested.task_code:
            refuse_code(tested.tasks_dir)
except UserError as error:
    raise WorkflowError(str(error)) from None

if any(word.startswith("--generate-unit-tests") for word in sys.argv):
    for name in RUNS:
        trained = Path(placed(layout.stage_dir(name, "finetune")))
        if not trained.exists():
            raise WorkflowError(
                f"--generate-unit-tests copies what a run has made, and {trained} is not made yet. "
                "Run the workflow first: snakemake --cores all"
            )

# One representative run of each shared artifact, by the artifact's folder name; of tokens the one that
# allows the fewest rejected rows.
STRICTEST_LAST = sorted(RUNS.values(), key=lambda run: -run.data.max_rejected_share)
BY_TOKENS = {Path(layout.tokens_dir(run)).name: run for run in STRICTEST_LAST}
BY_BASE = {Path(layout.base_dir(run)).name: run for run in RUNS.values()}
BY_SCORES = {Path(model.scores).name: name for name, model in SCORED.items()}
BY_MODEL = {Path(layout.description(run)).parent.name: run for run in RUNS.values()}
# The runs that export a form.
EXPORTING = {
    form: [name for name, run in RUNS.items() if form in run.export.exported] for form in EXPORTS
}
SERVED = [name for name, run in RUNS.items() if run.export.serve != "none"]

# Priority of downloads, tokens and preflight of all runs, before anything expensive: a run that cannot work
# stops within minutes.
FIRST = 10


def container_image():
    """Return the image of `--sdm apptainer`, built by envs/apptainer.def; None without an image.

    Snakemake reads wildcards in its path and puts it unquoted into shell commands, so the path is relative to the working
    directory: in the checkout itself it is plain, for any name of the folder above.
    """
    if DeploymentMethod.APPTAINER not in workflow.deployment_settings.deployment_method:
        return None
    image = os.path.relpath(SOURCES / "envs" / "workflow.sif")
    if re.search(r"[^\w./-]", image):
        raise WorkflowError(
            f"--sdm apptainer: Snakemake takes no image below {image!r}, whose name has other characters than "
            "letters, digits, '.', '_' and '-'. Run in the folder of the Snakefile, or rename its folder."
        )
    return image


def any_of(names):
    """Return a pattern of these names; without names it matches nothing."""
    return "|".join(map(re.escape, names)) or "(?!)"


wildcard_constraints:
    run=any_of(RUNS),
    tokens=any_of(BY_TOKENS),
    base=any_of(BY_BASE),
    scores=any_of(BY_SCORES),
    model=any_of(BY_MODEL),
    kind="model|dataset|adapter|scored",


def model_files(run, patterns=MODEL_PATTERNS):
    """Return the base model's files as inputs: the user's own, or the folder made of them."""
    folder = layout.model_dir(run)
    return inputs_in(folder, layout.local_files(folder, patterns))


def source_files(run):
    """Return the same of the model in the settings, without added tokens."""
    folder = layout.source_dir(run)
    return inputs_in(folder, layout.local_files(folder, MODEL_PATTERNS))


def manifest(run):
    return f"{layout.tokens_dir(run)}/manifest.json"


def of_runs(stage, *files, names):
    """Return artifacts of a stage, for these runs."""
    return [f"{layout.stage_dir(name, stage)}/{file}" for name in names for file in files]


def exported(name, form):
    """Return the folder of a form as input, if the run exports it."""
    return layout.folder_of_form(name, form) if name in EXPORTING[form] else []


def form_inputs(name, forms):
    """Return the inputs of a job on forms of a run's model, by folder, beside base and adapter."""
    parts = {part for form in forms for part in FORMS[form].parts} - {"base", "adapter"}
    files = {"model": model_files, "start": start_files}
    return {
        part: files[part](RUNS[name]) if part in files else layout.folder_of_form(name, part)
        for part in sorted(parts)
    }


def form_options(run, input):
    """Return the options of a stage for the folders of `form_inputs`."""
    folders = {form: input.get(form) for form in EXPORTS} | {
        "model": located(layout.model_dir(run)) if input.get("model") else None,
        "start": located(layout.start_adapter(run)) if input.get("start") else None,
    }
    return [part for name, path in folders.items() if path for part in (f"--{name}", path)]


def evaluations():
    return [layout.stage_dir(name, "evaluate_run") for name in RUNS]


def checks(folder_of, folder):
    """Return the settings of all runs with this folder, with which the first stages compare the model."""
    runs = {name: run for name, run in RUNS.items() if folder_of(run) == folder}
    return layout.checks_json(runs, trains_here=on_this_machine())


def on_this_machine():
    """Whether jobs run here: neither sent to a cluster nor within one. Unknown while parsing."""
    return workflow.local_exec and not workflow.remote_exec


def gpus(run):
    """Return a run's number of GPUs on a node."""
    device, count = requested_processes(run.hardware)
    return count if device == "cuda" else 0


def cards(run, *, most=None):
    """Return the resource `gpu` of a job on one node; None, which omits it, without GPUs."""
    return min(gpus(run), most or gpus(run)) or None


# For a cluster's node with an unknown number of cores; `--set-threads` changes it.
CORES_PER_GPU, CORES_OF_PREPARATION = 2, 4


def all_cores(_):
    """Return the threads of preparing stages."""
    return workflow.cores if workflow.local_exec else CORES_OF_PREPARATION


def cores(run, *, most=None):
    """Return a job's cores: this machine's in proportion to its GPUs, or without GPUs all, so that jobs take turns.

    On a cluster a core per process, two per GPU: one launches kernels, one makes batches, checkpoints and heartbeats.
    """
    count = cards(run, most=most)
    if not on_this_machine():
        return count * CORES_PER_GPU if count else run.hardware.cpu_processes
    if not count:
        return workflow.cores
    return max(count, workflow.cores * count // max(count, len(visible_gpus())))


# Needs of jobs that train, and of jobs that read the trained model.
TRAINING, READING = (
    partial(need, recorder=plan_recorder)
    for need in (cluster_request.training, cluster_request.reading)
)


def requested(name, need, run_of=lambda wildcards: RUNS[wildcards.run]):
    """Return a job's `mem_mb` (more at every attempt) or `runtime` on a cluster; none on a single machine."""

    def asked(wildcards, input, attempt):
        if workflow.local_exec or workflow.remote_exec:
            return None if name == "runtime" else 0
        for path in input:
            # The error of a missing input makes Snakemake ask again later.
            Path(path).stat()
        run = run_of(wildcards)
        found = need(
            run,
            model=located(layout.model_dir(run)),
            description=placed(layout.description(run)),
            manifest=placed(manifest(run)),
        )
        return found.runtime if name == "runtime" else found.mem_mb * (1 + attempt) // 2

    return asked


def forced_trainings():
    """Return the names of the runs whose training the command line forces (`--forcerun`, `--force`, `--forceall`)."""
    if workflow.touch or not workflow.is_main_process:
        return []
    jobs = [
        job
        for job in workflow.dag.needrun_jobs()
        if re.fullmatch(r"(\w*_)?finetune", job.rule.name)
    ]
    return [job.wildcards.run for job in jobs if workflow.dag.reason(job).forced]


onstart:
    # Again: Snakemake has set its own handler since.
    interrupts.end_with_jobs(jobs_run_here=workflow.local_exec)
    os.environ[ERRORS_FROM_LOG] = "1"
    for handler in logger.handlers:
        if handler.name == "DefaultStreamHandler":
            handler.addFilter(FAILED_JOBS)
    try:
        for name, run in RUNS.items():
            check_place(
                name,
                run.hardware,
                here=on_this_machine(),
                elsewhere=workflow.non_local_exec,
            )
        if on_this_machine():
            check_processes_can_work()
        for name in forced_trainings():
            folder = Path(placed(layout.checkpoint_dir(name, RUNS[name])))
            for line in begin_anew(folder.parent.glob(f"{folder.name}-*")):
                print(line, file=sys.stderr)
    except UserError as error:
        raise WorkflowError(str(error)) from None
    # Snakemake counts GPUs only against a limit: the cards of this machine. A lease assigns them to a job.
    if on_this_machine() and visible_gpus():
        if "gpu" not in workflow.global_resources:
            workflow.register_resource("gpu", len(visible_gpus()))


onsuccess:
    for name, run in RUNS.items():
        lines = closing_lines(Path(placed("results")), name, served=run.served, since=STARTED)
        print("\n".join(lines), file=sys.stderr, end="\n" if lines else "")


onerror:
    FAILED_JOBS.show()
    used = {
        located(path)
        for run in RUNS.values()
        for path in (*model_files(run), *layout.data_files(run))
    }
    skew = from_the_future(map(Path, [*sorted(used), placed("results")]))
    if skew is not None:
        print(skew, file=sys.stderr)
