import importlib.util
import json
import os
import re
import sys
import time
from functools import partial
from operator import attrgetter
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger
from snakemake.settings.types import DeploymentMethod

# Snakemake has put the folder of this file first. A Snakefile from a git host comes without the folders beside it.
sys.path[:0] = map(str, Path(sys.path[0]).parents[1:2])
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
from workflow.lib.artifacts.stage_logs import (
    ERRORS_FROM_LOG,
    FailedJobs,
    ShortJobs,
    from_the_future,
)
from workflow.lib.artifacts.starts import with_starts
from workflow.lib.artifacts.trained_content import check_records, trained_content
from workflow.lib.evaluation.task_files import refuse_code
from workflow.lib.checkpoints.files.model_files import MODEL_PATTERNS, TOKENIZER_PATTERNS
from workflow.lib.planning.machine import check_place, requested_processes
from workflow.lib.planning.preflight import cluster_request
from workflow.lib.planning.preflight.checks import check_model
from workflow.lib.recording.recording_process import plan_recorder
from workflow.lib.settings.yaml_files import as_in_yaml, check_options, check_yaml, is_dry_run
from workflow.lib.settings.config import check_sources, ineffective_settings, load_config
from workflow.lib.settings.forms import CONVERTED, EXPORTS, FORMS, TRAINED
from workflow.lib.settings.overrides import overridden
from workflow.lib.system import interrupts
from workflow.lib.system.environment import SOURCES, use_this_interpreter
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import canonical_json, write_checked_json
from workflow.lib.system.hardware import check_processes_can_work, check_writable, visible_gpus

# Not `workflow.basedir`: it belongs to the Snakefile that imports this one as a module.
use_this_interpreter(SOURCES)

# Adds a module's `prefix` to a path of `layout`, or logs. Snakemake adds it to inputs and outputs, not to params.
with_prefix = workflow.modifier.path_modifier.replace_prefix

if workflow.is_main_process:
    interrupts.end_at_signals()

# Before Snakemake reads them, if possible: its message names no file, and it accepts repeated keys.
try:
    if workflow.is_main_process:
        check_options(sys.argv)
    command_line = as_in_yaml(workflow.config_settings.config)
    # Files named by --configfile take the place of this one, of which the second name is usual for workflows.
    USUAL = "config.yaml" if Path("config.yaml").exists() else "config/config.yaml"
    CONFIG_FILES = [
        file for file in workflow.overwrite_configfiles or [Path(USUAL)] if file.exists()
    ]
    for file in CONFIG_FILES:
        check_yaml(file)
except UserError as error:
    raise WorkflowError(str(error)) from None


if Path(USUAL) in CONFIG_FILES:

    configfile: USUAL


def shipped(settings):
    """Return settings with full paths of the workflow's own files, as the demo's; a user's file takes precedence."""
    if isinstance(settings, dict):
        return {key: shipped(value) for key, value in settings.items()}
    if isinstance(settings, list):
        return [shipped(value) for value in settings]
    is_shipped = str(settings).startswith("workflow/resources/") and not Path(settings).exists()
    return str(SOURCES / settings) if is_shipped else settings


config = overridden(shipped(config), command_line)

STARTED = time.time()


def end_preparation():
    """End stages beside which a run was refused, unless Snakemake is to keep going; return whether there are some."""
    preparing = ("tokenize_dataset", "quantize_base")
    return not workflow.execution_settings.keep_going and interrupts.end_stages(preparing)


FAILED_JOBS = FailedJobs(
    Path(with_prefix("logs")),
    since=STARTED,
    is_interrupted=interrupts.is_ending,
    end_others=end_preparation,
)


def made_or_own(path):
    """Return the path of a folder or file; one that the workflow makes has a module's prefix."""
    return with_prefix(path) if path in MADE else path


