"""Measure speed and memory of the training engine, and of its peers, on this machine, with random
weights of any shape.

Every case runs in fresh torchrun workers (`--together N`: N of them one after the other in the same
ones) and becomes a line of the output (JSON Lines), also one that cannot run or runs out of memory.
Measurements of an earlier call, even of a killed one, are not repeated. The random base is written
once for all cases of a shape.

`--predict 2xH200` writes what preflight predicts for these GPUs, and measures nothing. A machine
with this one's versions and cache folder (`~/.cache/fsdp-qlora-workflow`) then predicts at once.

    python -m workflow.scripts.benchmark_run \\
        --configfile workflow/resources/benchmark/llama3-8b-1gpu.yaml --output measurements.jsonl
"""

import argparse
import importlib.util
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from workflow.benchmark.cases import Request, load_benchmark, read_mapping, requests
from workflow.benchmark.measure import OUT_OF_MEMORY, Job, measure
from workflow.benchmark.prediction import Prepared, prepare
from workflow.benchmark.random_base import write_random_base
from workflow.benchmark.record import BenchmarkRow, Measurement
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import Provenance
from workflow.lib.recording.recording_process import recording_process
from workflow.lib.settings.overrides import merge
from workflow.lib.system.checksums import read_artifact, read_lines, write_lines
from workflow.lib.system.environment import is_worker, shipped_path
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.files import short_hash, write_checked_json
from workflow.lib.system.gpu_models import parse_gpus
from workflow.lib.system.hardware import visible_gpus
from workflow.lib.system.locks import exclusive
from workflow.lib.system.number_formats import size
from workflow.lib.training.launch import Workers, launch_workers
from workflow.scripts.command import command_parser, logger, run

FINAL = ("measured", "out_of_memory")
PEER = "workflow.scripts.benchmark_peer"
PEER_PACKAGES = {  # and the file that pins them
    "trl": ("envs/peers.txt", ("trl", "accelerate", "datasets")),
    "unsloth": ("envs/unsloth.txt", ("unsloth", "unsloth_zoo", "trl", "accelerate", "datasets")),
}
BASE_WAIT_S = 1800.0  # for another process that writes the same base


def main(args: argparse.Namespace) -> None:
    if is_worker():
        work(args)
        return
    names, gpu_model = [gpu.name for gpu in visible_gpus()], None
    if args.predict is not None:
        names, gpu_model = imagined_gpus(args.predict, visible=names)
    rows = {row["key"]: row for row in read_lines(args.output)} if args.output.is_file() else {}
    wanted = {
        short_hash([request.document(), names]): request
        for request in wanted_requests(args, num_gpus=len(names))
    }
    for key in [key for key in wanted if rows.get(key, {}).get("status") in FINAL]:
        logger.info("%s: measured before", wanted.pop(key).label)
    with recording_process() as recordings:
        prepared = partial(prepare, num_gpus=len(names), recordings=recordings, gpu_model=gpu_model)
        rows_of = partial(several, args) if gpu_model is None else predictions
        for keys in starts(wanted, together=args.together):
            for row in rows_of({key: wanted[key] for key in keys}, prepared):
                rows[row.key] = row.as_json()
                logger.info("%s: %s", wanted[row.key].label, summary_words(row))
            write_lines(args.output, rows.values())
            if gpu_model is None:
                shutil.rmtree(kept_folder(args), ignore_errors=True)


def imagined_gpus(text: str, *, visible: list[str]) -> tuple[list[str], str]:
    """Return the names of GPUs like `2xH200`, and their model; raises `UserError` if some are
    visible, which are what preflight plans for."""
    count, model = parse_gpus(text, setting="--predict")
    if visible:
        bound = f"this machine shows {visible[0]}"
        raise setting_error("--predict", text, bound, "Leave it out: its GPUs are measured")
    return [model.name] * count, model.name


def starts(wanted: Mapping[str, Request], *, together: int) -> Iterator[list[str]]:
    """Yield the keys that one start of workers measures: neighbours with equal processes, cap and
    groups; peers alone."""
    for (peer, *_), group in groupby(wanted.items(), key=lambda item: _start_kind(item[1])):
        keys = [key for key, _ in group]
        size = together if peer is None else 1
        yield from (keys[i : i + size] for i in range(0, len(keys), size))


def _start_kind(request: Request) -> tuple[object, ...]:
    peer = None if request.peer is None else request.name
    hardware = request.settings.get("hardware", {})
    groups = [hardware.get(name) for name in ("shard_size", "context_parallel")]
    return peer, request.processes, request.sizes.memory_cap_gib, *groups


