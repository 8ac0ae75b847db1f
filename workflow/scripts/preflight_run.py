"""Predict memory, disk and time of a run, choose its micro-batch, refuse what cannot fit.

It predicts from shapes alone. In the workflow (with --config) it reads the description of the base
model, the tokens manifest, and this machine. It writes preflight.json, which `finetune` follows. Of
a run that fits it prints a few lines (the target `preflight` prints the tables); one that does not
fit ends with its tables, exit status 1, and the changes that would make it fit.

By hand (with --gpus) it answers the same for any model on any GPUs, without either:

  python -m workflow.scripts.preflight_run --model meta-llama/Llama-3.1-70B --gpus 2x4090

A search (--longest, --largest) runs the same prediction many times, and prints the command for its
answer alone.

The verdict comes from the engine itself: it runs two steps of the chosen plan on tensors without
values, and its GPU allocations are replayed. That takes 7 to 20 s the first time, and is cached.
With --estimate the plan itself is not recorded: the answer is by lines between recordings, shipped
or cached for many models, and takes a second then.
"""

import argparse
import shlex
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import Quantization, Sensitivities
from workflow.lib.evaluation.task_files import check_tasks
from workflow.lib.model.architecture.model_shape import ModelShape, described_config, read_shape
from workflow.lib.model.architecture.shipped_shapes import known_models
from workflow.lib.planning.preflight.bit_choice import costs_of
from workflow.lib.planning.preflight.checks import read_machine, read_tokens
from workflow.lib.planning.preflight.planned_run import PlannedRun
from workflow.lib.planning.preflight.planning_inputs import attention_needs, training_attention
from workflow.lib.planning.preflight.questions import (
    largest,
    longest,
    num_weights,
    predicted,
)
from workflow.lib.planning.preflight.table import render, summary
from workflow.lib.planning.preflight.what_if import (
    NAME,
    find_config,
    find_shape,
    imagined_tokens,
    machine_by_hand,
    settings_of,
)
from workflow.lib.planning.token_counts import TokenCounts
from workflow.lib.recording.recording_process import (
    PlanRecorder,
    RecordingProcess,
    plan_recorder,
    recording_process,
)
from workflow.lib.settings.config import RunConfig
from workflow.lib.settings.objectives import needs_of
from workflow.lib.settings.train import RopeScaling
from workflow.lib.system.environment import importing
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.files import file_sha256, provenance, write_checked_json
from workflow.lib.system.gpu_models import parse_gpus
from workflow.scripts.command import add_settings, command_parser, logger, run

SEARCHES = ("longest", "largest")
RUN_OPTIONS = ("model", "revision", "gpus", "host_gib", "seq_len", "rank", "batch", "rows", "set")
NEEDED_AND_FOREIGN: dict[str | None, tuple[tuple[str, ...], tuple[str, ...]]] = {
    None: (("model", "gpus"), ()),
    "longest": (("model", "gpus"), ("output", "seq_len")),
    "largest": (("gpus",), ("output", "model", "revision")),
}
SEQ_LEN = 2048
MOST_NAMED = 8  # models larger than the answer


def main(args: argparse.Namespace) -> None:
    if args.config is None:
        args.run = args.run or NAME
        answer(args)
        return
    check_arguments(
        args,
        needed=("model", "tokens", "output", "run"),
        foreign=("gpus", "estimate", "host_gib", "seq_len", *SEARCHES),
        use="with --config",
    )
    settings = RunConfig.model_validate(args.config)
    if not args.brief:  # finetune's own prediction, which only follows this one
        check_tasks(settings.evaluate)
    shape = read_model(Path(args.model), args.description)
    tokens = read_tokens(args.tokens)
    if args.of_prompts:
        tokens = counts_of_round(tokens, settings)
    machine = read_machine(settings.hardware)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(args.output.parent).free
    settings = with_kept(settings, args.base)
    costs = costs_of(read_record(args.sensitivities, Sensitivities)) if args.sensitivities else None
    with plan_recorder(described_config(Path(args.model)), shape) as record:
        planned = PlannedRun(
            settings, shape, machine, tokens, record, disk_free_bytes=free, costs=costs
        )
        predict(args, planned)


