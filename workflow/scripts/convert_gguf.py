"""Write the trained model as GGUF files, and prove that llama.cpp serves it.

The merged model, or the adapter beside its base (`export.gguf_of`), in each format of
`export.gguf`: made by llama.cpp's own converters (`--llama-cpp`) and quantizer, loaded by
llama.cpp, and compared with the same model in Transformers: token ids of prompts, loss on held-out
documents within a bound, greedy answers. Writes the folder `--output`: the files, `gguf.json` and
`SHA256SUMS`. If a check fails, nothing is exported."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from workflow.lib.artifacts.manifest_record import ConversationFacts, Probe
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import GgufChecks, GgufFile, Provenance
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.tokenizer import load_tokenizer
from workflow.lib.data.tokens.token_store import TokenStore, choose_documents
from workflow.lib.distributed.work_sharing import check_recorded
from workflow.lib.evaluation.llama_cpp_server import (
    BOUNDS,
    POSITIONS,
    LlamaCppServer,
    LlamaCppStart,
)
from workflow.lib.evaluation.model_server import BASE, running
from workflow.lib.evaluation.sample_answers import choose_prompts
from workflow.lib.evaluation.served_checks import (
    ADAPTER,
    Comparison,
    Reference,
    ServerQuestions,
    ask,
    check_prompts,
)
from workflow.lib.export.gguf_files import GgufSource, write_adapter, write_models
from workflow.lib.export.stock_models import load_adapter, load_base
from workflow.lib.settings.config import ExportConfig
from workflow.lib.settings.evaluate import GgufForm, GgufFormat
from workflow.lib.system.checksums import downloaded_files, listed_files
from workflow.lib.system.files import new_folder, write_checked_json, write_checksums
from workflow.scripts.command import logger, run, stage_parser

DOCUMENTS, PROMPTS, NEW_TOKENS, SEED = 64, 4, 24, 0


@dataclass(frozen=True)
class Served:
    """A form of the trained model, and its GGUF files."""

    form: GgufForm
    source: GgufSource
    adapter: Adapter | None
    """PEFT's adapter that is put on the model."""
    files: dict[GgufFormat, Path]
    adapter_file: Path | None

    def load(self) -> PreTrainedModel | PeftModel:
        """Return the same in Transformers, in float32 on the CPU."""
        model = load_base(
            self.source.model,
            device=torch.device("cpu"),
            compute_dtype=torch.float32,
            attention=self.source.model.attention_needs.stock,
        )
        return model if self.adapter is None else load_adapter(model, self.adapter)


def main(args: argparse.Namespace) -> None:
    settings = ExportConfig.model_validate(args.config["export"])
    llama_cpp = args.converter or Path(str(settings.llama_cpp))
    probes = read_record(args.tokens / "manifest.json", ConversationFacts).probes
    files: list[GgufFile] = []
    with new_folder(args.output) as folder:
        for form in settings.gguf_of:
            served = served_form(args, form, settings.gguf, folder=folder)
            write_models(
                served.source, served.files, llama_cpp=llama_cpp, threads=torch.get_num_threads()
            )
            if served.adapter is not None and served.adapter_file is not None:
                write_adapter(
                    served.adapter, served.source, served.adapter_file, llama_cpp=llama_cpp
                )
            files += checked(served, probes, tokens=args.tokens)
        checks = GgufChecks(files=files, provenance=Provenance.now())
        write_checked_json(folder / "gguf.json", checks.as_json())
        write_checksums(folder)


def served_form(
    args: argparse.Namespace, form: GgufForm, formats: Sequence[GgufFormat], *, folder: Path
) -> Served:
    """Return a form's sources, after a check of its files."""
    if form == "merged":
        check_recorded(listed_files(args.merged))
        files = {name: folder / f"{args.run}-{name}.gguf" for name in formats}
        return Served(form, GgufSource(Checkpoint(args.merged), args.merged), None, files, None)
    check_recorded([*downloaded_files(args.model), *listed_files(args.adapter)])
    files = {name: folder / f"{args.run}-base-{name}.gguf" for name in formats}
    adapter_file = folder / f"{args.run}-adapter.gguf"
    source = GgufSource(Checkpoint(args.model), args.adapter)
    return Served(form, source, Adapter(args.adapter), files, adapter_file)


def checked(served: Served, probes: Sequence[Probe], *, tokens: Path) -> list[GgufFile]:
    """Return the comparisons of a form's files with it in Transformers, which is loaded after
    llama.cpp has ended."""
    tokenizer = load_tokenizer(served.source.tokenizer)
    questions = server_questions(served, tokens)
    results, prompts = {}, 0
    for name, path in served.files.items():
        start = LlamaCppStart(path, served.adapter_file, questions.longest, setting="export.gguf")
        with running(LlamaCppServer, start) as server:
            prompts = check_prompts(server, tokenizer, probes)
            results[name] = ask(
                server, questions, served=BASE if served.adapter is None else ADAPTER
            )
    model = served.load()
    reference = Reference.by(model, tokenizer, questions)
    comparisons = []
    for name, path in served.files.items():
        bounds: Any = {"bound": BOUNDS[name], "rounded": True, "setting": f"export.gguf = {name}"}
        comparison = Comparison(LlamaCppServer.name, questions, reference, results[name], **bounds)
        comparison.worst_document()
        comparison.adapter_effect(model)
        comparison.answer_gap(model)
        adapter = served.adapter_file
        file = GgufFile(
            form=served.form,
            format=name,
            file=path.name,
            bytes=path.stat().st_size,
            adapter=None if adapter is None else adapter.name,
            adapter_bytes=None if adapter is None else adapter.stat().st_size,
            prompts=prompts,
            loss=comparison.loss,
            reference_loss=reference.loss,
            bound=comparison.bound,
            tokens=reference.tokens,
            answers=len(reference.answers),
            equal_answers=comparison.equal_answers(tokenizer),
        )
        log_result(file)
        comparisons.append(file)
    return comparisons


def server_questions(served: Served, tokens: Path) -> ServerQuestions:
    documents = TokenStore.open(tokens).heldout_documents()
    chosen = choose_documents(documents, at_most=DOCUMENTS, seed=SEED)
    prompts = choose_prompts(documents, chosen, count=PROMPTS, seed=SEED)
    how: Any = {"folder": served.source.tokenizer, "most": NEW_TOKENS, "tokens": POSITIONS}
    return ServerQuestions.of(documents, chosen, prompts=prompts, **how)


def log_result(file: GgufFile) -> None:
    logger.info(
        "%s%s: %d prompts with equal token ids; loss of %d tokens %.4f in llama.cpp, %.4f in "
        "Transformers (at most %g apart); %d of %d greedy answers equal",
        file.file, f" with {file.adapter}" if file.adapter else "", file.prompts, file.tokens,
        file.loss, file.reference_loss, file.bound, file.equal_answers, file.answers,
    )  # fmt: skip


if __name__ == "__main__":
    needs = "run adapter tokens output"
    run(main, stage_parser(__doc__, needs=needs, takes="merged model converter"))
