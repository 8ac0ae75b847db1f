"""Measure speed and memory of the training engine, and of its peers, on this machine, with random weights of any shape.

Every case runs in fresh torchrun workers and becomes a line of the output (JSON Lines), also one that cannot run
or runs out of memory. Lines of an earlier call are kept, and what they measured is not measured again:
the same command continues. The random base is written once for all cases of a shape.

One call on a host with GPUs and little time:
    python -m workflow.scripts.benchmark_run --configfile workflow/presets/benchmark-llama3-8b-1gpu.yaml \\
        --cases all --time-limit-s 1500 --bases /tmp/bases --output measurements.jsonl
"""

import argparse
import importlib.util
import logging
import math
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from workflow.lib.artifacts import (
    provenance,
    read_json,
    read_jsonl,
    short_hash,
    write_json,
    write_jsonl,
)
from workflow.lib.benchmark_cases import Request, requests
from workflow.lib.benchmark_plan import Prepared, model_flops_per_token, prepare
from workflow.lib.config import load_benchmark, merge
from workflow.lib.environment import is_worker
from workflow.lib.errors import UserError
from workflow.lib.formats import size
from workflow.lib.hardware import visible_gpus
from workflow.lib.launch import launch_workers
from workflow.lib.locks import exclusive
from workflow.lib.measuring import OUT_OF_MEMORY, Job, measure
from workflow.lib.random_base import write_random_base
from workflow.scripts.command import run, stage_parser

logger = logging.getLogger("workflow")

FORMAT_VERSION = 1
FINAL = ("measured", "out_of_memory")
PEER = "workflow.resources.benchmark.peer_trl"
PEER_PACKAGES = ("trl", "accelerate", "datasets")
BASE_WAIT_S = 1800.0  # for another process that writes the same base


def main(args: argparse.Namespace) -> None:
    if is_worker():
        work(args)
        return
    gpus = visible_gpus()
    wanted = wanted_requests(args, num_gpus=len(gpus))
    rows = {row["key"]: row for row in read_jsonl(args.output)} if args.output.is_file() else {}
    started, longest_s = time.monotonic(), 0.0
    for request in wanted:
        key = short_hash([request.document(), [gpu.name for gpu in gpus]])
        if rows.get(key, {}).get("status") in FINAL:
            logger.info("%s: measured before", request.label)
            continue
        began = time.monotonic()
        enough_time = args.time_limit_s - (began - started) > longest_s
        row = one(args, request, num_gpus=len(gpus), enough_time=enough_time)
        longest_s = max(longest_s, time.monotonic() - began)
        rows[key] = {"format_version": FORMAT_VERSION, "key": key, **row}
        write_jsonl(args.output, rows.values())
        logger.info("%s: %s", request.label, told(row))


def work(args: argparse.Namespace) -> None:
    """Measure, as one of the workers of a case."""
    measured = measure(Job(**read_json(args.job)))
    if measured is not None:
        write_json(args.output, measured)


def wanted_requests(args: argparse.Namespace, *, num_gpus: int) -> list[Request]:
    """Return what is asked for: by `--config` (a list of requests), or by a settings file and the options beside it."""
    if args.config is not None:
        return [Request.of(document) for document in args.config["requests"]]
    document = (
        yaml.safe_load(args.configfile.read_text(encoding="utf-8")) if args.configfile else {}
    )
    chosen: dict[str, Any] = {}
    if args.cases is not None:
        chosen["cases"] = "all" if args.cases == ["all"] else args.cases
    if args.processes is not None:
        chosen["processes"] = args.processes
    settings = merge(document, {"benchmark": chosen} if chosen else {})
    return requests(load_benchmark(settings), num_gpus=num_gpus)


def one(
    args: argparse.Namespace, request: Request, *, num_gpus: int, enough_time: bool
) -> dict[str, Any]:
    """Return the row of a request, measured or with the cause why not."""
    row = {**request.document(), "case": request.name, "measured": None, "provenance": provenance()}
    del row["name"]
    if not enough_time:
        return row | {"status": "not_run", "cause": "not run: out of time"}
    missing = missing_packages(request)
    if missing:
        cause = f"not installed: {', '.join(missing)} (envs/peers.txt)"
        return row | {"status": "not_installed", "cause": cause}
    try:
        prepared = prepare(request, num_gpus=num_gpus)
        row |= prepared.facts | {"plan": prepared.plan}
        measured = launch(args, prepared)
    except (UserError, OSError, RuntimeError) as error:
        status = "out_of_memory" if OUT_OF_MEMORY in str(error) else "failed"
        logger.debug("%s: %s", request.label, error)
        return row | {"status": status, "cause": first_line(error)}
    return row | {"status": "measured", "cause": None, "measured": measured}


