"""Make the tokens of a round of sampled answers and their rewards.

The objective decides what is trained: the best answer to each prompt (texts), the best against the
worst (pairs), or all with advantages (groups). Held-out documents are those of the rows; of pairs,
those of held-out prompts."""

import argparse
from pathlib import Path

from workflow.lib.artifacts.read_records import read_records
from workflow.lib.checkpoints.tokenizer import load_tokenizer
from workflow.lib.data.tokens.group_rows import write_groups
from workflow.lib.data.tokens.token_store import TokenStore, recorded_arrays
from workflow.lib.rounds.answers import read_answers
from workflow.lib.rounds.packing import check_signal, trained_groups
from workflow.lib.rounds.rewards import RewardLine, groups_of
from workflow.lib.settings.config import DataConfig, RewardsConfig
from workflow.lib.settings.objectives import Examples
from workflow.lib.system.checksums import check_files
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import new_folder
from workflow.scripts.command import logger, run, stage_parser


def main(args: argparse.Namespace) -> None:
    settings = RewardsConfig.model_validate(args.config["rewards"])
    data = DataConfig.model_validate(args.config["data"])
    examples: Examples = args.config.get("examples", "texts")
    check_files(recorded_arrays(args.tokens, TokenStore.open(args.tokens).manifest))
    prompts = read_answers(args.answers)
    rounds = [read_records(path, RewardLine) for path in (args.rewards, *args.earlier)]
    check_signal(rounds, settings)
    train, heldout = (
        trained_groups(
            groups_of(prompts, rounds[0], split=split), examples, settings, seq_len=data.seq_len
        )
        for split in ("train", "heldout")
    )
    for split, groups in (("training", train), ("held-out", heldout)):
        if not groups and (examples == "pairs" or groups is train):
            raise UserError(
                f"No {split} prompt has two answers with rewards that fit into a row, so there is "
                "nothing to train on or to measure. Mend the reward functions, or raise "
                "answers.per_prompt or data.seq_len."
            )
    with new_folder(args.output) as folder:
        facts = write_groups(
            folder,
            train,
            texts=args.tokens,
            seq_len=data.seq_len,
            seed=data.seed,
            tokenizer=load_tokenizer(args.tokenizer),
            examples=examples,
            heldout=heldout,
        )
    split = facts["splits"]["train"]
    logger.info(
        "%d answers to %d prompts in %d rows, %d trained tokens",
        split["documents"],
        split["rows_read"],
        split["packed_rows"],
        split["trained_tokens"],
    )


if __name__ == "__main__":
    parser = stage_parser(__doc__, needs="tokens tokenizer output")
    parser.add_argument("--answers", type=Path, required=True, help="folder of the answers")
    parser.add_argument("--rewards", type=Path, required=True, help="their rewards")
    parser.add_argument(
        "--earlier",
        type=Path,
        nargs="*",
        default=[],
        help="rewards of the rounds before, the last one first",
    )
    run(main, parser)
