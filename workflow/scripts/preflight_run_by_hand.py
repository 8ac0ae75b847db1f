"""Preflight by hand: one prediction for an imagined machine, or an inverse question.

Each question runs the same prediction many times, and prints the command for its answer alone."""

import argparse
import logging
import math
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path

from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.model.architecture.shipped_shapes import known_models
from workflow.lib.planning.preflight.machine_table import Answer, Offer, machine_table
from workflow.lib.planning.preflight.questions import (
    LENGTH_STEP,
    Asked,
    largest,
    longest,
    num_weights,
)
from workflow.lib.planning.preflight.table import render, render_answers
from workflow.lib.planning.preflight.what_if import (
    find_config,
    find_shape,
    imagined_tokens,
    machine_by_hand,
    settings_of,
)
from workflow.lib.recording.recording_process import (
    PlanRecorder,
    RecordingProcess,
    recording_process,
)
from workflow.lib.system.environment import importing
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.gpu_models import parse_gpus

QUESTIONS = ("longest", "largest", "cheapest", "compare")
OF_A_RUN = ("model", "revision", "gpus", "host_gib", "seq_len", "rank", "batch", "rows", "set")
SEQ_LEN = 2048
MOST_NAMED = 8  # models larger than the answer

logger = logging.getLogger("workflow")


def answer(
    args: argparse.Namespace,
    parser: argparse.ArgumentParser,
    predict: Callable[[argparse.Namespace, Asked], None],
) -> None:
    """Predict, or answer a question. Raises `UserError` if nothing fits."""
    questions = [name for name in QUESTIONS if getattr(args, name) is not None]
    if len(questions) > 1:
        one, other = (f"--{name}" for name in questions[:2])
        bound = f"{one} is asked too, and one question is answered at a time"
        raise setting_error(other, getattr(args, questions[1]), bound, f"Remove {one} or {other}")
    question = questions[0] if questions else None
    check_by_hand(args, question)
    with recording_process() as process:
        if question == "largest":
            print_largest(args, parser, process)
            return
        shape, record = found_model(args, args.model, process)
        if question in ("cheapest", "compare"):
            print_machines(args, parser, shape, record)
        elif question == "longest":
            print_longest(args, parser, asked_run(args, shape, record))
        else:
            predict(args, asked_run(args, shape, record))


def check_by_hand(args: argparse.Namespace, question: str | None) -> None:
    """Raise `UserError` unless the arguments are those of a question, or of a prediction."""
    table = question in ("cheapest", "compare")
    needed = {"model": question != "largest", "gpus": not table}
    foreign = {
        "tokens": True,
        "gpus": table,
        "output": question is not None,
        "model": question == "largest",
        "revision": question == "largest",
        "seq_len": question == "longest",
    }
    if args.deadline is not None and question != "cheapest":
        raise setting_error("--deadline", args.deadline, "only --cheapest has one", "Remove it")
    if args.deadline is not None and not 0 < args.deadline < math.inf:  # nor is nan a time
        bound = "it must be above 0 and finite"
        raise setting_error("--deadline", args.deadline, bound, "Give the hours from now")
    use = f"with --{question}" if question else "without --config"
    named = ([name for name, here in names.items() if here] for names in (needed, foreign))
    check_arguments(args, *named, use=use)
    lengths = [change for change in args.set if change.startswith("data.seq_len=")]
    if question == "longest" and lengths:
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


def found_model(
    args: argparse.Namespace, name: str, process: RecordingProcess
) -> tuple[ModelShape, PlanRecorder]:
    """Return the shape of a model, and the recorder of its plans."""
    shape = find_shape(name, revision=args.revision, describe=described)
    return shape, PlanRecorder(process, find_config(name, revision=args.revision), shape)


def described(model: Path) -> ModelShape:
    """Describe the model of a folder, with its weights if there are any, or of a config.json."""
    # Loading torch takes seconds, and most predictions need none.
    with importing():
        from workflow.lib.model.describe_model import describe_file, describe_folder

    if not model.is_dir():
        return describe_file(model)
    weights = any(model.glob("*.safetensors"))
    return describe_folder(model) if weights else describe_file(model / "config.json")


def asked_run(
    args: argparse.Namespace, shape: ModelShape, record: PlanRecorder, **other: object
) -> Asked:
    """Return the run of the arguments; other: arguments in place of theirs."""
    args = argparse.Namespace(**vars(args) | other)
    count, gpu = parse_gpus(args.gpus, setting="--gpus")
    seq_len = SEQ_LEN if args.seq_len is None else args.seq_len
    settings = settings_of(
        args.set, seq_len=seq_len, rank=args.rank, processes=count, batch=args.batch
    )
    machine = machine_by_hand((count, gpu), asked_gib=args.host_gib, hardware=settings.hardware)
    tokens = imagined_tokens(shape, seq_len=settings.data.seq_len, rows=args.rows)
    return Asked(settings, shape, machine, tokens, record, args.estimate)


