"""Score the trained tokens of a tokens folder by a model: a reference or a teacher of the training.

The model is the NF4 base `--base`, the adapter `--model` on it, or `--model` itself if that is a
whole model. It runs whole in memory, sharded over GPUs if it is larger than one, or layer by layer
from disk if it fits nowhere. Every process scores its share of the rows. Finished shards of a
killed start are kept."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.files.model_files import ADAPTER
from workflow.lib.data.tokens.token_store import TokenStore, recorded_arrays
from workflow.lib.distributed.heartbeat import FIRST_PASS_S
from workflow.lib.distributed.work_sharing import (
    Division,
    Process,
    check_recorded,
    fits,
    join,
    main_first,
)
from workflow.lib.evaluation.evaluated_models import SETTINGS_FILES, Loading, source_files
from workflow.lib.model.backends import choose_device, resolve_dtype, resolve_training_attention
from workflow.lib.scores.scoring import (
    Scorer,
    WholeModel,
    check_same_tokenizer,
    check_top_k,
    rows_of,
)
from workflow.lib.scores.store import Part, Scores, ScoreWriter
from workflow.lib.scores.streamed_model import StreamedModel, StreamedScorer
from workflow.lib.settings.config import ModelConfig
from workflow.lib.system.checksums import listed_files
from workflow.lib.system.environment import is_worker
from workflow.lib.system.files import SUMS
from workflow.lib.system.hardware import available_host_bytes, visible_gpus
from workflow.lib.system.progress import Progress
from workflow.lib.training.launch import Workers, launch_workers
from workflow.scripts.command import logger, run, stage_parser

Way = Literal["whole", "sharded", "streamed"]


@dataclass(frozen=True)
class ScoredFolders:
    """Files of the model: a whole one, or the NF4 base, perhaps with an adapter on it."""

    model: Path
    adapter: Path | None = None
    is_base: bool = True

    def all(self) -> list[Path]:
        return [self.model, *([self.adapter] if self.adapter else [])]


def main(args: argparse.Namespace) -> None:
    folders = scored_folders(args)
    if not is_worker():
        gpus = visible_gpus() if choose_device().type == "cuda" else []
        processes = args.processes or max(1, len(gpus))
        args.way = args.way or way_of(folders, processes, [gpu.total_bytes for gpu in gpus])
        if processes > 1:
            arguments = [*sys.argv[1:], "--way", args.way]
            module = "workflow.scripts.score_tokens"
            launch_workers(Workers(module, arguments, processes=processes, what="scoring"))
            return
    work(args, folders)


def scored_folders(args: argparse.Namespace) -> ScoredFolders:
    if args.model is None:
        return ScoredFolders(args.base)
    if args.base is not None and (args.model / ADAPTER).is_file():
        return ScoredFolders(args.base, args.model)
    return ScoredFolders(args.model, is_base=False)


def way_of(folders: ScoredFolders, processes: int, gpu_bytes: list[int]) -> Way:
    """Return how the model runs. The NF4 base is not read layer by layer: its training holds it in
    memory too."""
    memory: Any = {"gpu_bytes": gpu_bytes, "host_bytes": available_host_bytes()}
    if fits(folders.model, Division(processes, sharded=False), **memory):
        return "whole"
    if processes > 1 and fits(folders.model, Division(processes, sharded=True), **memory):
        return "sharded"
    return "whole" if folders.is_base else "streamed"


def work(args: argparse.Namespace, folders: ScoredFolders) -> None:
    """Run one process of the scoring."""
    with ExitStack() as stack:
        process = join(stack, sharded=args.way == "sharded")
        tokens = TokenStore.open(args.tokens)
        model_files = check_inputs(args, folders, tokens, process)
        model, scored = Checkpoint(folders.model), args.config["scored"]
        vocabulary = min(x.vocabulary_size for x in (Checkpoint(args.tokenizer), model))
        with main_first(process.world):
            check_top_k(scored["top_k"], vocabulary)
            check_same_tokenizer(
                folders.model, args.tokenizer, setting=scored["setting"], named=scored["named"]
            )
        settings = ModelConfig.model_validate(args.config["model"])
        dtype = resolve_dtype(settings.compute_dtype, process.device)
        facts = {
            "model": scored["named"],
            "model_files": model_files,
            "top_k": scored["top_k"],
            "way": args.way,
            "device": process.device.type,
            "compute_dtype": str(dtype).removeprefix("torch."),
        }
        writer = ScoreWriter(args.output, facts, tokens)
        with main_first(process.world):
            pending = writer.prepare()
        if pending:
            process.pulse.phase("loading the model", least_s=FIRST_PASS_S)
            scorer = stack.enter_context(
                opened(args, model, folders, process, settings, dtype=dtype, vocabulary=vocabulary)
            )
            score(scorer, tokens, writer, pending, process)
        if process.is_main:
            manifest = writer.finish()
            mean = manifest.mean_log_prob
            logger.info(
                "scored %d trained tokens in %d shards; mean log-probability in training rows: %s",
                sum(shard.tokens for shard in manifest.shards),
                len(manifest.shards),
                "none" if mean is None else f"{mean:.4f}",
            )


def check_inputs(
    args: argparse.Namespace, folders: ScoredFolders, tokens: TokenStore, process: Process
) -> dict[str, str]:
    """Check model and tokens by their checksums; return the model files' SHA-256. Collective."""
    process.pulse.phase("checking the files")
    recorded, sharing = recorded_arrays(args.tokens, tokens.manifest), process.world
    files = []
    for folder in folders.all():
        if (folder / SUMS).is_file():
            files += (listed := listed_files(folder))
            recorded += listed
        else:
            files += source_files(folder, world=sharing)
    check_recorded(recorded, world=sharing)
    counting = [f for f in files if f.name in SETTINGS_FILES or f.name.endswith(".safetensors")]
    return {f"{file.folder.name}/{file.name}": file.sha256 for file in counting}