def with_kept(settings: RunConfig, base: Path | None) -> RunConfig:
    """Return the settings with what an existing base keeps in 16 bits, if they leave it open."""
    if base is None or not settings.quantize.measures:
        return settings
    recorded = read_record(base / "quantization.json", Quantization).settings["keep"]
    return settings.model_copy(update={"quantize": settings.quantize.keeping(recorded)})


def counts_of_round(tokens: TokenCounts, settings: RunConfig) -> TokenCounts:
    """Return the counts of a round, by those of the rows whose prompts it answers."""
    answers, examples = settings.answers, needs_of(settings.train.objective).examples
    per_prompt = {"texts": 1, "pairs": 2}.get(examples, answers.per_prompt)
    count = per_prompt * answers.prompts_per_round
    return tokens.with_answers(count, answer_tokens=answers.max_new_tokens, per_prompt=per_prompt)


def read_model(model: Path, description: Path | None) -> ModelShape:
    """Return a model's description: `model` itself, or that of a folder, made now if it is missing
    or another model's."""
    if model.is_file():
        return read_shape(model)
    config = model / "config.json"
    if description is not None and description.is_file():
        shape = read_shape(description)
        if config.is_file() and shape.config_sha256 == file_sha256(config):
            return shape
    return described(model)


def predict(args: argparse.Namespace, planned: PlannedRun) -> None:
    """Decide, write and print; raises `UserError` if the run does not fit."""
    decision, result = predicted(planned, advise=True)
    if args.output is not None:
        write_checked_json(args.output, result.model_dump() | {"provenance": provenance()})
    settings, machine, shape = planned.settings, planned.machine, planned.shape
    by_hand = args.config is None
    show = logger.info if (by_hand and not args.brief) or not decision.fits else logger.debug
    show("%s", render(result, run=args.run, host_origin=machine.imagined_host))
    if decision.fits and by_hand == args.brief:
        logger.info("%s", summary(result, run=args.run))
        if not by_hand:
            logger.info("more: snakemake --cores 1 preflight")
    needs = attention_needs(shape).over(result.plan.context_parallel)
    attention = training_attention(settings.model, machine, needs)
    show = logger.debug if args.brief and not by_hand and decision.fits else logger.info
    show("attention: %s (%s)", attention.name, attention.reason)
    if note := needs.dropout_note(settings.model.attention_dropout):
        show("%s", note)
    if settings.hardware.cuda_graphs and machine.device == "cuda":
        obstacle = decision.chosen.plan.graph_obstacle
        show("hardware.cuda_graphs: %s", f"off ({obstacle})" if obstacle else "on")
    if not decision.fits:
        raise UserError(f"run {args.run} does not fit: {decision.reason}.")


def answer(args: argparse.Namespace) -> None:
    """Predict, or search. Raises `UserError` if nothing fits."""
    searches = [name for name in SEARCHES if getattr(args, name) is not None]
    if len(searches) > 1:
        bound = "--longest is given too, and one answer is searched at a time"
        raise setting_error("--largest", args.largest, bound, "Remove --longest or --largest")
    search = searches[0] if searches else None
    check_by_hand(args, search)
    with recording_process() as process:
        if search == "largest":
            print_largest(args, process)
            return
        planned = planned_run(args, args.model, *find_model(args, args.model, process))
        if search == "longest":
            print_longest(args, planned)
        else:
            predict(args, planned)


def check_by_hand(args: argparse.Namespace, search: str | None) -> None:
    """Raise `UserError` unless the arguments are those of a search, or of a prediction."""
    needed, foreign = NEEDED_AND_FOREIGN[search]
    use = f"with --{search}" if search else "without --config"
    workflow_only = ("tokens", "sensitivities", "base")
    check_arguments(args, needed, (*workflow_only, *foreign), use=use)
    lengths = [change for change in args.set if change.startswith("data.seq_len=")]
    if search == "longest" and lengths:
        raise setting_error("--set", lengths[0], "--longest finds it", "Remove it")


