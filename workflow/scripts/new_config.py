"""Write the least config for a model, a data file and GPUs, with the reason of each value.

  python -m workflow.scripts.new_config --model Qwen/Qwen2.5-7B-Instruct --data chats.jsonl \\
      --gpus 2x4090 --output mine.yaml

It reads the whole file as the training does, shows documents as the model sees them, takes length,
rank, rate, epochs and batch from the guide (workflow/docs/choose-settings.md), writes the config,
and asks preflight whether it fits these GPUs. Nothing is trained, and no weights are downloaded.
"""

import argparse
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml
from huggingface_hub import snapshot_download
from rich.console import Console

from workflow.importing.guide import LENGTHS, Method, seq_len_for, settings_for
from workflow.importing.written_config import check_is_new, finish
from workflow.lib.checkpoints.files.model_files import CONFIG, TOKENIZER_PATTERNS
from workflow.lib.checkpoints.tokenizer import default_template, load_tokenizer
from workflow.lib.data.reading.hub_download import Source, explained_errors
from workflow.lib.data.reading.sources import find_files
from workflow.lib.data.tokens.manifest_log import show_samples
from workflow.lib.data.tokens.token_store import MANIFEST
from workflow.lib.planning.preflight.what_if import find_config
from workflow.lib.settings.config import RunConfig, load_config
from workflow.lib.settings.objectives import needs_of
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_checked_json, write_checked_json, write_text
from workflow.lib.system.gpu_models import parse_gpus
from workflow.lib.system.redaction import redacted
from workflow.scripts.command import command_parser, logger, run

STAND_IN = Path(__file__).parents[1] / "resources" / "base"
PLAIN_TEMPLATE = "workflow/resources/templates/plain.jinja"
USUAL_WIDTH = 4096  # where config.json names it otherwise
REASONS = {
    "chat_template": "roles as words; answers end with the end-of-text token",
    "seq_len": "tokens of a packed row: holds the documents above",
    "r": "rank of the adapter",
    "epochs": "passes over the data",
    "global_batch_size": "rows of a step, over all GPUs",
    "learning_rate": "the peak",
}
DEFAULTS = "# All other settings have their defaults: workflow/docs/configuration.md"


class Tokenizer(NamedTuple):
    """Folder of a tokenizer; why it is not the model's own; the template that it lacks."""

    folder: Path
    stand_in: str | None
    template: str | None


def main(args: argparse.Namespace) -> None:
    gpus = parse_gpus(args.gpus, setting="--gpus")[0] if args.gpus else 1
    check_is_new(args.output)
    find_files(args.data, setting="--data", root=Path())
    longest, width = read_sizes(args.model)
    tokenizer = tokenizer_of(args.model)
    data = {"train": args.data, "chat_template": tokenizer.template, "seq_len": longest}
    document: dict[str, Any] = {"model": {"source": args.model}, "data": data}
    facts = inspected(document | {"train": {"objective": args.method}}, tokenizer.folder)
    if facts["chat_template"] is None:  # rows of plain text
        data["chat_template"] = None
    data["seq_len"] = seq_len_for(row_lengths(facts), longest=longest)
    train = facts["splits"]["train"]
    rows = math.ceil(train["tokens"] / data["seq_len"])
    trained = train["trained_tokens"]
    guided = settings_for(
        args.method, trained_tokens=trained, packed_rows=rows, hidden_size=width, gpus=gpus
    )
    document = least(document | guided)
    account = account_of(facts, args.data, tokenizer)
    write_config(args.output, document, account)
    if tokenizer.stand_in is None:
        show_samples(facts, Console())
    logger.info("\n%s", "\n".join(account))
    finish(document, args.output, gpus=args.gpus, rows=rows)


def read_sizes(model: str) -> tuple[int, int]:
    """Return the longest row that a model reads, and its width (hidden_size)."""
    config = find_config(model, revision=None)
    config = config.get("text_config") or config
    positions = config.get("max_position_embeddings") or LENGTHS[-1]
    return min(positions, LENGTHS[-1]), config.get("hidden_size", USUAL_WIDTH)


