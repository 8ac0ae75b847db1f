"""Translate a config of another trainer into a config of this workflow.

  python -m workflow.scripts.import_config qlora.yml --gpus 2x4090

It reads YAML files of axolotl, LLaMA-Factory and TRL's command line. It lists the outcome of each
key, writes the config, and asks preflight whether it fits these GPUs. Keys without any equivalent
(a training of all weights, pictures) are refused.
"""

import argparse
from pathlib import Path
from typing import Any, get_args

import yaml

from workflow.importing.draft import Draft, label
from workflow.importing.reading import Kind, TrainerName, read_source
from workflow.importing.rules import translate
from workflow.importing.written_config import check_is_new, finish
from workflow.lib.settings.config import NOT_VALID, load_config
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import write_text
from workflow.lib.system.gpu_models import parse_gpus
from workflow.lib.system.redaction import redacted
from workflow.scripts.command import command_parser, logger, run


def main(args: argparse.Namespace) -> None:
    count = parse_gpus(args.gpus, setting="--gpus")[0] if args.gpus else None
    draft = translate(read_source(args.file, args.trainer), gpus=count)
    document = checked(draft)
    output = args.output or Path(f"config-{label(args.file.stem)}.yaml")
    check_is_new(output)
    text = account(draft)
    logger.info("%s", text)
    comment = "".join(f"# {line}".rstrip() + "\n" for line in redacted(text).splitlines())
    write_text(output, comment + yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
    if args.gpus is None:
        logger.info("no verdict, as no GPUs are named: --gpus 2x4090 asks preflight")
    finish(document, output, gpus=args.gpus, rows=None)


def checked(draft: Draft) -> dict[str, Any]:
    """Return the config for the settings loader. Raises `UserError` with all refused keys, and for
    values that our settings refuse, by the names of the file's keys."""
    file, title = draft.source.file, draft.own_table.title
    if refused := by_reason(draft, "refused"):
        lines = "\n  ".join(f"{', '.join(keys)}: {why}." for why, keys in refused.items())
        raise UserError(f"{file}: this file of {title} cannot be taken over:\n  {lines}")
    document = draft.document | {"runs": {label(file.stem): {}}}
    try:
        load_config(document)
    except UserError as error:
        reason = str(error).removeprefix(NOT_VALID)
        for setting, keys in draft.came_from.items():
            if keys:
                reason = reason.replace(f"  {setting} ", f"  {keys} ({setting}) ")
        raise UserError(f"{file}: values of this file of {title} are not valid:{reason}") from None
    return document


def account(draft: Draft) -> str:
    """Return the account of all keys, by outcome."""
    source = draft.source
    lines = [f"{source.file}: {len(source.values)} keys of {draft.own_table.title}"]
    for kind in get_args(Kind):
        reasons = by_reason(draft, kind)
        lines += [f"{kind}:"] if reasons else []
        lines += [f"  {', '.join(k)} -> {why}" if k else f"  {why}" for why, k in reasons.items()]
    return "\n".join(lines)


def by_reason(draft: Draft, kind: Kind) -> dict[str, list[str]]:
    """Return the keys of this outcome, by reason."""
    reasons: dict[str, list[str]] = {}
    for outcome in draft.outcomes:
        if outcome.kind == kind:
            reasons.setdefault(outcome.why, []).extend(outcome.keys)
    return reasons


def arguments() -> argparse.ArgumentParser:
    parser = command_parser(__doc__)
    parser.add_argument("file", type=Path, help="YAML file of another trainer")
    parser.add_argument(
        "--from", dest="trainer", choices=get_args(TrainerName), help="whose it is (by its keys)"
    )
    parser.add_argument("--gpus", help="number and kind of GPUs of a node, like 2x4090 or 8xH100")
    parser.add_argument("--output", type=Path, help="config to write (config-<name>.yaml)")
    return parser


if __name__ == "__main__":
    run(main, arguments())
