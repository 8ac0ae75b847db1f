import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.settings.types import DeploymentMethod
from snakemake.utils import update_config

from workflow.lib.artifacts import layout
from workflow.lib.artifacts.local_inputs import check_local_paths
from workflow.lib.artifacts.stage_logs import failure_causes, from_the_future
from workflow.lib.artifacts.trained_content import check_records, trained_content
from workflow.lib.artifacts.stored_inputs import check_stored_paths, travelling_files
from workflow.lib.benchmark.cases import benchmark_folder, on_gpus, requests
from workflow.lib.evaluation.task_files import refuse_code
from workflow.lib.model.architecture.model_files import (
    MODEL_PATTERNS,
    TOKENIZER_PATTERNS,
)
from workflow.lib.planning.machine import requested_processes
from workflow.lib.planning.preflight import cluster_request
from workflow.lib.planning.preflight.checks import check_model
from workflow.lib.settings.command_line import as_in_yaml
from workflow.lib.settings.config import (
    check_yaml,
    is_hub_id,
    load_benchmark,
    load_config,
)
from workflow.lib.settings.evaluate import LLAMA_CPP_RELEASE, LLAMA_CPP_SHA256
from workflow.lib.system.environment import use_this_interpreter
from workflow.lib.system.errors import UserError
from workflow.lib.system.hardware import (
    check_processes_can_work,
    check_writable,
    visible_gpus,
)
from workflow.lib.system.interrupts import tell_jobs

# Not `workflow.basedir`, which is that of the Snakefile that imports this one as a module.
SOURCES = Path(layout.__file__).parents[3]

use_this_interpreter(SOURCES)

ENDING = []


INTERRUPTED = "interrupted; the same command takes up the work again"


def end_without_jobs(number, frame):
    """End Snakemake while it reads the Snakefile or builds the graph; what a handler of a signal is called with.

    At once: an exception within Snakemake's event loop would end in its traceback. Nothing is written by then.
    """
    sys.stdout.flush()
    print(INTERRUPTED, file=sys.stderr, flush=True)
    os._exit(1)


def end_with_jobs(number, frame):
    """End Snakemake and, if they run here, its jobs; what a handler of a signal is called with."""
    if not ENDING:
        ENDING.append(number)
        if workflow.local_exec:
            tell_jobs()
        # Snakemake catches it once it schedules jobs, and waits for them.
        sys.exit(INTERRUPTED)


