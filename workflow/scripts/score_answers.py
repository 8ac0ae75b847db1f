"""Score the sampled answers of a round by reward functions, in processes of their own.

Only this stage and those after it run again when a reward changes. An answer without a reward has
a reason in its line; it is counted, and not trained."""

import argparse
from collections import Counter
from pathlib import Path

from workflow.lib.artifacts.read_records import read_records
from workflow.lib.data.tokens.process_pool import available_processes
from workflow.lib.rounds.answers import AnsweredPrompt, read_answers
from workflow.lib.rounds.reward_processes import Scored, score, total
from workflow.lib.rounds.rewards import (
    RewardLine,
    equal_groups,
    heldout_gains,
    mean_of,
    mean_rewards,
)
from workflow.lib.settings.config import RewardsConfig
from workflow.lib.system.checksums import write_lines
from workflow.lib.system.errors import UserError
from workflow.lib.system.progress import Progress
from workflow.scripts.command import logger, run, stage_parser


def main(args: argparse.Namespace) -> None:
    settings = RewardsConfig.model_validate(args.config["rewards"])
    prompts = read_answers(args.answers)
    calls = [
        (prompt.text, answer.text, prompt.values) for prompt in prompts for answer in prompt.answers
    ]
    with Progress("rewards", total=len(calls), unit="answers") as progress:
        scored, printed = score(calls, settings, processes=args.processes, on_scored=progress.add)
    check_failures(scored, printed)
    lines = lines_of(prompts, scored, settings)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_lines(args.output, (line.as_json() for line in lines))
    tell(lines, read_records(args.first, RewardLine) if args.first else None)


def check_failures(scored: list[Scored], printed: str) -> None:
    """Tell failures and prints; raise `UserError` if every answer failed."""
    reasons = Counter(reason for one in scored for reason in one.failures.items())
    failed = sum(bool(one.failures) for one in scored)
    listed = "; ".join(
        f"{name} {reason} ({count})" for (name, reason), count in reasons.most_common(3)
    )
    if failed == len(scored):
        raise UserError(
            f"rewards.functions: none of {failed} answers got a reward: {listed}. Mend the "
            "function; only score_answers runs again."
        )
    if failed:
        logger.warning(
            "%d of %d answers have no reward and are not trained: %s", failed, len(scored), listed
        )
    if printed:
        logger.warning("reward functions printed: %s", printed.splitlines()[0])


def lines_of(
    prompts: list[AnsweredPrompt], scored: list[Scored], settings: RewardsConfig
) -> list[RewardLine]:
    results, lines = iter(scored), []
    for prompt in prompts:
        own = [next(results) for _ in prompt.answers]
        lines.append(
            RewardLine(
                split=prompt.split,
                rewards=[total(one, settings.functions) for one in own],
                numbers=[one.numbers for one in own],
                failures=[one.failures for one in own],
            )
        )
    return lines


def tell(lines: list[RewardLine], first: list[RewardLine] | None) -> None:
    """Log means with intervals. first: rewards of the first round, to the same held-out prompts."""
    by_label = {
        f"mean reward of %d {split} prompts": mean_rewards(lines, split=split)
        for split in ("train", "heldout")
    }
    if first is not None:
        by_label["gain of %d heldout prompts since the first round"] = heldout_gains(first, lines)
    for words, values in by_label.items():
        if (mean := mean_of(values)) is not None:
            interval = "" if mean.ci95 is None else " [{:.3f}, {:.3f}]".format(*mean.ci95)
            logger.info(f"{words}: %.3f%s", len(values), mean.value, interval)
    if (counts := equal_groups(lines))[1]:
        logger.info("%d of %d training prompts have answers of equal rewards", *counts)


if __name__ == "__main__":
    parser = stage_parser(__doc__, needs="output")
    parser.add_argument(
        "--first", type=Path, nargs="?", help="rewards of the first round, to compare with"
    )
    parser.add_argument("--answers", type=Path, required=True, help="folder of the answers")
    parser.add_argument(
        "--processes", type=int, default=available_processes(), help="how many score at once"
    )
    run(main, parser)