def print_longest(args: argparse.Namespace, parser: argparse.ArgumentParser, asked: Asked) -> None:
    """Print the longest row, its speed, and its prediction."""
    found = longest(asked)
    if found is None:
        raise UserError(
            f"--longest: not even a short row fits {args.gpus}. Name more or larger GPUs, or a "
            "smaller model."
        )
    logger.info("%s", render(found, run=args.run, host_origin=asked.machine.imagined_host))
    seq_len, speed = found.plan.seq_len, found.time.tokens_per_s_per_process
    at = "" if speed is None else f", {speed:,.0f} tokens/s per GPU"
    more = asked.shape.max_position_embeddings - seq_len >= LENGTH_STEP
    bound = "memory allows no longer one" if more else "the model reads no longer one"
    logger.info("the longest row: data.seq_len = %d%s; %s", seq_len, at, bound)
    logger.info("%s", command_of(args, parser, seq_len=seq_len))


def print_largest(
    args: argparse.Namespace, parser: argparse.ArgumentParser, process: RecordingProcess
) -> None:
    """Print the largest model that fits, why larger ones do not, and its prediction."""
    names = [*dict.fromkeys(args.largest)] or sorted(set(known_models().values()))
    models = dict[str, tuple[ModelShape, PlanRecorder]]()
    for name in names:
        try:
            models[name] = found_model(args, name, process)
        except UserError as error:
            said = str(error) if name and name in str(error) else f"{name!r}: {error}"
            raise UserError(f"--largest: {said}") from None
    shapes = {name: shape for name, (shape, _) in models.items()}
    found = largest(shapes, lambda name: asked_run(args, *models[name]))
    if found.forecast is not None:
        logger.info("%s", render(found.forecast, run=str(found.name)))
    left, named = len(found.larger), list(found.larger.items())[-MOST_NAMED:]
    for name, why in named:
        logger.info("%s (%s): %s", name, billions(shapes[name]), why)
    if left > len(named):
        logger.info("and %d larger ones do not fit", left - len(named))
    if found.name is None:
        raise UserError(
            f"--largest: none of the {len(names)} models fits {args.gpus}. Name more or larger "
            "GPUs, or a shorter row."
        )
    largest_size = billions(shapes[found.name])
    logger.info("the largest of %d models: %s (%s)", len(names), found.name, largest_size)
    logger.info("%s", command_of(args, parser, model=found.name))


def billions(shape: ModelShape) -> str:
    """Return how many weights a model has, in words."""
    return f"{num_weights(shape) / 1e9:.3g} billion weights"


def print_machines(
    args: argparse.Namespace,
    parser: argparse.ArgumentParser,
    shape: ModelShape,
    record: PlanRecorder,
) -> None:
    """Print a table of machines, and with `--cheapest` the one that costs least by the deadline."""
    text, setting = (
        (args.compare, "--compare") if args.compare is not None else (args.cheapest, "--cheapest")
    )
    table = machine_table(text, setting=setting)
    processes = [parse_gpus(x.gpus, setting=setting)[0] * x.nodes for x in table.machines]
    shared = math.lcm(*processes)
    batch = args.batch or math.ceil(16 / shared) * shared

    def answered(offer: Offer) -> Answer:
        asked = asked_run(args, shape, record, **of_offer(args, offer, batch))
        return table.answer(offer, asked.predicted)

    answers = [answered(offer) for offer in table.machines]
    logger.info("%s", render_answers(answers, run=args.run))
    if args.cheapest is None:
        for one in answers:
            if one.fits:
                logger.info("%s", command_of(args, parser, **of_offer(args, one.offer, batch)))
        return
    best = table.cheapest(answers, hours=args.deadline)
    logger.info("the cheapest: %s, %.2f in %.3g h", best.offer.label, best.cost, best.hours)
    logger.info("%s", command_of(args, parser, **of_offer(args, best.offer, batch)))


def of_offer(args: argparse.Namespace, offer: Offer, batch: int) -> dict[str, object]:
    """Return the arguments for a machine of the table."""
    nodes = [] if offer.nodes == 1 else [f"hardware.nodes={offer.nodes}"]
    host_gib = args.host_gib if offer.host_gib is None else offer.host_gib
    return {
        "gpus": offer.gpus, "host_gib": host_gib, "batch": batch, "set": [*args.set, *nodes]
    }  # fmt: skip


def command_of(args: argparse.Namespace, parser: argparse.ArgumentParser, **answer: object) -> str:
    """Return the command for an answer alone."""
    given, usual = vars(args) | answer, vars(parser.parse_args([]))
    words = ["python", "-m", "workflow.scripts.preflight_run"]
    for name in OF_A_RUN:
        values = given[name] if isinstance(given[name], list) else [given[name]]
        if given[name] != usual[name]:
            option = f"--{name.replace('_', '-')}"
            words += [word for value in values for word in (option, str(value))]
    return shlex.join(words)


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
    questions = parser.add_argument_group("questions by hand, one at a time")
    questions.add_argument(
        "--longest", action="store_const", const=True, help="the longest row that trains"
    )
    questions.add_argument(
        "--largest",
        nargs="*",
        metavar="MODEL",
        help="the largest of these models that fits (all that are shipped)",
    )
    questions.add_argument(
        "--compare", metavar="MACHINES", help="machines side by side: a YAML file, or 2x4090,8xH100"
    )
    questions.add_argument(
        "--cheapest", metavar="FILE", help="the machine of a YAML file that costs least"
    )
    questions.add_argument(
        "--deadline", type=float, metavar="HOURS", help="of --cheapest: from now"
    )