def catch_signals(handler):
    """Answer SIGINT and SIGTERM by `handler`, unless they are ignored."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


if workflow.is_main_process:
    catch_signals(end_without_jobs)

# Before Snakemake reads them, as far as that is possible: its message names no file, and it takes a key twice.
try:
    for file in [Path("config.yaml"), *workflow.overwrite_configfiles]:
        if file.exists():
            check_yaml(file)
except UserError as error:
    raise WorkflowError(str(error)) from None


configfile: "config.yaml"


update_config(config, as_in_yaml(workflow.config_settings.config))

STARTED = time.time()

# With an object store (`--default-storage-provider`, as on Kubernetes) models and data lie there, not on this disk.
STORED = workflow.storage_settings.default_storage_provider is not None

try:
    if workflow.is_main_process:
        # Snakemake's own folder too, before it tells by a traceback
        check_writable([Path(".snakemake"), Path("logs"), *([] if STORED else [Path("results")])])  # fmt: skip
    REPORT, RUNS = load_config(config)
    BENCHMARK = load_benchmark(config)
    requests(
        BENCHMARK, num_gpus=0
    )  # an unknown case is said here, with the other settings
    for name, settings in RUNS.items():
        if STORED:
            check_stored_paths(name, settings, sent_from_here=workflow.is_main_process)
        else:
            check_local_paths(name, settings)
            check_model(
                name,
                settings,
                folder=Path(layout.model_dir(settings)),
                description=Path(layout.description(settings)),
            )
            # Of a function of a rule, Snakemake would show a traceback.
            check_records(
                Path(layout.tokens_dir(settings)), Path(layout.base_dir(settings))
            )
    for folder in {
        run.evaluate.tasks_dir for run in RUNS.values() if not run.evaluate.task_code
    }:
        if folder:
            refuse_code(folder)
except UserError as error:
    raise WorkflowError(str(error)) from None

# One run that stands for all that share an artifact, by the artifact's folder name; of tokens the one
# that lets the fewest rows be rejected.
STRICTEST_LAST = sorted(RUNS.values(), key=lambda run: -run.data.max_rejected_share)
BY_TOKENS = {Path(layout.tokens_dir(run)).name: run for run in STRICTEST_LAST}
BY_BASE = {Path(layout.base_dir(run)).name: run for run in RUNS.values()}
BY_MODEL = {Path(layout.description(run)).parent.name: run for run in RUNS.values()}
BY_DOWNLOAD = {
    f"{kind}/{Path(folder).name}": layout.download_settings(kind, run)
    for run in RUNS.values()
    for kind, folder in layout.download_dirs(run).items()
}

# Gains that runs must reach, by run.
REQUIRED = {
    name: run.evaluate.model_dump(mode="json", include={"require", "require_by"})
    for name, run in RUNS.items()
    if run.evaluate.require
}

# Runs whose merged model is exported.
MERGED = [name for name, run in RUNS.items() if run.export.merged]

# Runs that are exported as GGUF files too.
IN_GGUF = [name for name, run in RUNS.items() if run.export.gguf]

TRAINED_FILES = [
    "adapter",
    "adapter_config.json",
    "metrics.jsonl",
    "parity.safetensors",
    "summary.json",
]
ADAPTER_FILES = [
    "adapter_model.safetensors",
    "adapter_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "SHA256SUMS",
]

# Downloads, tokens and preflight of all runs come before anything expensive: they have this priority, so a
# run that cannot work stops within minutes.
FIRST = 10


def container_image():
    """The image of `--sdm apptainer`, as envs/apptainer.def says how to build it; None where no image is used.

    Snakemake reads wildcards in its path and puts it unquoted into shell commands, so the path counts from the working
    directory: in the checkout itself it is plain, whatever the folder above is called.
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
    """A pattern that matches these names; without names, nothing."""
    return "|".join(map(re.escape, names)) or "(?!)"


wildcard_constraints:
    run=any_of(RUNS),
    tokens=any_of(BY_TOKENS),
    base=any_of(BY_BASE),
    model=any_of(BY_MODEL),
    kind="model|dataset",


def model_files(run, patterns=MODEL_PATTERNS):
    """The base model's files as inputs: the user's own ones, the download, or a folder of the object store."""
    folder = layout.model_dir(run)
    return [folder] if STORED else layout.local_files(folder, patterns)


def model_folder(run, files):
    """Where the files of `model_files` are once a job has them."""
    return files[0] if STORED else layout.model_dir(run)


def data_files(run):
    """The raw data as inputs: files, the download's folder, or what the settings name in the object store."""
    if STORED and run.data.source is None:
        return [os.path.normpath(path) for path in layout.dataset_paths(run)]
    return layout.data_files(run)


def data_root(run, files):
    """The folder in which the paths of the data settings begin, once a job has `data_files`."""
    if run.data.source is not None:
        return files[0]
    return (
        subpath(files[0], strip_suffix=os.sep + data_files(run)[0]) if STORED else "."
    )


def task_files(run):
    """Task files as inputs; none with an object store, where they travel with the sources."""
    folder = run.evaluate.tasks_dir
    if STORED or not folder:
        return []
    return layout.local_files(folder, layout.TASK_PATTERNS)


def calibration_text(run):
    """The text that calibrates a base, which travels with the sources where no disk is shared."""
    return [] if STORED else layout.calibration_text(run) or []


def chat_template(run):
    """A chat template of one's own as input; none with an object store, where it travels with the sources."""
    return [] if STORED else run.data.chat_template or []


def checks(folder_of, folder):
    """What the first stages hold against the model: the settings of all runs that use this folder of theirs."""
    runs = {name: run for name, run in RUNS.items() if folder_of(run) == folder}
    return layout.checks_json(runs, trains_here=on_this_machine())


