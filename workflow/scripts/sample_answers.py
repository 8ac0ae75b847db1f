"""Sample answers to the prompts of a round, by the model that the round starts from.

Prompts are rows' tokens before the answer, as in training. The engine samples with the base of the
training and the adapter, every process a share; vLLM with the adapter on the original. A finished
shard of a killed start is kept. Answers depend on model, prompts, settings and seed, not on batches
or processes."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from workflow.lib.artifacts.manifest_record import ConversationFacts
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.tokenizer import load_tokenizer, num_usable_tokens
from workflow.lib.data.reading.sources import resolve_splits
from workflow.lib.data.tokens.corpus import find_encodings
from workflow.lib.data.tokens.token_store import MANIFEST, TokenStore, recorded_arrays
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
from workflow.lib.evaluation.evaluated_models import Loading, files_of, source_files
from workflow.lib.evaluation.model_server import BASE, QUIET_S, running
from workflow.lib.evaluation.served_checks import ADAPTER
from workflow.lib.evaluation.vllm_server import VllmServer, VllmStart
from workflow.lib.export.adapter_files import end_token_ids
from workflow.lib.export.stock_models import load_options
from workflow.lib.model.backends import choose_device
from workflow.lib.rounds.answers import Answer, AnsweredPrompt, AnswerWriter, Shard
from workflow.lib.rounds.generation import (
    AT_ONCE,
    Ends,
    Request,
    decode_for_answers_,
    sample,
    sample_served,
)
from workflow.lib.rounds.prompts import Prompts
from workflow.lib.settings.config import AnswersConfig, DataConfig, ModelConfig
from workflow.lib.system.environment import is_worker
from workflow.lib.system.hardware import available_host_bytes, visible_gpus
from workflow.lib.system.progress import Progress
from workflow.lib.training.launch import Workers, launch_workers
from workflow.scripts.command import logger, run, stage_parser

Sampler = Callable[..., list[Answer]]  # of requests and `on_answers`


def main(args: argparse.Namespace) -> None:
    settings = AnswersConfig.model_validate(args.config["answers"])
    if settings.sampler == "engine" and not is_worker():
        gpus = visible_gpus() if choose_device().type == "cuda" else []
        processes = args.processes or max(1, len(gpus))
        if processes > 1:
            whole = fits(
                args.base,
                Division(processes, sharded=False),
                host_bytes=available_host_bytes(),
                gpu_bytes=[gpu.total_bytes for gpu in gpus],
            )
            arguments = [*sys.argv[1:], *([] if whole else ["--sharded"])]
            module = "workflow.scripts.sample_answers"
            launch_workers(Workers(module, arguments, processes=processes, what="sampling"))
            return
    with ExitStack() as stack:
        work(args, join(stack, sharded=args.sharded), settings)


def work(args: argparse.Namespace, process: Process, settings: AnswersConfig) -> None:
    """Run one process of the sampling."""
    tokens, model = TokenStore.open(args.tokens), Checkpoint(args.base or args.model)
    process.pulse.phase("checking the files")
    base, start = (files_of(folder) if folder else [] for folder in (args.base, args.start))
    recorded = [*base, *start, *recorded_arrays(args.tokens, tokens.manifest)]
    check_recorded(recorded, world=process.world)
    files = [*(base or source_files(args.model)), *start]
    tokenizer = load_tokenizer(args.tokenizer)
    data = DataConfig.model_validate(args.config["data"])
    splits = resolve_splits(data, root=args.dataset)
    with main_first(process.world):
        usable = num_usable_tokens(tokenizer, args.tokenizer)
        encodings = find_encodings(tokenizer, usable, splits, data, "texts")
        prompts = Prompts(splits, encodings, tokens, tokenizer, settings)
        chosen = prompts.chosen()
    model_files = {f"{file.folder.name}/{file.name}": file.sha256 for file in files}
    numerics = ModelConfig.model_validate(args.config["model"])
    options = load_options(model, device=process.device, settings=numerics)
    facts = [args.config["answers"], model_files, str(options), tokens.manifest["files"]]
    writer = AnswerWriter(args.output, chosen, facts=facts, per_prompt=settings.per_prompt)
    with main_first(process.world):
        pending = writer.prepare()
    if pending:
        conversations = read_record(args.tokens / MANIFEST, ConversationFacts)
        ends = Ends(end_token_ids(model, conversations), settings.stop, tokenizer)
        process.pulse.phase("loading the model", least_s=FIRST_PASS_S)
        with SAMPLERS[settings.sampler](args, process, ends, options) as sampler:
            sample_shards(process, writer, pending, settings, sampler)
    if process.is_main:
        manifest = writer.finish(
            sampler=f"{settings.sampler}, {process.device.type}",
            model_files=model_files,
            left_out=prompts.left_out["train"],
        )
        logger.info(
            "%d prompts with %d answers each, %d tokens; answers cut at answers.max_new_tokens: %d",
            *(manifest.prompts, settings.per_prompt, manifest.tokens),
            manifest.finish.get("length", 0),
        )
        if manifest.unreadable:
            logger.warning(
                "%d answers hold bytes that the tokenizer cannot render as text: their tokens are "
                "kept as sampled, and their text shows \ufffd",
                manifest.unreadable,
            )
        for reason, count in prompts.left_out["train"].most_common():
            logger.info("%d rows of this round are left out: %s", count, reason)


@contextmanager
def engine(
    args: argparse.Namespace, process: Process, ends: Ends, options: dict[str, Any]
) -> Iterator[Sampler]:
    """Load the base with the adapter; each process samples its share."""
    adapter = Adapter(args.start) if args.start else None
    loaded = Loading(options, process.shards).model(Checkpoint(args.base), adapter)
    decode_for_answers_(loaded, process.device)

    def sampler(requests: list[Request], **how: Any) -> list[Answer]:
        compute = partial(sample, loaded, ends=ends, device=process.device, **how)
        return shared_out(requests, compute, world=process.world, model=loaded)

    yield sampler


@contextmanager
def vllm(
    args: argparse.Namespace, process: Process, ends: Ends, options: dict[str, Any]
) -> Iterator[Sampler]:
    """Start vLLM with the adapter on the original, on all GPUs."""
    adapter = Adapter(args.start) if args.start else None
    settings = AnswersConfig.model_validate(args.config["answers"])
    start = VllmStart(
        python=args.python,
        model=args.model,
        tokenizer=args.tokenizer,
        dtype=str(options["compute_dtype"]).removeprefix("torch."),
        max_tokens=DataConfig.model_validate(args.config["data"]).seq_len,
        adapter=None if adapter is None else adapter.config,
        gpus=len(visible_gpus()) if process.device.type == "cuda" else 0,
        at_once=AT_ONCE,
        quiet_s=QUIET_S + settings.max_new_tokens,  # a second per token of an answer
        setting="answers.sampler",
        cure="Set it to engine.",
    )
    with running(VllmServer, start) as server:
        logger.info("%s %s samples in %s", server.name, server.version, start.dtype)
        if adapter is not None:
            server.load_adapter(ADAPTER, adapter.folder, adapter.config)
        name = BASE if adapter is None else ADAPTER
        yield partial(sample_served, server, model=name, ends=ends)


SAMPLERS = {"engine": engine, "vllm": vllm}


def sample_shards(
    process: Process,
    writer: AnswerWriter,
    pending: list[Shard],
    settings: AnswersConfig,
    sampler: Sampler,
) -> None:
    """Sample and write the pending shards. Collective."""
    logger.info("%d of %d shards to sample", len(pending), len(writer.shards))
    process.pulse.phase("sampling", least_s=FIRST_PASS_S)
    count = settings.per_prompt
    total = sum(len(shard.prompts) for shard in pending) * count
    # of all processes, of which this one knows its own
    size = 1 if process.world is None else process.world.size
    with Progress("answers", total=total, unit="answers") as progress:

        def on_answers(answers: int, new_tokens: int) -> None:
            progress.add(answers * size, tokens=new_tokens * size)
            process.pulse.moved()

        for shard in pending:
            requests = requests_of(shard.prompts, settings)
            answers = sampler(requests, settings=settings, on_answers=on_answers)
            if process.is_main:
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


if __name__ == "__main__":
    parser = stage_parser(__doc__, needs="tokens tokenizer output", takes="base model start python")
    parser.add_argument(
        "--dataset", type=Path, default=Path(), help="folder in which the data's paths begin"
    )
    parser.add_argument("--sharded", action="store_true", help="share the weights over processes")
    parser.add_argument("--processes", type=int, help="default: one a GPU")
    run(main, parser)
