"""Sample answers to the prompts of a round, by a base with the adapter that the round starts from.

Prompts are rows' tokens before the answer, as in training. Every process samples its share; a
finished shard of a killed start is kept. Answers depend on model, prompts, settings and seed, not
on batches or processes."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.tokenizer import load_tokenizer, num_usable_tokens
from workflow.lib.data.reading.sources import resolve_splits
from workflow.lib.data.tokens.encodings import find_encodings
from workflow.lib.data.tokens.token_store import TokenStore, recorded_arrays
from workflow.lib.distributed.heartbeat import FIRST_PASS_S
from workflow.lib.distributed.work_sharing import (
    Division,
    Process,
    check_recorded,
    fits,
    join,
    main_first,
    shared_out,
)
from workflow.lib.evaluation.evaluated_models import Loading, files_of
from workflow.lib.evaluation.sample_answers import stop_token_ids
from workflow.lib.export.stock_models import load_options
from workflow.lib.model.backends import choose_device
from workflow.lib.rounds.answers import Answer, AnsweredPrompt, AnswerWriter, Shard
from workflow.lib.rounds.generation import Ends, Request, Sampled, sample
from workflow.lib.rounds.prompts import Prompts, refuse_texts
from workflow.lib.settings.config import AnswersConfig, DataConfig, ModelConfig
from workflow.lib.system.environment import is_worker
from workflow.lib.system.hardware import available_host_bytes, visible_gpus
from workflow.lib.system.progress import Progress
from workflow.lib.training.launch import Workers, launch_workers
from workflow.scripts.command import logger, run, stage_parser


def main(args: argparse.Namespace) -> None:
    if not is_worker():
        gpus = visible_gpus() if choose_device().type == "cuda" else []
        processes = args.processes or max(1, len(gpus))
        if processes > 1:
            bounds = {"gpu_bytes": [gpu.total_bytes for gpu in gpus]}
            whole = fits(
                args.base,
                Division(processes, sharded=False),
                host_bytes=available_host_bytes(),
                **bounds,
            )
            arguments = [*sys.argv[1:], *([] if whole else ["--sharded"])]
            module = "workflow.scripts.sample_answers"
            launch_workers(Workers(module, arguments, processes=processes, what="sampling"))
            return
    with ExitStack() as stack:
        work(args, join(stack, sharded=args.sharded))


def work(args: argparse.Namespace, process: Process) -> None:
    """Run one process of the sampling."""
    settings = AnswersConfig.model_validate(args.config["answers"])
    tokens = TokenStore.open(args.tokens)
    process.pulse.phase("checking the files")
    folders = [args.base, *([args.start] if args.start else [])]
    files = [file for folder in folders for file in files_of(folder)]
    recorded = [*files, *recorded_arrays(args.tokens, tokens.manifest)]
    check_recorded(recorded, world=process.world)
    with main_first(process.world):
        prompts = find_prompts(args, tokens, settings)
        chosen = prompts.chosen()
    model_files = {f"{file.folder.name}/{file.name}": file.sha256 for file in files}
    options = load_options(
        Checkpoint(args.base),
        device=process.device,
        settings=ModelConfig.model_validate(args.config["model"]),
    )
    facts = [args.config["answers"], model_files, str(options), tokens.manifest["files"]]
    writer = AnswerWriter(args.output, chosen, facts=facts, per_prompt=settings.per_prompt)
    with main_first(process.world):
        pending = writer.prepare()
    if pending:
        sample_shards(args, process, writer, pending, tokens, settings, options)
    if process.is_main:
        manifest = writer.finish(
            sampler=f"transformers, {process.device.type}",
            model_files=model_files,
            left_out=prompts.left_out,
        )
        ends = manifest.finish
        logger.info(
            "%d prompts with %d answers each, %d tokens; %d ended by themselves, %d were cut at "
            "answers.max_new_tokens",
            manifest.prompts,
            settings.per_prompt,
            manifest.tokens,
            ends.get("stop", 0),
            ends.get("length", 0),
        )
        if manifest.unreadable:
            logger.warning(
                "%d answers hold bytes that the tokenizer cannot render as text: their tokens are "
                "kept as sampled, and their text shows \ufffd",
                manifest.unreadable,
            )
        for reason, count in prompts.left_out.most_common():
            logger.info("%d rows of this round are left out: %s", count, reason)


def find_prompts(args: argparse.Namespace, tokens: TokenStore, settings: AnswersConfig) -> Prompts:
    data = DataConfig.model_validate(args.config["data"])
    splits = resolve_splits(data, root=args.dataset)
    tokenizer = load_tokenizer(args.tokenizer)
    usable = num_usable_tokens(tokenizer, args.tokenizer)
    encodings = find_encodings(tokenizer, usable, splits, data, "texts")
    refuse_texts(encodings)
    return Prompts(splits, encodings, tokens, tokenizer, settings)


def sample_shards(
    args: argparse.Namespace,
    process: Process,
    writer: AnswerWriter,
    pending: list[Shard],
    tokens: TokenStore,
    settings: AnswersConfig,
    options: dict[str, object],
) -> None:
    """Sample and write the pending shards. Collective."""
    process.pulse.phase("loading the model", least_s=FIRST_PASS_S)
    adapter = Adapter(args.start) if args.start else None
    model = Loading(options, process.shards).model(Checkpoint(args.base), adapter)
    tokenizer = load_tokenizer(args.tokenizer)
    stop_ids = {*stop_token_ids([], tokenizer=tokenizer, model=model)}
    stop_ids |= {*tokens.manifest["end_of_turn_token_ids"]}
    ends = Ends(sorted(stop_ids), settings.stop, tokenizer)
    logger.info("%d of %d shards to sample", len(pending), len(writer.shards))
    process.pulse.phase("sampling", least_s=FIRST_PASS_S)
    total = sum(len(shard.prompts) for shard in pending) * settings.per_prompt
    # of all processes, of which this one knows its own
    size = 1 if process.world is None else process.world.size
    with Progress("answers", total=total, unit="answers") as progress:

        def on_answers(answers: int, new_tokens: int) -> None:
            progress.add(answers * size, tokens=new_tokens * size)
            process.pulse.moved()

        def compute(requests: list[Request]) -> list[Sampled]:
            return sample(
                model,
                requests,
                settings,
                ends=ends,
                device=process.device,
                on_answers=on_answers,
            )

        for shard in pending:
            requests = requests_of(shard.prompts, settings)
            sampled = shared_out(requests, compute, world=process.world, model=model)
            if process.is_main:
                answers = [answer(tokenizer, one) for one in sampled]
                count = settings.per_prompt
                writer.add(shard, [answers[n : n + count] for n in range(0, len(answers), count)])


def requests_of(prompts: Sequence[AnsweredPrompt], settings: AnswersConfig) -> list[Request]:
    """Return the answers to sample, prompt by prompt. Held-out prompts get the same numbers in
    every round, so that rounds are compared at equal luck."""
    return [
        Request(
            prompt.prompt,
            number,
            settings.seed if prompt.split == "heldout" else settings.seed + 2**31 * settings.round,
        )
        for prompt in prompts
        for number in range(settings.per_prompt)
    ]


def answer(tokenizer: PreTrainedTokenizerBase, sampled: Sampled) -> Answer:
    return Answer(
        ids=sampled.ids,
        log_probs=sampled.log_probs,
        finish="stop" if sampled.stopped else "length",
        text=str(tokenizer.decode(sampled.ids, skip_special_tokens=True)),
    )


if __name__ == "__main__":
    parser = stage_parser(__doc__, needs="tokens tokenizer base output", takes="start")
    parser.add_argument(
        "--dataset", type=Path, default=Path(), help="folder in which the data's paths begin"
    )
    parser.add_argument("--sharded", action="store_true", help="share the weights over processes")
    parser.add_argument("--processes", type=int, help="default: one a GPU")
    run(main, parser)