def missing_packages(request: Request) -> list[str]:
    """Return the packages of a peer that are not installed."""
    if request.peer is None:
        return []
    needed = (*PEER_PACKAGES, *(("liger_kernel",) if request.peer["liger"] else ()))
    return [name for name in needed if importlib.util.find_spec(name) is None]


def launch(args: argparse.Namespace, prepared: Prepared) -> dict[str, Any]:
    """Run a request's workers and return what they measured; raises `UserError` with the cause if they fail."""
    request, own_threads = prepared.request, "OMP_NUM_THREADS" in os.environ
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        job, result = Path(folder) / "job.json", Path(folder) / "measured.json"
        write_json(job, asdict(job_of(args, prepared)))
        options = ["--job", str(job), "--output", str(result)]
        options += ["--log", str(args.log)] if args.log else []
        module = "workflow.scripts.benchmark_run" if request.peer is None else PEER
        try:
            launch_workers(module, options, processes=request.processes, what=request.label)
        finally:
            if not own_threads:  # the next case may have another number of processes
                os.environ.pop("OMP_NUM_THREADS", None)
        measured: dict[str, Any] = read_json(result)
    return measured | utilisation(prepared, measured)


def job_of(args: argparse.Namespace, prepared: Prepared) -> Job:
    """Return what the workers are asked to do."""
    sizes, shape = prepared.request.sizes, prepared.facts["shape"]
    return Job(
        base=str(find_base(args.bases, prepared)),
        run=prepared.run.model_dump(mode="json"),
        plan=prepared.plan,
        documents=sizes.documents,
        rows=prepared.num_rows,
        vocab_size=shape["vocab_size"],
        check_bytes=sizes.check_bytes,
        products=[
            [linear["out_features"], linear["in_features"], shape["num_layers"]]
            for linear in shape["linears"]
        ],
        peer=None if prepared.request.peer is None else dict(prepared.request.peer),
        timeout_s=args.case_timeout_s,
    )


def find_base(bases: Path, prepared: Prepared) -> Path:
    """Return the folder of the random base of this shape, written now if it is not there."""
    settings, peer = prepared.run.quantize, prepared.request.peer is not None
    key = short_hash([prepared.config, settings.model_dump(mode="json"), peer])
    folder = bases / key
    with exclusive(bases / f".{key}.lock", doing=f"writing {folder}", wait_s=BASE_WAIT_S):
        if not folder.is_dir():
            began = time.monotonic()
            write_random_base(folder, prepared.config, settings, float_storage=peer)
            logger.info("random base %s: %.0f s", folder, time.monotonic() - began)
    return folder


def utilisation(prepared: Prepared, measured: dict[str, Any]) -> dict[str, float]:
    """Return the model FLOP/s of a process, and its share of what the device multiplies at best."""
    sizes = prepared.request.sizes
    per_token = model_flops_per_token(
        prepared.shape, seq_len=sizes.seq_len, documents=sizes.documents
    )
    flops = per_token * measured["tokens_per_s_per_process"]
    return {
        "model_flops_per_s": flops,
        "model_flops_utilisation": flops / measured["gemm_flops_per_s"],
    }


def told(row: dict[str, Any]) -> str:
    """Return a row in a few words."""
    found = row["measured"]
    if found is None:
        return str(row["cause"])
    memory = found["allocated_bytes"] or found["host_bytes"]
    return f"{found['tokens_per_s_per_process']:,.0f} tokens/s per process, peak {size(memory)}"


def first_line(error: BaseException) -> str:
    """Return a message's first line, for a cell of a table."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def parser() -> argparse.ArgumentParser:
    arguments = stage_parser(__doc__, config_required=False)
    arguments.add_argument(
        "--configfile", type=Path, help="settings, YAML (section benchmark); without, the defaults"
    )
    arguments.add_argument("--cases", nargs="+", metavar="NAME", help="cases by name, or all")
    arguments.add_argument("--processes", nargs="+", type=int, help="numbers of processes")
    arguments.add_argument(
        "--time-limit-s", type=float, default=math.inf,
        help="seconds in all: a case that may not end in time is a row 'not run'",
    )  # fmt: skip
    arguments.add_argument(
        "--case-timeout-s", type=float, default=600.0,
        help="seconds that loading or a first step may take until a case counts as hung (%(default)g)",
    )  # fmt: skip
    arguments.add_argument(
        "--bases", type=Path, default=Path("results/benchmark/bases"), help="random bases, kept"
    )
    arguments.add_argument("--output", type=Path, required=True, help="measurements, JSON Lines")
    arguments.add_argument("--job", type=Path, help="of a worker: what it does")
    return arguments


if __name__ == "__main__":
    run(main, parser())