def tokenizer_of(model: str) -> Tokenizer:
    """Return the tokenizer of a folder or of a hub model, without its weights. Where the hub does
    not give it, the demo's stands in for it."""
    folder = Path(model)
    if not folder.is_dir():
        try:
            with explained_errors(Source(model, None, "model")):
                patterns = [CONFIG, *TOKENIZER_PATTERNS]
                folder = Path(snapshot_download(model, allow_patterns=patterns))
        except UserError as error:
            return Tokenizer(STAND_IN, str(error), None)
    missing = default_template(load_tokenizer(folder)) is None
    return Tokenizer(folder, None, PLAIN_TEMPLATE if missing else None)


def inspected(document: dict[str, Any], tokenizer: Path) -> dict[str, Any]:
    """Return the manifest of a config's data as tokens. Raises `UserError` with the message of
    `tokenize_dataset`; its list of unusable rows is then kept."""
    (settings,) = load_config(document | {"runs": {"new": {}}})[1].values()
    examples = needs_of(settings.train.objective).examples
    config = {"data": settings.data.model_dump(mode="json"), "examples": examples}
    folder = Path(tempfile.mkdtemp(prefix="new_config-"))
    write_checked_json(folder / "settings.json", config)
    command = [sys.executable, "-m", "workflow.scripts.tokenize_dataset"]
    command += ["--config", str(folder / "settings.json"), "--tokenizer", str(tokenizer)]
    command += ["--output", str(folder / "tokens")]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise UserError(done.stderr.strip())
    facts = read_checked_json(folder / "tokens" / MANIFEST)
    shutil.rmtree(folder)
    return facts


def row_lengths(facts: dict[str, Any]) -> dict[str, int]:
    """Return the percentiles of the tokens that a packed row needs for an example."""
    documents = 1 if facts["examples"] == "texts" else 2
    percentiles = facts["splits"]["train"]["length_percentiles"]
    return {name: length * documents for name, length in percentiles.items()}


def least(document: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from the defaults, and the required ones."""
    default = RunConfig().model_dump(mode="json")
    return {
        section: left
        for section, values in document.items()
        if (left := {k: v for k, v in values.items() if v != default[section][k]})
    }


def account_of(facts: dict[str, Any], data: str, tokenizer: Tokenizer) -> list[str]:
    """Return lines about the rows, and about what was assumed."""
    train, heldout = facts["splits"]["train"], facts["splits"]["heldout"]
    lengths, unread = train["length_percentiles"], facts["sources"][0]["not_read"]
    lines = [
        f"{data}: {facts['format']}; {train['documents']:,} documents to train on, "
        f"{heldout['documents']:,} held out, {train['rows_dropped']:,} rows dropped",
        f"{train['tokens']:,} tokens, {train['trained_tokens']:,} of them trained; a document has "
        f"{lengths['p50']:,} (median), 99% have at most {lengths['p99']:,}, "
        f"the longest {lengths['max']:,}",
    ]
    lines += [f"dropped {n}: {reason}" for reason, n in facts["dropped_by_reason"].items()]
    if unread:
        lines.append(f"not read: {', '.join(unread)}")
    if tokenizer.template and facts["chat_template"] is not None:
        lines.append(
            "the tokenizer has no chat template: this is a base model, see choose-settings.md"
        )
    if tokenizer.stand_in:
        lines.append("these are tokens of the demo's tokenizer, as the model's cannot be read:")
        lines.append(f"  {tokenizer.stand_in}")
    return lines


def write_config(output: Path, document: dict[str, Any], account: list[str]) -> None:
    """Write the settings below the account as comments, and a comment for what a setting is."""
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    lines = [f"# {line}" for line in redacted("\n".join(account)).splitlines()]
    for line in text.splitlines():
        why = REASONS.get(line.strip().partition(":")[0], "")
        lines.append(f"{line:<38}  # {why}" if why else line)
    write_text(output, "\n".join([*lines, DEFAULTS, ""]))


def arguments() -> argparse.ArgumentParser:
    parser = command_parser(__doc__)
    parser.add_argument("--model", required=True, help="folder of the model, or hub id owner/name")
    parser.add_argument("--data", required=True, help="file, folder or glob of the training data")
    parser.add_argument("--gpus", help="number and kind of GPUs of a node, like 2x4090 or 8xH100")
    parser.add_argument("--method", choices=get_args(Method), default="sft", help="(%(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("mine.yaml"), help="config to write (%(default)s)"
    )
    return parser


if __name__ == "__main__":
    run(main, arguments())