def work(args: argparse.Namespace) -> None:
    """Measure, as one of the workers, one case after the other; a file for each, named by the
    case's key."""
    documents = read_artifact(args.job)
    jobs = [Job.of(document) for document in documents.values()]
    for key, measured in zip(documents, measure(jobs), strict=True):
        if measured is not None:
            write_checked_json(args.output / f"{key}.json", measured.as_json())


def kept_folder(args: argparse.Namespace) -> Path:
    """Return the folder of workers' measurements before they are in the output: another call takes
    them from there if this one is killed."""
    output: Path = args.output
    return output.with_name(f".{output.name}.kept")


def wanted_requests(args: argparse.Namespace, *, num_gpus: int) -> list[Request]:
    """Return the requests of a settings file and the options beside it."""
    chosen: dict[str, Any] = {}
    if args.cases is not None:
        chosen["cases"] = "all" if args.cases == ["all"] else args.cases
    if args.processes is not None:
        chosen["processes"] = args.processes
    settings: dict[str, object] = {"benchmark": {}}
    for document in [*map(read_mapping, args.configfile), {"benchmark": chosen}]:
        settings = merge(settings, document)
    return requests(load_benchmark(settings), num_gpus=num_gpus)


def predictions(
    wanted: Mapping[str, Request], prepared: Callable[[Request], Prepared]
) -> Iterator[BenchmarkRow]:
    """Yield each request's row, predicted or with a cause; prepared: plans and predicts one."""
    ready: dict[str, Prepared] = {}
    yield from _impossible(wanted, prepared, ready)
    for key, prediction in ready.items():
        yield BenchmarkRow(**_prepared_fields(key, prediction), status="predicted")


def several(
    args: argparse.Namespace, wanted: Mapping[str, Request], prepared: Callable[[Request], Prepared]
) -> Iterator[BenchmarkRow]:
    """Yield each request's row, measured or with a cause; prepared: plans and predicts one."""
    ready: dict[str, Prepared] = {}
    yield from _impossible(wanted, prepared, ready)
    yield from _measured(kept_folder(args), ready)
    while ready:
        failure = launch(args, ready)
        yield from _measured(kept_folder(args), ready)
        if failure is not None:
            key = next(iter(ready))
            logger.debug("%s: %s", wanted[key].label, failure)
            yield BenchmarkRow(
                **_prepared_fields(key, ready.pop(key)),
                status="out_of_memory" if OUT_OF_MEMORY in str(failure) else "failed",
                cause=first_line(failure),
            )


def _impossible(
    wanted: Mapping[str, Request],
    prepared: Callable[[Request], Prepared],
    ready: dict[str, Prepared],
) -> Iterator[BenchmarkRow]:
    """Yield the rows of requests that cannot run, and put the others into `ready`."""
    for key, request in wanted.items():
        end: dict[str, Any] = {"status": "not_installed", "cause": _missing_packages(request)}
        if end["cause"] is None:
            try:
                ready[key] = prepared(request)
                continue
            except UserError as error:
                end = {"status": "failed", "cause": first_line(error)}
        yield BenchmarkRow(**_request_fields(key, request), **end)


def _measured(folder: Path, ready: dict[str, Prepared]) -> Iterator[BenchmarkRow]:
    """Yield the rows of workers' measurements in `folder`, and remove them from `ready`."""
    for key in [key for key in ready if (folder / f"{key}.json").is_file()]:
        measured = read_record(folder / f"{key}.json", Measurement)
        fields = _prepared_fields(key, ready.pop(key))
        yield BenchmarkRow(**fields, status="measured", cause=None, measured=measured)


def _request_fields(key: str, request: Request) -> dict[str, Any]:
    return {"format_version": 1, "key": key, **request.document(), "provenance": Provenance.now()}


def _prepared_fields(key: str, prepared: Prepared) -> dict[str, Any]:
    return _request_fields(key, prepared.request) | {
        "gpu_names": list(prepared.gpu_names),
        "shape": prepared.shape.document(),
        "predicted": prepared.predicted,
        "plan": asdict(prepared.plan),
    }


def _missing_packages(request: Request) -> str | None:
    """Name the packages that the request's peer needs and that are not installed, if any."""
    if request.peer is None:
        return None
    file, packages = PEER_PACKAGES[request.peer["software"]]
    needed = (*packages, *(("liger_kernel",) if request.peer["liger"] else ()))
    missing = ", ".join(name for name in needed if importlib.util.find_spec(name) is None)
    return f"not installed: {missing} ({shipped_path(file)})" if missing else None