def check_arguments(
    args: argparse.Namespace, needed: Iterable[str], foreign: Iterable[str], *, use: str
) -> None:
    """Raise `UserError` if an argument of this use is missing, or one of another use is set."""
    for name in needed:
        if getattr(args, name) is None:
            option = f"--{name.replace('_', '-')}"
            raise setting_error(option, None, f"it is needed {use}", "Give it; see --help")
    for name in foreign:
        if (value := getattr(args, name)) not in (None, False):
            option = f"--{name.replace('_', '-')}"
            raise setting_error(option, str(value), f"it has no meaning {use}", "Remove it")


def find_model(
    args: argparse.Namespace, name: str, process: RecordingProcess
) -> tuple[ModelShape, PlanRecorder]:
    """Return the shape of a model, and the recorder of its plans."""
    shape = find_shape(name, revision=args.revision, describe=described)
    return shape, PlanRecorder(process, find_config(name, revision=args.revision), shape)


def described(model: Path) -> ModelShape:
    """Describe the model of a folder, with its weights if there are any, or of a config.json."""
    # Loading torch takes seconds, and most predictions need none.
    with importing():
        from workflow.lib.checkpoints.checkpoint import Checkpoint
        from workflow.lib.model.describe_model import describe_checkpoint, describe_file

    if not model.is_dir():
        return describe_file(model)
    if any(model.glob("*.safetensors")):
        return describe_checkpoint(Checkpoint.open(model))
    return describe_file(model / "config.json")


def planned_run(
    args: argparse.Namespace, model: str, shape: ModelShape, record: PlanRecorder
) -> PlannedRun:
    """Return the run of the arguments with a model."""
    count, gpu = parse_gpus(args.gpus, setting="--gpus")
    seq_len = SEQ_LEN if args.seq_len is None else args.seq_len
    settings = settings_of(
        args.set, seq_len=seq_len, rank=args.rank, processes=count, batch=args.batch
    )
    if (scaling := settings.model.rope_scaling).parameters:
        context = context_by(scaling, find_config(model, revision=args.revision))
        shape = replace(shape, max_position_embeddings=context)
        logger.info("context: %s tokens by model.rope_scaling", f"{context:,}")
    machine = machine_by_hand((count, gpu), asked_gib=args.host_gib, hardware=settings.hardware)
    tokens = imagined_tokens(shape, seq_len=settings.data.seq_len, rows=args.rows)
    return PlannedRun(settings, shape, machine, tokens, record, args.estimate)


def context_by(scaling: RopeScaling, config: Mapping[str, Any]) -> int:
    """Return the context in tokens of a model with this config.json, with scaled positions."""
    with importing():
        from workflow.lib.export.extended_model import scaled_context

    return scaled_context(config, scaling)


def print_longest(args: argparse.Namespace, planned: PlannedRun) -> None:
    """Print the longest row, its speed, and its prediction."""
    answer = longest(planned)
    forecast = answer.forecast
    if forecast is None:
        raise UserError(
            f"--longest: not even a short row fits: {answer.shortage}. Name a machine with more of "
            "it, or a smaller model."
        )
    logger.info("%s", render(forecast, run=args.run, host_origin=planned.machine.imagined_host))
    plan, speed = forecast.plan, forecast.time.tokens_per_s_per_process
    at = "" if speed is None else f", {speed:,.0f} tokens/s per GPU"
    if plan.context_parallel > 1:
        at = f" by hardware.context_parallel = {plan.context_parallel}{at}"
    beyond = "the model reads no longer one (model.rope_scaling scales its positions)"
    bound = beyond if answer.shortage is None else f"of a longer one {answer.shortage}"
    logger.info("the longest row: data.seq_len = %d%s; %s", plan.seq_len, at, bound)
    logger.info("%s", command_of(args, seq_len=plan.seq_len))


