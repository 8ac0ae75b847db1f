"""Ask the real server, before hours go into a training, whether it serves what would be exported.

It gets a narrow random model of the family and, unless a merged model is served, an adapter of the
run's settings, written by the export's own code. What it refuses ends here in its own words, and so
does an adapter of which it leaves out a kind of module. Writes `servable.json`, of which the folder
is named by the settings that matter and the server's version: they are tried once.
"""

import argparse
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel

from workflow.lib.data.encoding.tokenizer import load_tokenizer
from workflow.lib.evaluation.evaluated_models import load_options
from workflow.lib.evaluation.llama_cpp_server import BOUNDS, LlamaCppServer, LlamaCppStart
from workflow.lib.evaluation.model_server import running
from workflow.lib.evaluation.served_checks import (
    WHOLE,
    Asked,
    Comparison,
    Known,
    Said,
    ask,
    write_parts,
)
from workflow.lib.evaluation.vllm_server import VllmServer, VllmStart, slots
from workflow.lib.export.gguf_files import GgufSource, write_adapter, write_models
from workflow.lib.export.narrow_model import write_narrow_adapter, write_narrow_model
from workflow.lib.export.parity import RELATIVE_TOLERANCE
from workflow.lib.export.stock_models import load_adapter, load_base
from workflow.lib.model.backends import choose_device
from workflow.lib.settings.config import LoraSettings, ModelConfig
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import provenance, write_checked_json
from workflow.scripts.command import run, stage_parser

TEXT = __doc__.partition("\n\n")[2]  # for the comparison of log-probabilities
TOKENS = 48

logger = logging.getLogger("workflow")


def main(args: argparse.Namespace) -> None:
    settings = ModelConfig.model_validate(args.config["model"])
    options = load_options(args.model, device=choose_device(), settings=settings)
    with tempfile.TemporaryDirectory(prefix="servable-") as name:
        model, adapter = Path(name) / "model", Path(name) / "adapter"
        write_narrow_model(args.model, model, dtype=options["compute_dtype"])
        parts, rank = {}, None
        if args.served != "merged":
            lora = LoraSettings.model_validate(args.config["lora"])
            rank = write_narrow_adapter(model, lora, adapter)
            parts = write_parts(adapter, Path(name) / "parts")
        asked = questions(model)
        serve = in_vllm if args.llama_cpp is None else in_gguf
        with explained_before_training(args):
            how = {"rank": rank, "dtype": options["compute_dtype"]}
            server, said = serve(args, asked, model, parts, **how)
        stock = load_base(model, **options)
        known = Known.by(stock, load_tokenizer(model), asked)
        logits = stock(torch.tensor([asked.compared[0][0].tolist()]).to(stock.device)).logits
        rms = float(logits.detach().float().square().mean().sqrt())
        bound = 2 * RELATIVE_TOLERANCE[options["compute_dtype"]] * rms
        bound = bound if args.llama_cpp is None else BOUNDS["f32"]
        comparison = Comparison(server, asked, known, said, bound=bound)
        tuned = stock if not parts else load_adapter(stock, adapter)
        with explained_before_training(args):
            if isinstance(tuned, PeftModel):
                found = comparison.parts(tuned, parts)
            else:
                found, _ = [], comparison.worst_document()
    shares = {part.part: part.share for part in found}
    record = {"server": server, "parts": shares, "provenance": provenance()}
    write_checked_json(args.output, record)
    acts = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    logger.info("%s serves a narrow model of this family%s", server, acts and f" as PEFT: {acts}")


@contextmanager
def explained_before_training(args: argparse.Namespace) -> Iterator[None]:
    """Add to a server's refusal what was tried, and what would be served."""
    try:
        yield
    except UserError as error:
        form, cure = "of it, merged", "Set export.serve to none"
        if args.served != "merged":
            lora = LoraSettings.model_validate(args.config["lora"])
            form = f"with an adapter of lora = {lora.model_dump(exclude_defaults=True)}"
            cure = "Change lora, set export.merged to true, or export.serve to none"
        raise UserError(
            f"{error}\nThis was tried before the training on a narrow random model of the family, "
            f"{form}. {cure}."
        ) from None


def questions(model: Path) -> Asked:
    ids = np.array(load_tokenizer(model)(TEXT, add_special_tokens=False)["input_ids"][:TOKENS])
    return Asked({0: (ids, np.arange(len(ids)) > 0)}, prompts=[], stop_ids=[], most=0)


def in_vllm(
    args: argparse.Namespace, asked: Asked, model: Path, parts: dict[str, Path], **how: Any
) -> tuple[str, Said]:
    start = VllmStart(
        python=args.python,
        model=model,
        tokenizer=model,
        dtype=str(how["dtype"]).removeprefix("torch."),
        max_tokens=asked.longest,
        max_lora_rank=how["rank"] and slots(how["rank"]),
        gpus=int(choose_device().type == "cuda"),
    )
    with running(VllmServer, start) as server:
        for part, path in parts.items():
            server.load_adapter(part, path)
        return f"{server.name} {server.version}", ask(server, asked, parts)


def in_gguf(
    args: argparse.Namespace, asked: Asked, model: Path, parts: dict[str, Path], **_: Any
) -> tuple[str, Said]:
    """llama.cpp has one adapter, the whole."""
    file, adapter = model.with_suffix(".gguf"), None
    source = GgufSource(model, model)
    write_models(source, {"f32": file}, llama_cpp=args.llama_cpp, threads=torch.get_num_threads())
    for name in [*parts][1:]:
        del parts[name]
    if parts:
        adapter = model.with_name("adapter.gguf")
        write_adapter(parts[WHOLE], source, adapter, llama_cpp=args.llama_cpp)
    start = LlamaCppStart(file, adapter, asked.longest, "export.serve")
    with running(LlamaCppServer, start) as server:
        return f"{server.name} {server.version}", ask(server, asked, parts)


if __name__ == "__main__":
    parser = stage_parser(__doc__, needs="model output", takes="python llama_cpp")
    parser.add_argument("--served", required=True, help="which model will be served")
    run(main, parser)