def launch(args: argparse.Namespace, ready: Mapping[str, Prepared]) -> Exception | None:
    """Run workers for these requests, which write their measurements to `kept_folder`; return the
    error of a failed one, if any."""
    first = next(iter(ready.values())).request
    module = "workflow.scripts.benchmark_run" if first.peer is None else PEER
    folder = kept_folder(args)
    try:
        folder.mkdir(exist_ok=True)
        jobs = {key: job_of(args, prepared).document() for key, prepared in ready.items()}
        write_checked_json(folder / "jobs.json", jobs)
        options = ["--job", str(folder / "jobs.json"), "--output", str(folder)]
        options += ["--log", str(args.log)] if args.log else []
        launch_workers(Workers(module, options, first.processes, what=first.label))
    except (UserError, OSError, RuntimeError) as error:
        return error
    if all((folder / f"{key}.json").is_file() for key in ready):
        return None
    return UserError("its workers ended without a message and without a measurement")


def job_of(args: argparse.Namespace, prepared: Prepared) -> Job:
    sizes = prepared.request.sizes
    return Job(
        base=str(find_base(args.bases, prepared)),
        run=prepared.run.model_dump(mode="json"),
        plan=prepared.plan,
        documents=sizes.documents,
        rows=prepared.num_rows,
        pairs=sizes.pairs,
        groups=sizes.groups,
        vocab_size=prepared.shape.vocab_size,
        check_bytes=sizes.check_bytes,
        peer=None if prepared.request.peer is None else dict(prepared.request.peer),
        timeout_s=args.case_timeout_s,
    )


def find_base(bases: Path, prepared: Prepared) -> Path:
    """Return the folder of the random base of this shape; write it if it is missing."""
    settings, peer = prepared.run.quantize, prepared.request.peer
    as_floats = peer is not None and peer["strategy"] != "ddp" and settings.method != "none"
    folder = bases / short_hash([prepared.config, settings.model_dump(mode="json"), as_floats])
    with exclusive(bases / f".{folder.name}.lock", doing=f"writing {folder}", wait_s=BASE_WAIT_S):
        if not folder.is_dir():
            write_random_base(folder, prepared.config, settings, float_storage=as_floats)
    return folder


def summary_words(row: BenchmarkRow) -> str:
    measured = row.measured
    if row.status == "predicted":
        return predicted_words(row.predicted)
    if measured is None:
        return str(row.cause)
    memory = measured.allocated_bytes or measured.host_bytes
    off = f"; CUDA graphs were off ({measured.graphs_off})" if measured.graphs_off else ""
    speed = f"{measured.tokens_per_s_per_process:,.0f} tokens/s per process"
    if measured.pairs_per_s_per_process is not None:
        speed = f"{measured.pairs_per_s_per_process:.2f} pairs/s per process"
    return f"{speed}, peak {size(memory)}{off}"


def predicted_words(predicted: Mapping[str, Any] | None) -> str:
    if predicted is None:
        return "nothing is predicted for other software"
    memory = f"predicted: peak {size(predicted['peak_bytes'])}"
    if predicted["time"] is None:
        return memory
    return f"{memory}, {predicted['time']['tokens_per_s_per_process']:,.0f} tokens/s per process"


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def parser() -> argparse.ArgumentParser:
    arguments = command_parser(__doc__, needs="output", takes="job")
    text = "section benchmark, YAML, the later before the earlier; without, the defaults"
    arguments.add_argument("--configfile", nargs="+", default=[], type=Path, help=text)
    arguments.add_argument("--cases", nargs="+", metavar="NAME", help="cases by name, or all")
    arguments.add_argument("--processes", nargs="+", type=int, help="numbers of processes")
    arguments.add_argument("--predict", metavar="GPUS", help="predict for these, measure nothing")
    arguments.add_argument(
        "--case-timeout-s",
        type=float,
        default=600.0,
        help="seconds that loading or a first step may take until a case counts as hung "
        "(%(default)g)",
    )
    arguments.add_argument(
        "--together",
        type=int,
        default=1,
        metavar="N",
        help="cases that one start of the workers measures, one after the other (%(default)d)",
    )
    arguments.add_argument(
        "--bases", type=Path, default=Path("results/benchmark/bases"), help="random bases, kept"
    )
    return arguments


if __name__ == "__main__":
    run(main, parser())
