"""What a checkpoint costs: blocks of steps with one checkpoint and blocks with none, alternating in one run.

    snakemake --cores all preflight && snakemake --cores all results/base      # or any earlier run of the workflow
    python -m tests.measure_checkpoints --run demo --every 10 --pairs 6

Not collected by pytest. Reads config.yaml, and the tokens, NF4 base and plan that the workflow has made; on CPUs or
GPUs, as the plan says. A block with a checkpoint ends when that is on disk, as if the next one were due at once. The
order within pairs alternates, and medians are taken, so that a change of the machine's load meets both. Prints one JSON object.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from tests.distributed import run_distributed
from workflow.lib import runs as layout
from workflow.lib.artifacts import package_versions, read_json
from workflow.lib.attention import resolve_training_attention
from workflow.lib.checkpoint import CheckpointWriter, saved_steps, step_dir
from workflow.lib.config import RunConfig, load_config
from workflow.lib.inference import attention_dropout, resolve_dtype, softcaps_attention
from workflow.lib.parallel import process_group
from workflow.lib.setup import build_training_model
from workflow.lib.tokens import TokenStore
from workflow.lib.training import make_optimizer, steps

WARM_UP = 2


def measure(
    run: RunConfig, plan: dict[str, Any], folder: Path, every: int, pairs: int
) -> dict[str, Any]:
    """Be one process: train `pairs` times `every` steps with a checkpoint and as many without."""
    base, store = Path(layout.base_dir(run)), TokenStore.open(Path(layout.tokens_dir(run)))
    num_steps = WARM_UP + 2 * pairs * every
    with process_group(plan["device"], timeout_s=600, shard_size=plan["shard_size"]) as world:
        dtype = resolve_dtype(run.model.compute_dtype, world.device)
        attention = resolve_training_attention(
            run.model.attention, world.device,
            compute_dtype=dtype, softcapped=softcaps_attention(base), dropout=attention_dropout(base),
        )  # fmt: skip
        training = build_training_model(
            base, run, plan, world, compute_dtype=dtype, attention=attention
        ).training
        optimizer = make_optimizer(training, run.train)
        writer = CheckpointWriter(folder, keep=2, identity="measured", world=world)
        stepping = steps(
            training, optimizer, store, run.train, first_step=0, num_steps=num_steps,
            micro_batch_size=plan["micro_batch_size"], elapsed_s=0.0, world=world,
        )  # fmt: skip
        list(islice(stepping, WARM_UP))
        blocks: dict[bool, list[float]] = {True: [], False: []}
        in_save: list[float] = []
        for pair in range(pairs):
            for saving in (pair % 2 == 0, pair % 2 == 1):
                began = time.monotonic()
                step = next(stepping).step
                if saving:
                    called = time.monotonic()
                    writer.save(training, optimizer, step=step)
                    in_save.append(time.monotonic() - called)
                list(islice(stepping, every - 1))
                writer.wait()
                blocks[saving].append(time.monotonic() - began)
        newest = step_dir(folder, saved_steps(folder)[-1])
        size = sum(path.stat().st_size for path in newest.iterdir())
    return {"blocks": blocks, "in_save": in_save, "bytes": size}


def report(found: dict[str, Any], *, every: int, interval: int) -> dict[str, Any]:
    """Return seconds per step and per checkpoint, and the share of the latter, every so many steps."""
    blocks = found["blocks"]
    step_s = statistics.median(blocks[False]) / every
    pairs = zip(blocks[True], blocks[False], strict=True)
    cost_s = statistics.median(one - other for one, other in pairs)
    return {
        "step_s": round(step_s, 4),
        "checkpoint_s": round(cost_s, 4),
        "of_that_training_stands_still_s": round(statistics.median(found["in_save"]), 4),
        "checkpoint_bytes": found["bytes"],
        f"share_when_every_{every}_steps": round(cost_s / (every * step_s), 4),
        f"share_when_every_{interval}_steps": round(cost_s / (interval * step_s), 4),
        "blocks_with_s": [round(s, 3) for s in blocks[True]],
        "blocks_without_s": [round(s, 3) for s in blocks[False]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("config.yaml"))
    parser.add_argument("--run", default="demo", help="name of the run")
    parser.add_argument("--every", type=int, default=10, help="steps of a block")
    parser.add_argument("--pairs", type=int, default=6, help="blocks of each kind")
    args = parser.parse_args()
    run = load_config(yaml.safe_load(args.config.read_text(encoding="utf-8")))[1][args.run]
    plan = read_json(Path(layout.stage_dir(args.run, "preflight_run")) / "preflight.json")["plan"]
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=layout.RESULTS, prefix=".measured-") as folder:
        found = run_distributed(
            measure,
            run,
            plan,
            Path(folder),
            args.every,
            args.pairs,
            world_size=plan["processes"],
            timeout_s=36_000,
        )[0]
    case = {"run": args.run, "device": plan["device"], "processes": plan["processes"], "every": args.every}  # fmt: skip
    conditions = {"load": [load_before, os.getloadavg()[0]], "packages": package_versions()}
    interval = run.train.checkpoint_every_steps
    print(json.dumps(case | report(found, every=args.every, interval=interval) | conditions))


if __name__ == "__main__":
    main()
