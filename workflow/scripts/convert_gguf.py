"""Write what was trained as GGUF files, and prove that llama.cpp serves it.

The merged model, or the adapter beside its base (`export.gguf_of`), in each format of
`export.gguf`: made by llama.cpp's own converters (`--llama-cpp`) and quantizer, loaded by
llama.cpp, and compared with the same model in Transformers: token ids of prompts, loss on held-out
documents within a bound, greedy answers. Writes the folder `--output`: the files, `gguf.json` and
`SHA256SUMS`. If a check fails, nothing is exported.
"""

import argparse
import gc
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from workflow.lib.artifacts.gguf_record import GgufChecks, GgufFile
from workflow.lib.artifacts.manifest_record import ConversationFacts, Probe
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import Provenance
from workflow.lib.data.encoding.tokenizer import load_tokenizer
from workflow.lib.data.tokens.token_store import TokenStore, choose_documents
from workflow.lib.distributed.work_sharing import check_recorded
from workflow.lib.evaluation.gguf_checks import Reference, compared, reference
from workflow.lib.evaluation.llama_cpp_server import LlamaCppServer
from workflow.lib.evaluation.served_checks import check_prompts
from workflow.lib.export.gguf_files import GgufSource, write_adapter, write_models
from workflow.lib.export.stock_models import load_adapter, load_base
from workflow.lib.model.architecture.model_files import ON_ORIGINAL
from workflow.lib.quantization.layer_stream import attention_of
from workflow.lib.settings.config import ExportConfig
from workflow.lib.settings.evaluate import GgufForm, GgufFormat
from workflow.lib.system.checksums import downloaded_files, listed_files
from workflow.lib.system.files import (
    put_in_place,
    write_checked_json,
    write_checksums,
)
from workflow.scripts.command import run, stage_parser

logger = logging.getLogger("workflow")

DOCUMENTS, SEED = 64, 0


@dataclass(frozen=True)
class Served:
    """A form of what was trained, and the GGUF files that hold it."""

    form: GgufForm
    source: GgufSource
    adapter: Path | None
    """PEFT's adapter that is put on the model."""
    files: dict[GgufFormat, Path]
    adapter_file: Path | None

    def load(self) -> PreTrainedModel | PeftModel:
        """Return the same in Transformers, in float32 on the CPU."""
        model = load_base(
            self.source.model,
            device=torch.device("cpu"),
            compute_dtype=torch.float32,
            attention=attention_of(self.source.model),
        )
        return model if self.adapter is None else load_adapter(model, self.adapter)


def main(args: argparse.Namespace) -> None:
    settings = ExportConfig.model_validate(args.config["export"])
    partial = args.output.with_name(f".{args.output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    probes = read_record(args.tokens / "manifest.json", ConversationFacts).probes
    files: list[GgufFile] = []
    for form in settings.gguf_of:
        served = served_form(args, form, settings.gguf, folder=partial)
        options = {"llama_cpp": args.llama_cpp, "threads": torch.get_num_threads()}
        write_models(served.source, served.files, **options)
        if served.adapter is not None and served.adapter_file is not None:
            write_adapter(
                served.adapter, served.source, served.adapter_file, llama_cpp=args.llama_cpp
            )
        files += checked(served, probes, tokens=args.tokens)
    checks = GgufChecks(files=files, provenance=Provenance.now())
    write_checked_json(partial / "gguf.json", checks.as_json())
    write_checksums(partial)
    put_in_place(partial, args.output)


def served_form(
    args: argparse.Namespace, form: GgufForm, formats: Sequence[GgufFormat], *, folder: Path
) -> Served:
    """Return what is made of a form, its files intact."""
    if form == "merged":
        check_recorded(listed_files(args.merged))
        files = {name: folder / f"{args.run}-{name}.gguf" for name in formats}
        return Served(form, GgufSource(args.merged, args.merged), None, files, None)
    check_recorded([*downloaded_files(args.model), *listed_files(args.adapter)])
    without_recovery = args.adapter / ON_ORIGINAL
    adapter = without_recovery if without_recovery.is_dir() else args.adapter
    files = {name: folder / f"{args.run}-base-{name}.gguf" for name in formats}
    adapter_file = folder / f"{args.run}-adapter.gguf"
    return Served(form, GgufSource(args.model, args.adapter), adapter, files, adapter_file)


def checked(served: Served, probes: Sequence[Probe], *, tokens: Path) -> list[GgufFile]:
    """Return how the files of a form compare with it in Transformers."""
    expected, vocab_size = in_transformers(served, tokens)
    tokenizer, adapter = load_tokenizer(served.source.tokenizer), served.adapter_file
    longest = max(len(ids) for ids, _ in expected.documents)
    found = []
    for name, path in served.files.items():
        server = LlamaCppServer(
            path,
            adapter=adapter,
            vocab_size=vocab_size,
            context_tokens=max(512, 2 * longest),
            threads=torch.get_num_threads(),
        )
        file = GgufFile(
            form=served.form,
            format=name,
            file=path.name,
            bytes=path.stat().st_size,
            adapter=None if adapter is None else adapter.name,
            adapter_bytes=None if adapter is None else adapter.stat().st_size,
            prompts=check_prompts(server, tokenizer, probes),
            **compared(server, name, expected),
        )
        found.append(file)
        tell(file)
    return found


def in_transformers(served: Served, tokens: Path) -> tuple[Reference, int]:
    """Return what Transformers says of held-out documents, and the size of the vocabulary."""
    documents = TokenStore.open(tokens).heldout_documents()
    chosen = choose_documents(documents, at_most=DOCUMENTS, seed=SEED)
    model = served.load()
    some = [documents[number] for number in chosen]
    found = reference(model, load_tokenizer(served.source.tokenizer), some, seed=SEED)
    vocab_size = int(model.config.get_text_config().vocab_size)
    del model
    gc.collect()  # llama.cpp loads the same weights next
    return found, vocab_size


def tell(file: GgufFile) -> None:
    logger.info(
        "%s%s: %d prompts with equal token ids; loss of %d tokens %.4f in llama.cpp, %.4f in "
        "Transformers (at most %g apart); %d of %d greedy answers equal",
        file.file, f" with {file.adapter}" if file.adapter else "", file.prompts, file.tokens,
        file.loss, file.reference_loss, file.bound, file.equal_answers, file.answers,
    )  # fmt: skip


def parser() -> argparse.ArgumentParser:
    options = stage_parser(__doc__)
    options.add_argument("--run", required=True, help="name of the run")
    options.add_argument("--merged", type=Path, help="folder of the merged model")
    options.add_argument("--model", type=Path, help="folder of the original model")
    options.add_argument("--adapter", type=Path, required=True, help="folder of the adapter")
    options.add_argument("--tokens", type=Path, required=True, help="folder of the tokens")
    options.add_argument("--llama-cpp", type=Path, required=True, help="folder of its converters")
    options.add_argument("--output", type=Path, required=True, help="folder to write")
    return options


if __name__ == "__main__":
    run(main, parser())