@contextmanager
def opened(
    args: argparse.Namespace,
    model: Checkpoint,
    folders: ScoredFolders,
    process: Process,
    settings: ModelConfig,
    *,
    dtype: torch.dtype,
    vocabulary: int,
) -> Iterator[Scorer]:
    """Load the model, or open its files."""
    scorer_options: dict[str, Any] = {
        "top_k": args.config["scored"]["top_k"],
        "vocabulary": vocabulary,
    }
    scorer_options |= {"device": process.device, "world": process.world}
    if args.way == "streamed":
        streamed = StreamedModel(model, device=process.device, dtype=dtype)
        with streamed.stream() as stream:
            yield StreamedScorer(stream, **scorer_options)
        return
    needs = model.attention_needs.with_dropout(0)
    attention = resolve_training_attention(
        settings.attention, process.device, needs, compute_dtype=dtype
    )
    logger.info("attention: %s (%s)", attention.name, attention.reason)
    options = {"device": process.device, "compute_dtype": dtype, "attention": attention.name}
    loading = Loading(options, process.shards)
    if folders.adapter is None:
        yield WholeModel(loading.plain(model), **scorer_options)
        return
    tuned = loading.tuned(model, Adapter(folders.adapter))
    yield WholeModel(tuned.get_base_model(), **scorer_options)  # type: ignore[arg-type]


def score(
    scorer: Scorer, tokens: TokenStore, writer: ScoreWriter, pending: list[Part], process: Process
) -> None:
    """Score and write the pending shards. Collective."""
    logger.info(
        "%d of %d shards to score, by %d process(es)",
        len(pending),
        len(writer.parts),
        process.world.size if process.world else 1,
    )
    process.pulse.phase("scoring", least_s=FIRST_PASS_S)
    total = sum(max(1, part.tokens) for part in pending)
    with Progress("scores", total=len(pending), unit="shards", total_work=total) as progress:
        for part in pending:

            def worked(share: float, part: Part = part) -> None:
                progress.add(0, work=share * max(1, part.tokens))
                process.pulse.moved()

            rows = rows_of(tokens, part, attention=scorer.attention)
            scores = scorer.scores(rows, worked) if rows else Scores.nothing(writer.top_k)
            if process.is_main:
                writer.add(part, scores)
            progress.add(1, work=0)


if __name__ == "__main__":
    parser = stage_parser(__doc__, needs="tokens tokenizer output", takes="base model")
    parser.add_argument(
        "--way", choices=("whole", "sharded", "streamed"), help="default: the first that fits"
    )
    parser.add_argument("--processes", type=int, help="default: one a GPU")
    run(main, parser)
