"""Measure what 4 bits of the frozen base cost after training, on one model and its tokens.

Every variant (`bits_after_training.VARIANTS`) and seed becomes a line of the output (JSON Lines);
a repeated call goes on. It prints the table of all that is finished, as CSV.

    python -m workflow.scripts.benchmark_bits --model MODEL --tokens results/tokens/NAME-KEY \\
        --sensitivities results/sensitivities/NAME-KEY.json --calibrated results/base/NAME-KEY \\
        --output bits.jsonl
"""

import argparse
import json
from pathlib import Path

from workflow.benchmark.bits_after_training import (
    VARIANTS,
    BitsBenchmark,
    Recipe,
    finished,
    table,
)
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import Sensitivities
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.planning.preflight.bit_choice import costs_of
from workflow.lib.system.errors import setting_error
from workflow.scripts.command import command_parser, logger, run


def main(args: argparse.Namespace) -> None:
    if not args.sensitivities.is_file():
        change = "A run with quantize.keep = auto makes it below results/sensitivities"
        raise setting_error(
            "--sensitivities", str(args.sensitivities), "there is no such file", change
        )
    costs = costs_of(read_record(args.sensitivities, Sensitivities))
    benchmark = BitsBenchmark(args.model, args.calibrated, TokenStore.open(args.tokens), costs)
    recipe = Recipe(args.steps, args.rows, args.learning_rate, heldout_tokens=args.heldout_tokens)
    for seed in range(args.seeds):
        for variant in (x for x in VARIANTS if x.name in args.variants):
            if (variant.name, seed) in finished(args.output) or not benchmark.can(variant):
                continue
            row = benchmark.measure(variant, seed, recipe)
            with args.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            logger.info("%s, seed %d is measured", variant.name, seed)
    lines = args.output.read_text(encoding="utf-8").splitlines()
    for line in table([json.loads(line) for line in lines]):
        print(*line, sep=",")


def parser() -> argparse.ArgumentParser:
    arguments = command_parser(__doc__, needs="model tokens output")
    arguments.add_argument("--sensitivities", type=Path, required=True, help="of the model")
    arguments.add_argument("--calibrated", type=Path, help="a calibrated base of the model")
    names = [variant.name for variant in VARIANTS]
    arguments.add_argument("--variants", nargs="+", choices=names, default=names)
    arguments.add_argument("--seeds", type=int, default=3, help="trainings of a variant")
    arguments.add_argument("--steps", type=int, default=40, help="of a training")
    arguments.add_argument("--rows", type=int, default=2, help="of a step")
    arguments.add_argument("--learning-rate", type=float, default=5e-4, help="constant")
    arguments.add_argument("--heldout-tokens", type=int, default=2500, help="of a source")
    return arguments


if __name__ == "__main__":
    run(main, parser())