def optional_input(path):
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
    check_prefix(with_prefix(""))
    if workflow.is_main_process:
        check_writable(
            [Path(".snakemake"), Path(with_prefix("logs")), Path(with_prefix("results"))]
        )
    origins = [*CONFIG_FILES, *(["--config"] if command_line else [])]
    REPORT, RUNS = load_config(config, origin=", ".join(map(str, origins)))
    check_sources(RUNS)
    if workflow.is_main_process and (ineffective := ineffective_settings(config)):
        print(
            f"Without effect above runs:, since every run sets its own: {', '.join(ineffective)}.",
            file=sys.stderr,
        )
    for name, run in RUNS.items():
        check_local_paths(name, run)
    RUNS = with_starts(RUNS, with_prefix)
    SCORED = scored_models(RUNS)
    MADE = made_folders(RUNS, SCORED)
    for name, run in RUNS.items():
        check_model(
            name,
            run,
            folder=Path(made_or_own(layout.model_dir(run))),
            description=Path(with_prefix(layout.description(run))),
            describe=description_of if is_dry_run(sys.argv) else None,
        )
        check_records(
            *(Path(with_prefix(folder(run))) for folder in (layout.tokens_dir, layout.base_dir))
        )
        tested = run.evaluate
        if tested.tasks and tested.tasks_dir and not tested.task_code:
            refuse_code(tested.tasks_dir)
except UserError as error:
    raise WorkflowError(str(error)) from None

if any(word.startswith("--generate-unit-tests") for word in sys.argv):
    for name in RUNS:
        trained = Path(with_prefix(layout.stage_dir(name, "finetune")))
        if not trained.exists():
            raise WorkflowError(
                f"--generate-unit-tests copies what a run has made, and {trained} is not made yet. "
                "Run the workflow first: snakemake --cores all"
            )

# One representative run of each shared artifact, by the artifact's folder name; of tokens the one that
# allows the fewest rejected rows.
STRICTEST_LAST = sorted(RUNS.values(), key=lambda run: -run.data.max_rejected_share)
SAMPLING = [run for run in RUNS.values() if run.samples]
# Of each of these, the next round; after the last one, of answers to the held-out prompts alone.
NEXT_ROUNDS = layout.next_rounds(RUNS)
ANSWERED = [*SAMPLING, *NEXT_ROUNDS.values()]
SCORES = {Path(model.scores).name: model for model in SCORED.values()}
# Runs by the wildcard that names their artifact.
RUNS_OF = {
    "run": RUNS,
    "tokens": {Path(layout.rows_dir(run)).name: run for run in STRICTEST_LAST},
    # Of runs that train on sampled answers.
    "answers": {Path(layout.answers_dir(run)).name: run for run in ANSWERED},
    "rewards": {Path(layout.rewards_file(run)).parent.name: run for run in ANSWERED},
    "packed": {Path(layout.tokens_dir(run)).name: run for run in SAMPLING},
    "base": {Path(layout.base_dir(run)).name: run for run in RUNS.values()},
    "sensitivities": {
        Path(layout.sensitivity_path(run)).stem: run
        for run in RUNS.values()
        if run.quantize.measures
    },
    "scores": {Path(model.scores).name: RUNS[name] for name, model in SCORED.items()},
    "model": {Path(layout.description(run)).parent.name: run for run in RUNS.values()},
}
# Of each base whose kept linears preflight decides: a run that decides it.
BITS_DECIDED_BY = {
    Path(layout.base_dir(run)).name: [name]
    for name, run in RUNS.items()
    if run.quantize.measures and run.start is None
}
# The runs that export a form.
EXPORTING = {
    form: [name for name, run in RUNS.items() if form in run.export.exported] for form in EXPORTS
}
EVALUATED = [layout.stage_dir(name, "evaluate_run") for name in RUNS]
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
    **{name: any_of(runs) for name, runs in RUNS_OF.items()},
    kind="model|dataset|adapter|scored",


def run_of(wildcards):
    """Return the settings of a job's run; of a shared artifact, those of one of its runs."""
    return next(runs[wildcards[kind]] for kind, runs in RUNS_OF.items() if kind in wildcards.keys())


def from_run(value):
    """Return a function for a rule: `value` of the job's run."""
    return lambda wildcards: value(run_of(wildcards))


def settings_file(stage, wildcards, settings):
    """Write the settings of a job unless they are written, and return their file.

    Its name has their hash: it is never changed, neither by a dry run nor by a second Snakemake.
    """
    path = layout.settings_path(stage, "-".join(wildcards) or stage, settings)
    file = Path(with_prefix(path))
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_checked_json(file, json.loads(canonical_json(settings)))
    return path