def print_largest(args: argparse.Namespace, process: RecordingProcess) -> None:
    """Print the largest model that fits, why larger ones do not, and its prediction."""
    names = [*dict.fromkeys(args.largest)] or sorted(set(known_models().values()))
    models = dict[str, tuple[ModelShape, PlanRecorder]]()
    for name in names:
        try:
            models[name] = find_model(args, name, process)
        except UserError as error:
            named_error = str(error) if name and name in str(error) else f"{name!r}: {error}"
            raise UserError(f"--largest: {named_error}") from None
    shapes = {name: shape for name, (shape, _) in models.items()}
    answer = largest(shapes, lambda name: planned_run(args, name, *models[name]))
    if answer.forecast is not None:
        logger.info("%s", render(answer.forecast, run=str(answer.name)))
    left, named = len(answer.larger), list(answer.larger.items())[-MOST_NAMED:]
    for name, why in named:
        logger.info("%s (%s): %s", name, billions(shapes[name]), why)
    if left > len(named):
        logger.info("and %d larger ones do not fit", left - len(named))
    if answer.name is None:
        raise UserError(
            f"--largest: none of the {len(names)} models fits {args.gpus}. Name more or larger "
            "GPUs, or a shorter row."
        )
    largest_size = billions(shapes[answer.name])
    logger.info("the largest of %d models: %s (%s)", len(names), answer.name, largest_size)
    logger.info("%s", command_of(args, model=answer.name))


def billions(shape: ModelShape) -> str:
    """Return how many weights a model has, in words."""
    return f"{num_weights(shape) / 1e9:.3g} billion weights"


def command_of(args: argparse.Namespace, **answer: object) -> str:
    """Return the command for an answer alone."""
    values, defaults = vars(args) | answer, vars(parser().parse_args([]))
    words = ["python", "-m", "workflow.scripts.preflight_run"]
    for name in RUN_OPTIONS:
        option_values = values[name] if isinstance(values[name], list) else [values[name]]
        if values[name] != defaults[name]:
            option = f"--{name.replace('_', '-')}"
            words += [word for value in option_values for word in (option, str(value))]
    return shlex.join(words)


def parser() -> argparse.ArgumentParser:
    takes = "run description base sensitivities output"
    arguments = command_parser(__doc__, takes=takes)
    add_settings(arguments, "--config", help="the stage's settings; without, by hand")
    arguments.add_argument(
        "--model", help="description, folder, or (by hand) config.json or hub id"
    )
    arguments.add_argument(
        "--brief",
        action="store_true",
        help="of a run that fits, write to the log alone; by hand, print a few lines",
    )
    arguments.add_argument("--tokens", type=Path, help="manifest.json of the tokens")
    arguments.add_argument(
        "--of-prompts", action="store_true", help="sampled answers to the tokens' prompts"
    )
    add_by_hand(arguments)
    return arguments


def add_by_hand(parser: argparse.ArgumentParser) -> None:
    """Add the options for use by hand."""
    by_hand = parser.add_argument_group("by hand, without --config")
    by_hand.add_argument("--gpus", help="number and kind of GPUs of a node, like 2x4090 or 8xH100")
    by_hand.add_argument(
        "--host-gib",
        type=float,
        help="host memory of the machine, GiB (what is usual with the GPUs)",
    )
    by_hand.add_argument("--seq-len", type=int, help=f"tokens of a row ({SEQ_LEN})")
    by_hand.add_argument("--rank", type=int, default=16, help="LoRA rank (%(default)s)")
    by_hand.add_argument(
        "--batch", type=int, help="rows of a step over all GPUs (16 or a few more)"
    )
    by_hand.add_argument("--rows", type=int, default=10_000, help="training rows (%(default)s)")
    by_hand.add_argument("--revision", help="revision of a model of the hub")
    by_hand.add_argument(
        "--estimate",
        action="store_true",
        help="by lines between recordings, without recording the plan itself",
    )
    by_hand.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any other setting"
    )
    searches = parser.add_argument_group("searches by hand, one at a time")
    searches.add_argument(
        "--longest", action="store_const", const=True, help="the longest row that trains"
    )
    searches.add_argument(
        "--largest",
        nargs="*",
        metavar="MODEL",
        help="the largest of these models that fits (all that are shipped)",
    )


if __name__ == "__main__":
    run(main, parser())
