"""Measure this machine's rates in the operations of a step, in less than two minutes.

The result is a file in results/probe, named by GPU (or CPU), driver and torch. Preflight uses its
rates in place of those of its tables; equal machines may share a file. Nothing is sent.

  python -m workflow.scripts.probe [--cpu]
"""

import argparse
import os
import platform
from pathlib import Path

import torch

from workflow.benchmark.probed_rates import probed
from workflow.lib.artifacts.records import Provenance
from workflow.lib.planning.probes import FOLDER, REPEATABLE, Probe, cpu_name, driver_version
from workflow.lib.system.errors import setting_error
from workflow.lib.system.files import write_checked_json
from workflow.lib.system.gpu_leases import lease
from workflow.lib.system.hardware import interchangeable, threads_of_job, visible_gpus
from workflow.scripts.command import command_parser, logger, run


def main(args: argparse.Namespace) -> None:
    if args.processes < 1:
        raise setting_error("--processes", args.processes, "must be at least 1", "Raise it")
    gpus = [] if args.cpu else interchangeable(visible_gpus(), count=1)
    if gpus:
        held = lease(len(gpus), gpus=lambda: gpus, waiting=logger.info)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in held)
        device, driver, kind = held[0].name, driver_version(), "cuda"
    else:
        torch.set_num_threads(max(1, threads_of_job() // args.processes))
        device, driver, kind = cpu_name(args.processes), platform.machine(), "cpu"
    logger.info("probing %s: less than two minutes", device)
    measured = probed(torch.device(kind))
    probe = Probe(device=device, driver=driver, measured=measured, provenance=Provenance.now())
    args.folder.mkdir(parents=True, exist_ok=True)
    write_checked_json(args.folder / probe.file_name, probe.as_json())
    for name, rate in measured.items():
        note = "" if rate.spread <= REPEATABLE else ": varies too much, the table's counts"
        logger.info("%s: %.3g/s, spread %.1f%%%s", name, rate.value, 100 * rate.spread, note)
    logger.info("written to %s; nothing was sent", args.folder / probe.file_name)


def parser() -> argparse.ArgumentParser:
    arguments = command_parser(__doc__)
    arguments.add_argument("--cpu", action="store_true", help="the CPU where there are GPUs")
    arguments.add_argument("--processes", type=int, default=2, help="of a run on CPUs")
    arguments.add_argument("--folder", type=Path, default=FOLDER, help="(%(default)s)")
    return arguments


if __name__ == "__main__":
    run(main, parser())
