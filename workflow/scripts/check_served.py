"""Serve the exported files by the real server, and compare it with the evaluation and with PEFT.

vLLM, in its own environment (`make serving`), loads the adapter on the original model, or the
merged model; llama.cpp loads the same as the first GGUF file. Compared by its OpenAI interface:
token ids of prompts, held-out losses, greedy answers, and the effect of the adapter. Then
Transformers and PEFT compute the same. Writes `served.json`; ends with the server's own words if it
refuses the exported files."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from workflow.lib.artifacts.evaluation_record import Evaluation
from workflow.lib.artifacts.manifest_record import ConversationFacts, Probe
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import GgufChecks, Parity, Provenance, ServedCheck
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.tokenizer import load_tokenizer
from workflow.lib.data.tokens.token_store import TokenStore, recorded_arrays
from workflow.lib.distributed.work_sharing import check_recorded
from workflow.lib.evaluation.evaluated_models import Loading
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
    Comparison,
    Reference,
    ServerQuestions,
    ask,
    check_prompts,
)
from workflow.lib.evaluation.vllm_server import VllmServer, VllmStart
from workflow.lib.export.adapter_files import check_conversations
from workflow.lib.export.stock_models import load_options
from workflow.lib.model.backends import choose_device
from workflow.lib.settings.config import EvaluateConfig, ModelConfig
from workflow.lib.settings.forms import EXPORTS, FORMS
from workflow.lib.system.checksums import check_files, listed_files
from workflow.lib.system.files import write_checked_json
from workflow.lib.system.hardware import visible_gpus
from workflow.scripts.command import form_folders, logger, run, stage_parser


def main(args: argparse.Namespace) -> None:
    served = served_model(args)
    store = TokenStore.open(args.tokens)
    check_recorded(
        [
            *listed_files(served.exported),
            *served.weights.recorded,
            *recorded_arrays(args.tokens, store.manifest),
        ]
    )
    evaluation = read_record(args.evaluation / f"{served.name}.json", Evaluation)
    questions = server_questions(args, evaluation, served.exported)
    trial = (in_gguf if args.gguf else in_vllm)(args, served, questions)
    with running(trial.kind, trial.start) as server:
        server_name = f"{server.name} {server.version}"
        logger.info("%s serves %s in %s", server_name, FORMS[served.name].label, trial.dtype)
        if isinstance(server, VllmServer) and served.adapter is not None:
            server.load_adapter(ADAPTER, served.adapter.folder, served.adapter.config)
        tokenizer = load_tokenizer(served.exported)
        check_conversations(served.exported, probes(args.tokens))
        prompts = check_prompts(server, tokenizer, probes(args.tokens))
        results = ask(server, questions, served=BASE if served.adapter is None else ADAPTER)
    reference = Reference.of(evaluation, questions)
    bounds: Any = {"bound": trial.bound, "rounded": args.gguf is not None}
    comparison = Comparison(server_name, questions, reference, results, **bounds)
    worst = comparison.worst_document()
    model = loaded(args, served)
    check = ServedCheck(
        server=server_name,
        subject=served.name,
        compute_dtype=trial.dtype,
        max_lora_rank=trial.max_lora_rank,
        documents=len(results.losses),
        loss=comparison.loss,
        evaluated_loss=reference.loss,
        trained_loss=trained_loss(args.evaluation / "tuned.json", questions),
        bound=comparison.bound,
        worst_document=worst,
        prompts=prompts,
        adapter=comparison.adapter_effect(model),
        answers=len(results.answers),
        equal_answers=comparison.equal_answers(tokenizer),
        answer_gap=comparison.answer_gap(model),
        provenance=Provenance.now(),
    )
    write_checked_json(args.output, check.as_json())
    logger.info("%s", check.summary)


class ServedModel(NamedTuple):
    """The served form: weights, an adapter on them, and the folder with the trained tokenizer."""

    name: str
    weights: Checkpoint
    adapter: Adapter | None
    exported: Path


def served_model(args: argparse.Namespace) -> ServedModel:
    name = args.config["evaluate"]["served"]
    folders, form = form_folders(args), FORMS[name]
    adapter = Adapter(folders[form.adapter]) if form.adapter else None
    exported = folders[form.adapter or form.weights]
    return ServedModel(name, Checkpoint(folders[form.weights]), adapter, exported)


@dataclass(frozen=True)
class Trial:
    """A server to start, and how it is compared."""

    kind: type[VllmServer] | type[LlamaCppServer]
    start: VllmStart | LlamaCppStart
    dtype: str
    bound: float
    max_lora_rank: int | None = None


def server_questions(
    args: argparse.Namespace, evaluation: Evaluation, exported: Path
) -> ServerQuestions:
    documents = TokenStore.open(args.tokens).heldout_documents()
    assert evaluation.heldout is not None, "export.serve needs evaluate.heldout"
    numbers = [sample.document for sample in evaluation.samples]
    return ServerQuestions.of(
        documents,
        [loss.document for loss in evaluation.heldout.per_document],
        prompts=choose_prompts(documents, numbers, count=len(numbers), seed=0),
        folder=exported,
        most=EvaluateConfig.model_validate(args.config["evaluate"]).max_new_tokens,
        tokens=POSITIONS if args.gguf else math.inf,
    )


def in_gguf(args: argparse.Namespace, served: ServedModel, questions: ServerQuestions) -> Trial:
    check_files(listed_files(args.gguf))
    files = read_record(args.gguf / "gguf.json", GgufChecks).files
    file = next(file for file in files if file.form == FORMS[served.name].gguf)
    adapter = args.gguf / file.adapter if file.adapter else None
    start = LlamaCppStart(args.gguf / file.file, adapter, questions.longest)
    return Trial(LlamaCppServer, start, file.format, BOUNDS[file.format])


def in_vllm(args: argparse.Namespace, served: ServedModel, questions: ServerQuestions) -> Trial:
    parity = read_record(args.parity, Parity)
    adapter = served.adapter
    start = VllmStart(
        python=args.python,
        model=served.weights.folder,
        tokenizer=served.exported,
        dtype=parity.compute_dtype,
        max_tokens=questions.longest,
        adapter=None if adapter is None else adapter.config,
        gpus=len(visible_gpus()) if choose_device().type == "cuda" else 0,
    )
    return Trial(VllmServer, start, start.dtype, 2 * parity.tolerance, start.max_lora_rank)


def probes(tokens: Path) -> list[Probe]:
    return read_record(tokens / "manifest.json", ConversationFacts).probes


def loaded(args: argparse.Namespace, served: ServedModel) -> Model:
    """Return the served model, in Transformers."""
    settings = ModelConfig.model_validate(args.config["model"])
    options = load_options(served.weights, device=choose_device(), settings=settings)
    return Loading(options, shards=None).model(served.weights, served.adapter)


def trained_loss(path: Path, questions: ServerQuestions) -> float | None:
    """Return the loss of the adapter on the base of its training, if the evaluation measured it."""
    return Reference.of(read_record(path, Evaluation), questions).loss if path.is_file() else None


if __name__ == "__main__":
    needs = "adapter parity evaluation tokens output"
    run(main, stage_parser(__doc__, needs=needs, takes=" ".join(["python model", *EXPORTS])))