def settings(stage, document=None):
    """Return the input function for the settings that a stage's result depends on, by default those of its run."""
    document = document or from_run(partial(layout.stage_settings, stage))
    return lambda wildcards: settings_file(stage, wildcards, document(wildcards))


def free_settings(stage, document=None):
    """Return the param for the settings that do not change a stage's result.

    Snakemake does not record params that are derived from inputs, so none of them reruns it.
    """
    document = document or from_run(partial(layout.free_settings, stage))
    return lambda wildcards, input: with_prefix(
        settings_file(stage, wildcards, document(wildcards))
    )


def model_checks(wildcards, output):
    """Return the file of all runs' settings that wait for this model or adapter, which is compared with them."""

    def waits(run):
        made = layout.description(run), layout.source_dir(run), layout.start_adapter(run)
        return any(path and with_prefix(path) == str(output) for path in made)

    runs = {name: run for name, run in RUNS.items() if waits(run)}
    checks = layout.model_checks(runs, trains_here=on_this_machine())
    return with_prefix(settings_file("checks", wildcards, checks))


def local_inputs(folder, patterns=MODEL_PATTERNS):
    """Return files as inputs: in a user's folder those that match, or a folder that the workflow makes."""
    return inputs_in(folder, layout.local_files(folder, patterns))


def tokenizer_files(run):
    """Return the tokenizer's files as inputs."""
    return local_inputs(layout.model_dir(run), TOKENIZER_PATTERNS)


def data_inputs(run):
    """Return the data files as inputs, of a hub dataset its folder."""
    return inputs_in(layout.dataset_dir(run), layout.data_files(run))


def dataset_folder(run):
    """Return the folder in which the data's paths begin."""
    return made_or_own(layout.dataset_dir(run) or ".")


def model_files(run):
    """Return the base model's files as inputs."""
    return local_inputs(layout.model_dir(run))


def manifest(run):
    return f"{layout.tokens_dir(run)}/manifest.json"


def planned_manifest(run):
    """Return the manifest by which a run is planned: of its rows, as sampled answers come later."""
    return f"{layout.rows_dir(run)}/manifest.json"


def known_manifest(run):
    """Return a run's manifest, before its answers are sampled that of its rows."""
    packed = manifest(run)
    return packed if Path(with_prefix(packed)).exists() else planned_manifest(run)


def of_runs(stage, *files, names):
    """Return artifacts of a stage, for these runs."""
    return [f"{layout.stage_dir(name, stage)}/{file}" for name in names for file in files]


def form_inputs(forms):
    """Return the input function for the folders of forms of a run's model, by name, beside base and adapter.

    forms: function of the run.
    """

    def inputs(wildcards):
        run = run_of(wildcards)
        parts = {part for form in forms(run) for part in FORMS[form].parts} - {"base", "adapter"}
        files = {"model": model_files, "start": start_files}
        return {
            part: files[part](run) if part in files else layout.folder_of_form(wildcards.run, part)
            for part in sorted(parts)
        }

    return inputs


def form_options(_, input):
    """Return the options of a job for its `form_inputs`."""
    files = {name: input.get(name) for name in ("model", "start", *EXPORTS)}
    return [
        word
        for name, paths in files.items()
        if paths
        for word in (f"--{name}", paths if isinstance(paths, str) else paths[0])
    ]


def on_this_machine():
    """Whether jobs run here: neither sent to a cluster nor within one. Unknown while parsing."""
    return workflow.local_exec and not workflow.remote_exec


def gpus_per_node(run):
    """Return a run's number of GPUs on a node."""
    device, count = requested_processes(run.hardware)
    return count if device == "cuda" else 0


def gpus_of_job(wildcards, most=None):
    """Return the resource `gpu` of a job on one node; None, which omits it, without GPUs."""
    count = gpus_per_node(run_of(wildcards))
    return min(count, most or count) or None


def leased_gpus(wildcards, resources):
    """Return the number of GPUs that a job on one node leases."""
    return resources.get("gpu", 0)


