"""Train the adapter: FSDP2 + NF4 + LoRA over the processes that preflight planned.

It starts that many torchrun workers, `finetune_worker`, and reports the cause of the first failed
one."""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workflow.lib.artifacts.preflight_record import Preflight
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.settings.tracking import TrackingConfig
from workflow.lib.system.environment import find_node
from workflow.lib.training.failure_causes import damaged_tokens
from workflow.lib.training.launch import Workers, launch_workers
from workflow.lib.training.live_view import check_tracking
from workflow.scripts.command import run, stage_parser


def main(args: argparse.Namespace) -> None:
    check_tracking(tracking_settings(args.config))
    plan, train = read_record(args.preflight, Preflight).plan, args.config["train"]
    workers = Workers(
        "workflow.scripts.finetune_worker",
        sys.argv[1:],
        processes=plan.processes,
        node=find_node(plan.nodes, os.environ),
        grace_s=train["grace_seconds"],
        deterministic=train["deterministic"],
    )
    launch_workers(workers, inspect_inputs=lambda: damaged_tokens(args.tokens))


def tracking_settings(config: Mapping[str, Any]) -> TrackingConfig:
    """Return the settings of the live view: none without a section of it."""
    return TrackingConfig.model_validate(config.get("tracking", {"tensorboard": False}))


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the stage's options, which its workers get too."""
    needs = "run base tokens preflight checkpoints output"
    parser = stage_parser(description, needs=needs, takes="scores start")
    parser.add_argument(
        "--tracking", type=Path, default=Path("results"), help="folder of the live view"
    )
    parser.add_argument(
        "--timeout-s", type=float, default=1800.0, help="seconds until a collective counts as hung"
    )
    return parser


if __name__ == "__main__":
    run(main, command_line(__doc__), locks_itself=True)  # a worker locks the checkpoints