def travelling(run, *, tasks=False):
    """What a stage reads of the files that travel with the sources, as a hash: no input tells that they changed."""
    return travelling_files(run, tasks=tasks) if STORED else None


def checkpoints(wildcards, input):
    """Folder of a run's checkpoints, named by its settings and by the content that it trains on.

    Data or weights edited in place must not continue from what their old content has trained.
    """
    # An input that is still to be made has to be named by the error; then Snakemake asks again later.
    for path in (input.tokens, input.base):
        Path(path).stat()
    folder = layout.checkpoint_dir(wildcards.run, RUNS[wildcards.run])
    return f"{folder}-{trained_content(Path(input.tokens), Path(input.base))}"


def cards(run, *, most=None):
    """The resource `gpu` of a job on one node; None, which leaves it out, without GPUs."""
    return min(gpus(run), most or gpus(run)) or None


def gpus(run):
    """GPUs of a run on a node."""
    device, count = requested_processes(run.hardware)
    return count if device == "cuda" else 0


def several_nodes(run, value):
    """A resource of runs that train on several nodes; None leaves it out."""
    return value if run.hardware.nodes > 1 else None


def on_each_node(run, threads):
    """What starts a command with so many threads once on every node of a Slurm job; nothing on a single one."""
    nodes = run.hardware.nodes
    if nodes == 1:
        return []
    return [
        *("srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"),
        *(
            f"--cpus-per-task={threads}",
            "--kill-on-bad-exit=1",
        ),
    ]


def asked(name, need, input, attempt, *, run):
    """What a job asks of a cluster, `mem_mb` (more at every attempt) or `runtime`; where nobody is to be asked, no memory.

    With an object store nothing: what it is predicted from is not here. `set-resources` of the profile says it.
    """
    if workflow.local_exec or workflow.remote_exec:
        return None if name == "runtime" else 0
    if STORED:
        return None
    for path in input:
        # An input that is still to be made has to be named by the error; then Snakemake asks again later.
        Path(path).stat()
    found = need(
        run,
        model=layout.model_dir(run),
        description=layout.description(run),
        manifest=f"{layout.tokens_dir(run)}/manifest.json",
    )
    return found.runtime if name == "runtime" else found.mem_mb * (1 + attempt) // 2


def on_this_machine():
    """Whether jobs run here: not on a cluster, neither where they are sent from nor within one. Not known while parsing."""
    return workflow.local_exec and not workflow.remote_exec


# Of a cluster's node, whose cores are not known; `--set-threads` changes it.
CORES_PER_GPU = 2