# For a cluster's node with an unknown number of cores; `--set-threads` changes it.
CORES_PER_GPU, CORES_OF_PREPARATION = 2, 4


def all_cores(_):
    """Return the threads of preparing stages that nothing else runs beside."""
    return workflow.cores if workflow.local_exec else CORES_OF_PREPARATION


def one_core(_):
    """Return the threads of a preparing stage beside others."""
    return 1 if workflow.local_exec else CORES_OF_PREPARATION


def tokenizing_cores(_):
    """Return the threads of the tokenization, beside the description and the quantization by a GPU."""
    left = workflow.cores // 2 if visible_gpus() else 0
    return max(1, workflow.cores - 1 - left) if workflow.local_exec else CORES_OF_PREPARATION


def cores(wildcards, most=None):
    """Return a job's cores: this machine's in proportion to its GPUs, or without GPUs all, so that jobs take turns.

    On a cluster a core per process, two per GPU: one launches kernels, one makes batches, checkpoints and heartbeats.
    """
    count = gpus_of_job(wildcards, most)
    if not on_this_machine():
        return count * CORES_PER_GPU if count else run_of(wildcards).hardware.cpu_processes
    if not count:
        return workflow.cores
    return max(count, workflow.cores * count // max(count, len(visible_gpus())))


# The same for jobs on one GPU.
one_gpu, cores_of_one_gpu = partial(gpus_of_job, most=1), partial(cores, most=1)


def measuring_gpu(wildcards):
    """Return the GPU of a measurement for preflight; none if this machine, without GPUs, plans for others."""
    return one_gpu(wildcards) if visible_gpus() or not on_this_machine() else None


def preflight_cores(wildcards):
    """Return the threads of preflight: one, beside the quantization; before hours of calibration all."""
    calibrates = run_of(wildcards).quantize.calibrates
    return cores(wildcards) if calibrates or not on_this_machine() else 1


def quantizing_cores(wildcards):
    """Return the threads of the quantization: on CPUs all but preflight's, beside a GPU at most half."""
    count = cores_of_one_gpu(wildcards)
    if not on_this_machine():
        return count
    most = workflow.cores // 2 if one_gpu(wildcards) else workflow.cores - 1
    return max(1, min(count, most))


# Needs of jobs that train, and of jobs that read the trained model.
TRAINING, READING = (
    partial(need, recorder=plan_recorder)
    for need in (cluster_request.training, cluster_request.reading)
)


def requested(name, need):
    """Return a job's `mem_mb` (more at every attempt) or `runtime` on a cluster; none on a single machine."""

    def request(wildcards, input, attempt):
        if workflow.local_exec or workflow.remote_exec:
            return None if name == "runtime" else 0
        for path in input:
            # The error of a missing input makes Snakemake ask again later.
            Path(path).stat()
        run = run_of(wildcards)
        needs = need(
            run,
            model=made_or_own(layout.model_dir(run)),
            description=with_prefix(layout.description(run)),
            manifest=with_prefix(known_manifest(run)),
        )
        return needs.runtime if name == "runtime" else needs.mem_mb * (1 + attempt) // 2

    return request


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
            handler.setFormatter(ShortJobs(handler.formatter))
    try:
        for name, run in RUNS.items():
            check_place(
                name,
                run.hardware,
                in_job=on_this_machine(),
                elsewhere=not workflow.local_exec,
            )
        if on_this_machine():
            check_processes_can_work()
        for name in forced_trainings():
            folder = Path(with_prefix(layout.checkpoint_dir(name, RUNS[name])))
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
        lines = closing_lines(
            Path(with_prefix("results")), name, served=run.served, since=STARTED
        )
        print("\n".join(lines), file=sys.stderr, end="\n" if lines else "")
        if lines:  # they stay the last ones
            for handler in logger.handlers:
                if handler.name == "DefaultStreamHandler":
                    handler.setLevel("WARNING")


onerror:
    FAILED_JOBS.show_last()
    used = {
        made_or_own(path)
        for run in RUNS.values()
        for path in (*model_files(run), *layout.data_files(run))
    }
    skew = from_the_future(map(Path, [*sorted(used), with_prefix("results")]))
    if skew is not None:
        print(skew, file=sys.stderr)
