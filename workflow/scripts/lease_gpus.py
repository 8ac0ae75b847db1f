"""Become another program that sees GPUs which no other job has.

Usage: `lease_gpus --count 2 --log FILE -- command ...`. The cards are locked and named in
CUDA_VISIBLE_DEVICES, and the command replaces this process, locks included. With --count 0 it sees
no GPU. This is no stage: it starts stages that use GPUs."""

import argparse
import os
from pathlib import Path

from workflow.lib.artifacts.stage_logs import ENDED
from workflow.lib.system.gpu_leases import lease
from workflow.scripts.command import logger, mark_log, run


def main(args: argparse.Namespace) -> None:
    gpus = lease(args.count, waiting=logger.info)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in gpus)
    mark_log(ENDED)  # else Ctrl-C during the stage's imports would seem to be a kill
    os.execvp(args.command[0], args.command)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, required=True, help="GPUs to lease")
    parser.add_argument("--log", type=Path, help="log file; default: standard error only")
    parser.add_argument("command", nargs="+", help="what to run, after --")
    run(main, parser)