def cores(run, *, most=None):
    """Of this machine's cores the share of the GPUs that a job takes; without GPUs all of them, so that jobs take turns.

    On a cluster a core per process, for GPUs two: one launches kernels, one makes batches, checkpoints and signs of life.
    """
    count = cards(run, most=most)
    if not on_this_machine():
        return count * CORES_PER_GPU if count else run.hardware.cpu_processes
    if not count:
        return workflow.cores
    return max(count, workflow.cores * count // max(count, len(visible_gpus())))


def check_place(name, run):
    """Refuse settings that do not suit where jobs run, which is not known before the start."""
    hardware = run.hardware
    if on_this_machine() and hardware.nodes > 1:
        raise WorkflowError(
            f"hardware.nodes = {hardware.nodes} (run {name}): this machine is one node. "
            "Run with --profile workflow/profiles/slurm, or set it to 1."
        )
    if workflow.executor_plugin.name == "kubernetes" and hardware.nodes > 1:
        raise WorkflowError(
            f"hardware.nodes = {hardware.nodes} (run {name}): a job on Kubernetes is one pod, which is on one node. "
            "Set it to 1, or use Slurm."
        )
    if workflow.non_local_exec and hardware.gpus == "auto":
        raise WorkflowError(
            f"hardware.gpus = 'auto' (run {name}): the GPUs of a cluster are not seen from here. "
            "Set it to the number that a run takes on each node; 0 trains on CPUs."
        )


onstart:
    # Again: by now Snakemake has set a handler of its own.
    catch_signals(end_with_jobs)
    for name, run in RUNS.items():
        check_place(name, run)
    if on_this_machine():
        try:
            check_processes_can_work()
        except UserError as error:
            raise WorkflowError(str(error)) from None
    # Snakemake counts GPUs only against a limit: the cards of this machine. Which ones a job gets, its lease says.
    if on_this_machine() and visible_gpus():
        if "gpu" not in workflow.global_resources:
            workflow.register_resource("gpu", len(visible_gpus()))


def all_cores(_):
    """All cores of this machine; of a cluster's node, whose cores are not known, four (`--set-threads` changes it)."""
    return workflow.cores if workflow.local_exec else 4


def merged_model(name):
    """The merged model as input, if one is exported."""
    return f"{layout.stage_dir(name, 'consolidate')}/merged" if name in MERGED else []


def gguf_of(name):
    """What of a run becomes GGUF files."""
    return RUNS[name].export.gguf_of


def original_files(run):
    """The original model's files as inputs, if the evaluation loads them."""
    return (
        model_files(run)
        if {"original", "tuned_on_original"} & set(run.subjects)
        else []
    )


def model_options(run, input):
    """The options of a stage for the original and the merged model, if it has them as inputs."""
    model = ["--model", model_folder(run, input.model)] if input.model else []
    return [*model, *(["--merged", input.merged] if input.merged else [])]


def of_runs(stage, *files):
    """Artifacts of a stage, of every run. (`expand` takes no output of a rule that lies in an object store.)"""
    return [
        f"{layout.stage_dir(name, stage)}/{file}" for name in RUNS for file in files
    ]


def exports():
    """The artifacts of the export of all runs."""
    adapter = [f"adapter/{file}" for file in ADAPTER_FILES]
    merged = [merged_model(name) for name in MERGED]
    gguf = [layout.stage_dir(name, "convert_gguf") for name in IN_GGUF]
    return of_runs("consolidate", *adapter, "parity.json") + merged + gguf


def published_files(name):
    """What a run publishes, as inputs."""
    form, folder = RUNS[name].export.hub_form, layout.stage_dir(name, "consolidate")
    return {
        "adapter": [f"{folder}/adapter/{file}" for file in ADAPTER_FILES],
        "merged": [f"{folder}/merged"],
        "gguf": [layout.stage_dir(name, "convert_gguf")],
    }[form]


def published_folder(name, files):
    """The folder that a run publishes, once a job has `published_files`."""
    if RUNS[name].export.hub_form == "adapter":
        return subpath(files[0], parent=True)
    return files[0]


def publications():
    """The proofs that runs are published: those that name a repository."""
    named = [name for name, run in RUNS.items() if run.export.hub_repo]
    if not named:
        raise WorkflowError(
            "export.hub_repo names no repository, so there is nothing to publish. Set it to owner/name."
        )
    return [f"{layout.stage_dir(name, 'publish_run')}/published.json" for name in named]


def requirements():
    """The proof that required gains are reached, if any are required."""
    return rules.require_gain.output if REQUIRED else []


def evaluations(runs=RUNS):
    """The folders of the evaluations: in each a file a subject."""
    return [layout.stage_dir(name, "evaluate_run") for name in runs]


def benchmark_requests():
    """What the benchmark measures on this machine."""
    return requests(BENCHMARK, num_gpus=len(visible_gpus()))


def benchmark_request(wildcards):
    """The measurement that a job makes."""
    label = f"{wildcards.case}-x{wildcards.processes}"
    return next(found for found in benchmark_requests() if found.label == label)


def benchmark_gpus(wildcards):
    """GPUs that a measurement gets; of more than there are, all, and its row says what is lacking."""
    there = len(visible_gpus())
    return (
        min(int(wildcards.processes), there)
        if on_gpus(BENCHMARK, num_gpus=there)
        else 0
    )


onerror:
    for cause in failure_causes(Path("logs"), since=STARTED):
        print(cause, file=sys.stderr)
    used = {
        path
        for run in RUNS.values()
        for path in (*model_files(run), *data_files(run))
    }
    skew = (
        None if STORED else from_the_future(map(Path, [*sorted(used), "results"]))
    )
    if skew is not None:
        print(skew, file=sys.stderr)
