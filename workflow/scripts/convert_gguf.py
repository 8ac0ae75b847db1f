"""Write the merged model as GGUF files, and prove that llama.cpp serves what was trained.

Each file of `export.gguf` is made by llama.cpp's own converter (`export.llama_cpp`), loaded by
llama.cpp, and held against the merged model in Transformers: token ids of prompts, loss on held-out
documents within a bound, greedy answers. Writes the folder `--output`: the files, Ollama's
`Modelfile`, `gguf.json` and `SHA256SUMS`. If a check fails, nothing is exported.
"""

import argparse
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from workflow.lib.artifacts.gguf_record import GgufChecks, GgufFile
from workflow.lib.artifacts.manifest_record import ConversationFacts
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import Provenance
from workflow.lib.data.encoding.tokenizer import load_tokenizer
from workflow.lib.data.tokens.token_store import TokenStore, choose_documents
from workflow.lib.distributed.work_sharing import check_recorded
from workflow.lib.evaluation.gguf_checks import Reference, check_prompts, compared, reference
from workflow.lib.evaluation.llama_cpp_server import LlamaCppServer
from workflow.lib.export.adapter_files import GENERATION_CONFIG
from workflow.lib.export.gguf_files import convert
from workflow.lib.export.ollama_file import Message, TurnTexts, modelfile, turn_texts
from workflow.lib.export.stock_models import load_base
from workflow.lib.quantization.layer_stream import attention_of
from workflow.lib.settings.config import ExportConfig
from workflow.lib.system.checksums import listed_files
from workflow.lib.system.files import (
    put_in_place,
    read_json,
    write_checksums,
    write_json,
    write_text,
)
from workflow.scripts.command import run, stage_parser

logger = logging.getLogger("workflow")

DOCUMENTS, SEED = 64, 0


def main(args: argparse.Namespace) -> None:
    settings = ExportConfig.model_validate(args.config["export"])
    partial = args.output.with_name(f".{args.output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    facts = read_record(args.tokens / "manifest.json", ConversationFacts)
    check_recorded(listed_files(args.merged))
    expected, vocab_size = in_transformers(args)
    tokenizer = load_tokenizer(args.merged)
    files: dict[str, GgufFile] = {}
    for name in settings.gguf:
        path = partial / f"{args.run}-{name}.gguf"
        convert(args.merged, path, outtype=name, llama_cpp=Path(str(settings.llama_cpp)))
        longest = max(len(prompt) for prompt, *_ in expected.positions)
        server = LlamaCppServer(path, context_tokens=max(512, 2 * longest))
        prompts = check_prompts(server, tokenizer, facts.probes)
        files[name] = compared(server, path, expected, format_name=name, vocab_size=vocab_size)
        tell(name, files[name], prompts)
    texts = ollama_texts(args.merged)
    write_modelfile(partial, files, texts, args.merged)
    checks = GgufChecks(
        files=files, prompts=prompts, modelfile=texts is not None, provenance=Provenance.now()
    )
    write_json(partial / "gguf.json", checks.as_json())
    write_checksums(partial)
    put_in_place(partial, args.output)


def in_transformers(args: argparse.Namespace) -> tuple[Reference, int]:
    """Return what Transformers says of held-out documents with the merged model, and the size of
    its vocabulary.
    """
    documents = TokenStore.open(args.tokens).heldout_documents()
    chosen = choose_documents(documents, at_most=DOCUMENTS, seed=SEED)
    model = load_base(
        args.merged,
        device=torch.device("cpu"),
        compute_dtype=torch.float32,
        attention=attention_of(args.merged),
    )
    some = [documents[number] for number in chosen]
    found = reference(model, load_tokenizer(args.merged), some, seed=SEED)
    return found, int(model.config.get_text_config().vocab_size)


def ollama_texts(merged: Path) -> TurnTexts | None:
    """Return the fixed texts of the trained template, if it is of the kind that Ollama can have."""
    tokenizer = load_tokenizer(merged)

    def render(messages: Sequence[Message], asking: bool) -> str:
        conversation = [dict(message) for message in messages]
        return str(
            tokenizer.apply_chat_template(
                conversation, add_generation_prompt=asking, tokenize=False
            )
        )

    return turn_texts(render) if tokenizer.chat_template else None


def write_modelfile(
    folder: Path, files: dict[str, GgufFile], texts: TurnTexts | None, merged: Path
) -> None:
    """Write the `Modelfile` of the first file."""
    generation = read_json(merged / GENERATION_CONFIG)
    tokenizer = load_tokenizer(merged)
    ends = [str(tokenizer.convert_ids_to_tokens(end)) for end in generation["eos_token_id"]]
    first = next(iter(files.values()))
    write_text(folder / "Modelfile", modelfile(first.file, texts, ends=ends, generation=generation))
    if texts is None:
        logger.warning("the chat template could not be written in Ollama's language")


def tell(name: str, file: GgufFile, prompts: int) -> None:
    """Say what came out."""
    logger.info(
        "%s: %d prompts with equal token ids; loss %.4f in llama.cpp, %.4f in Transformers (at "
        "most %g apart); the same most likely token at %.1f%% of %d positions; %d of %d greedy "
        "answers equal",
        name, prompts, file.loss, file.reference_loss, file.bound,
        100 * file.same_most_likely, file.positions, file.equal_answers, file.answers,
    )  # fmt: skip


if __name__ == "__main__":
    parser = stage_parser(__doc__)
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--merged", type=Path, required=True, help="folder of the merged model")
    parser.add_argument("--tokens", type=Path, required=True, help="folder of the tokens")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    run(main, parser)
