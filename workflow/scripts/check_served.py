"""Serve the exported files by the real server, and compare it with the evaluation and with PEFT.

vLLM, in its own environment (`make serving`), loads the adapter on the original model, or the
merged model; llama.cpp loads the same as the first GGUF file. Compared by its OpenAI interface:
token ids of prompts, held-out losses, greedy answers, and the effect of the adapter. Then
Transformers and PEFT compute the same. Writes `served.json`; ends with the server's own words if it
refuses the exported files."""

import argparse
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workflow.lib.artifacts.evaluation_record import Evaluation
from workflow.lib.artifacts.manifest_record import ConversationFacts, Probe
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import GgufChecks, Parity, Provenance, ServedCheck
from workflow.lib.data.encoding.tokenizer import load_tokenizer
from workflow.lib.data.tokens.token_store import TokenStore, recorded_arrays
from workflow.lib.distributed.work_sharing import check_recorded
from workflow.lib.evaluation.evaluated_models import load_options
from workflow.lib.evaluation.llama_cpp_server import (
    BOUNDS,
    POSITIONS,
    LlamaCppServer,
    LlamaCppStart,
)
from workflow.lib.evaluation.model_server import BASE, running
from workflow.lib.evaluation.questions import Model
from workflow.lib.evaluation.sample_answers import choose_prompts
from workflow.lib.evaluation.served_checks import (
    ADAPTER,
    Asked,
    Comparison,
    Known,
    ask,
    check_prompts,
)
from workflow.lib.evaluation.vllm_server import VllmServer, VllmStart, rank_slots
from workflow.lib.export.adapter_files import check_conversations
from workflow.lib.export.stock_models import load_adapter, load_base
from workflow.lib.model.backends import choose_device
from workflow.lib.quantization.nf4_checkpoint import read_settings
from workflow.lib.settings.config import EvaluateConfig, ModelConfig
from workflow.lib.settings.subjects import SUBJECT_LABELS, SUBJECTS
from workflow.lib.system.checksums import check_files, downloaded_files, listed_files
from workflow.lib.system.files import write_checked_json
from workflow.lib.system.hardware import visible_gpus
from workflow.scripts.command import run, stage_parser

logger = logging.getLogger("workflow")


def main(args: argparse.Namespace) -> None:
    exported = args.merged or args.adapter
    store = TokenStore.open(args.tokens)
    check_recorded(
        [
            *listed_files(exported),
            *([] if args.merged else listed_files(args.adapter)),
            *downloaded_files(args.merged or args.model),
            *recorded_arrays(args.tokens, store.manifest),
        ]
    )
    evaluation = read_record(args.evaluation / f"{args.served}.json", Evaluation)
    asked = questions(args, evaluation, exported)
    trial = (in_gguf if args.gguf else in_vllm)(args, asked)
    with running(trial.kind, trial.start) as server:
        known_as = f"{server.name} {server.version}"
        logger.info("%s serves %s in %s", known_as, SUBJECT_LABELS[args.served], trial.dtype)
        if isinstance(server, VllmServer) and not args.merged:
            server.load_adapter(ADAPTER, args.adapter, on_experts=trial.on_experts)
        check_conversations(exported, probes(args.tokens))
        prompts = check_prompts(server, load_tokenizer(exported), probes(args.tokens))
        said = ask(server, asked, served=BASE if args.merged else ADAPTER)
    known = Known.of(evaluation, asked)
    bounds: Any = {"bound": trial.bound, "rounded": args.gguf is not None}
    comparison = Comparison(known_as, asked, known, said, **bounds)
    worst = comparison.worst_document()
    model = loaded(args)
    check = ServedCheck(
        server=known_as,
        subject=args.served,
        compute_dtype=trial.dtype,
        max_lora_rank=trial.max_lora_rank,
        documents=len(said.losses),
        loss=comparison.loss,
        evaluated_loss=known.loss,
        trained_loss=trained_loss(args.evaluation / "tuned.json", asked),
        bound=comparison.bound,
        worst_document=worst,
        prompts=prompts,
        adapter=comparison.adapter_effect(model),
        answers=len(said.answers),
        equal_answers=comparison.equal_answers(load_tokenizer(exported)),
        answer_gap=comparison.answer_gap(model),
        provenance=Provenance.now(),
    )
    write_checked_json(args.output, check.as_json())
    logger.info("%s", check.summary)


@dataclass(frozen=True)
class Trial:
    """A server to start, and how it is compared."""

    kind: type[VllmServer] | type[LlamaCppServer]
    start: VllmStart | LlamaCppStart
    dtype: str
    bound: float
    max_lora_rank: int | None = None
    on_experts: bool = False  # an adapter with a part for each expert


def questions(args: argparse.Namespace, evaluation: Evaluation, exported: Path) -> Asked:
    documents = TokenStore.open(args.tokens).heldout_documents()
    assert evaluation.heldout is not None, "export.serve needs evaluate.heldout"
    numbers = [sample.document for sample in evaluation.samples]
    return Asked.of(
        documents,
        [found.document for found in evaluation.heldout.per_document],
        prompts=choose_prompts(documents, numbers, count=len(numbers), seed=0),
        folder=exported,
        most=EvaluateConfig.model_validate(args.config["evaluate"]).max_new_tokens,
        tokens=POSITIONS if args.gguf else math.inf,
    )


def in_gguf(args: argparse.Namespace, asked: Asked) -> Trial:
    check_files(listed_files(args.gguf))
    form = "merged" if args.merged else "adapter"
    files = read_record(args.gguf / "gguf.json", GgufChecks).files
    file = next(file for file in files if file.form == form)
    adapter = args.gguf / file.adapter if file.adapter else None
    start = LlamaCppStart(args.gguf / file.file, adapter, asked.longest, "export.serve")
    return Trial(LlamaCppServer, start, file.format, BOUNDS[file.format])


def in_vllm(args: argparse.Namespace, asked: Asked) -> Trial:
    parity = read_record(args.parity, Parity)
    config = None if args.merged else read_settings(args.adapter / "adapter_config.json")
    rank = None if config is None else rank_slots(config)
    on_experts = bool(config and config.get("target_parameters"))
    start = VllmStart(
        python=args.python,
        model=args.merged or args.model,
        tokenizer=args.merged or args.adapter,
        dtype=parity.compute_dtype,
        max_tokens=asked.longest,
        max_lora_rank=rank,
        on_experts=on_experts,
        gpus=len(visible_gpus()) if choose_device().type == "cuda" else 0,
    )
    return Trial(VllmServer, start, parity.compute_dtype, 2 * parity.tolerance, rank, on_experts)


def probes(tokens: Path) -> list[Probe]:
    return read_record(tokens / "manifest.json", ConversationFacts).probes


def loaded(args: argparse.Namespace) -> Model:
    """Return the served model, in Transformers."""
    folder = args.merged or args.model
    settings = ModelConfig.model_validate(args.config["model"])
    model = load_base(folder, **load_options(folder, device=choose_device(), settings=settings))
    return model if args.merged else load_adapter(model, args.adapter)


def trained_loss(path: Path, asked: Asked) -> float | None:
    """Return the loss of the adapter on the base of its training, if the evaluation measured it."""
    return Known.of(read_record(path, Evaluation), asked).loss if path.is_file() else None


if __name__ == "__main__":
    parser = stage_parser(
        __doc__, needs="adapter parity evaluation tokens output", takes="python gguf model merged"
    )
    parser.add_argument("--served", choices=SUBJECTS, required=True, help="which is served")
    run(main, parser)
