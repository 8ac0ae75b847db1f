"""Serve what was exported by the real server, and compare it with the evaluation and with PEFT.

vLLM, in its own environment (`make serving`), loads the adapter on the original model, or the
merged model. By its OpenAI interface: token ids of prompts, held-out losses, greedy answers, and
that each kind of module of the adapter acts. Then Transformers and PEFT are asked the same. Writes
`served.json`; ends with the server's own words where it refuses what was exported.
"""

import argparse
import logging
import tempfile
from pathlib import Path

from peft import PeftModel

from workflow.lib.artifacts.evaluation_record import Evaluation
from workflow.lib.artifacts.manifest_record import ConversationFacts, Probe
from workflow.lib.artifacts.parity_record import Parity
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import Provenance
from workflow.lib.artifacts.served_record import ServedCheck
from workflow.lib.data.encoding.tokenizer import load_tokenizer
from workflow.lib.data.tokens.token_store import TokenStore, recorded_arrays
from workflow.lib.distributed.work_sharing import check_recorded
from workflow.lib.evaluation.evaluated_models import load_options
from workflow.lib.evaluation.questions import Model
from workflow.lib.evaluation.served_checks import Asked, Comparison, ask, check_prompts, write_parts
from workflow.lib.evaluation.vllm_server import Start, slots, vllm_server
from workflow.lib.export.adapter_files import check_conversations
from workflow.lib.export.stock_models import load_adapter, load_base
from workflow.lib.model.architecture.model_files import ON_ORIGINAL
from workflow.lib.model.backends import choose_device
from workflow.lib.quantization.nf4_checkpoint import read_settings
from workflow.lib.settings.config import EvaluateConfig, ModelConfig
from workflow.lib.settings.subjects import SUBJECT_LABELS, SUBJECTS
from workflow.lib.system.checksums import downloaded_files, listed_files
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
            *([] if args.merged else listed_files(without_recovery(args.adapter))),
            *downloaded_files(args.merged or args.model),
            *recorded_arrays(args.tokens, store.manifest),
        ]
    )
    parity = read_record(args.parity, Parity)
    asked = Asked.of(
        read_record(args.evaluation / f"{args.served}.json", Evaluation),
        store.heldout_documents(),
        folder=exported,
        most=EvaluateConfig.model_validate(args.config["evaluate"]).max_new_tokens,
    )
    start = how_to_start(args, parity, asked)
    with tempfile.TemporaryDirectory(prefix="parts-") as folder:
        parts = {} if args.merged else write_parts(without_recovery(args.adapter), Path(folder))
        with vllm_server(start) as server:
            name = f"{server.name} {server.version}"
            logger.info("%s serves %s in %s", name, SUBJECT_LABELS[args.served], start.dtype)
            for part, path in parts.items():
                server.load_adapter(part, path)
            check_conversations(exported, probes(args.tokens))
            prompts = check_prompts(server, load_tokenizer(exported), probes(args.tokens))
            said = ask(server, asked, parts)
        comparison = Comparison(name, asked, said, bound=2 * parity.tolerance)
        worst = comparison.worst_document()
        model = loaded(args)
        check = ServedCheck(
            server=name,
            subject=args.served,
            compute_dtype=start.dtype,
            max_lora_rank=start.max_lora_rank,
            documents=len(said.losses),
            loss=comparison.loss,
            evaluated_loss=asked.heldout.loss,
            trained_loss=trained_loss(args.evaluation / "tuned.json"),
            bound=comparison.bound,
            worst_document=worst,
            prompts=prompts,
            parts=comparison.parts(model, parts) if isinstance(model, PeftModel) else [],
            answers=len(said.answers),
            equal_answers=comparison.equal_answers(load_tokenizer(exported)),
            answer_gap=comparison.answer_gap(model),
            provenance=Provenance.now(),
        )
    write_checked_json(args.output, check.as_json())
    logger.info("%s", check.told)


def how_to_start(args: argparse.Namespace, parity: Parity, asked: Asked) -> Start:
    rank = None
    if not args.merged:
        ranks = read_settings(without_recovery(args.adapter) / "adapter_config.json")
        rank = slots(max([ranks["r"], *(ranks.get("rank_pattern") or {}).values()]))
    return Start(
        python=args.python,
        model=args.merged or args.model,
        tokenizer=args.merged or args.adapter,
        dtype=parity.compute_dtype,
        max_tokens=asked.longest,
        max_lora_rank=rank,
        gpus=len(visible_gpus()) if choose_device().type == "cuda" else 0,
    )


def without_recovery(adapter: Path) -> Path:
    """Return the adapter that belongs on the original."""
    folder = adapter / ON_ORIGINAL
    return folder if folder.is_dir() else adapter


def probes(tokens: Path) -> list[Probe]:
    return read_record(tokens / "manifest.json", ConversationFacts).probes


def loaded(args: argparse.Namespace) -> Model:
    """Return what is served, in Transformers."""
    folder = args.merged or args.model
    settings = ModelConfig.model_validate(args.config["model"])
    model = load_base(folder, **load_options(folder, device=choose_device(), settings=settings))
    return model if args.merged else load_adapter(model, without_recovery(args.adapter))


def trained_loss(path: Path) -> float | None:
    """Return the loss of the adapter on the base of its training, if the evaluation measured it."""
    found = read_record(path, Evaluation).heldout if path.is_file() else None
    return None if found is None else found.loss


if __name__ == "__main__":
    parser = stage_parser(__doc__)
    parser.add_argument("--python", type=Path, required=True, help="Python of the server")
    parser.add_argument("--served", choices=SUBJECTS, required=True, help="which is served")
    parser.add_argument("--model", type=Path, help="folder of the original model")
    parser.add_argument("--merged", type=Path, help="folder of the merged model")
    parser.add_argument("--adapter", type=Path, required=True, help="folder of the adapter")
    parser.add_argument("--parity", type=Path, required=True, help="parity.json of the export")
    parser.add_argument("--evaluation", type=Path, required=True, help="the run's evaluation")
    parser.add_argument("--tokens", type=Path, required=True, help="folder of the tokens")
    parser.add_argument("--output", type=Path, required=True, help="served.json to write")
    run(main, parser)
