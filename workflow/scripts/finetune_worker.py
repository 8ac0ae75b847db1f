"""One process of the training, which `finetune` starts through torchrun.

It reads its slices of the NF4 base, checks the gathered bytes against the checkpoint, continues
from the newest checkpoint of the same trajectory, and trains. The sharded adapter, metrics and
summary are written at the end, all at once. It is apart from `finetune`, which needs none of the
packages imported here, so that they are imported once.
"""

import argparse
import logging
import os
import shutil
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from workflow.lib.artifacts.preflight_record import Plan, Preflight
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.data.tokens.token_store import TokenStore, recorded_arrays
from workflow.lib.distributed.heartbeat import FIRST_PASS_S, JOIN_S, JOINING, Pulse
from workflow.lib.distributed.stop_signals import StopRequest, on_any
from workflow.lib.distributed.world import World, process_group
from workflow.lib.export.parity import save_logits, trained_logits
from workflow.lib.model.backends import (
    attention_dropout,
    resolve_dtype,
    resolve_training_attention,
    softcaps_attention,
)
from workflow.lib.settings.config import RunConfig
from workflow.lib.system.checksums import listed_files
from workflow.lib.system.files import provenance, put_in_place, write_json
from workflow.lib.system.locks import exclusive
from workflow.lib.training.best_adapter import BestAdapter, open_best, open_heldout
from workflow.lib.training.build import TrainingModel, build_training_model
from workflow.lib.training.checkpoint import (
    Cadence,
    CheckpointWriter,
    left_by,
    resume_,
    save_adapter,
)
from workflow.lib.training.failure_causes import explained
from workflow.lib.training.live_view import View, live_view
from workflow.lib.training.loop import make_optimizer, peak_bytes, steps
from workflow.lib.training.run_record import Journal, summarize
from workflow.lib.training.startup_checks import check_inputs, startup_checks
from workflow.scripts.command import run
from workflow.scripts.finetune import command_line, tracking_settings

logger = logging.getLogger("workflow")


def main(args: argparse.Namespace) -> None:
    preflight = read_record(args.preflight, Preflight)
    guarded_work(args, RunConfig.model_validate(args.config), preflight)


def guarded_work(args: argparse.Namespace, config: RunConfig, preflight: Preflight) -> None:
    device = torch.device(preflight.plan.device)
    with explained(run=args.run, preflight=preflight, measured_bytes=lambda: peak_bytes(device)):
        work(args, config, preflight.plan)


def work(args: argparse.Namespace, config: RunConfig, plan: Plan) -> None:
    rank, step_s = int(os.environ["RANK"]), config.train.hang_seconds
    with ExitStack() as stack:
        pulse = stack.enter_context(Pulse(rank=rank, start_s=args.timeout_s, step_s=step_s))
        if rank == 0:
            lock, wait_s = args.checkpoints / ".lock", config.train.grace_seconds
            killed = stack.enter_context(exclusive(lock, doing="training this run", wait_s=wait_s))
            if killed is not None:
                logger.info("%s", left_by(killed, args.checkpoints))
        else:
            logger.setLevel(logging.ERROR)
        pulse.phase(JOINING, least_s=JOIN_S)
        world = stack.enter_context(
            process_group(plan.device, timeout_s=args.timeout_s, shard_size=plan.shard_size)
        )
        torch.use_deterministic_algorithms(config.train.deterministic)
        store = TokenStore.open(args.tokens)
        pulse.phase("checking the files")
        recorded = listed_files(args.base) + recorded_arrays(args.tokens, store.manifest)
        checks = [check_inputs(recorded, world, moved=pulse.moved)]
        logger.info("%s: %s", checks[0]["name"], checks[0]["detail"])
        dtype = resolve_dtype(config.model.compute_dtype, world.device)
        attention = resolve_training_attention(
            config.model.attention,
            world.device,
            compute_dtype=dtype,
            softcapped=softcaps_attention(args.base),
            dropout=attention_dropout(args.base),
        )
        # no linear of the base and no layer is larger than one of its files
        file_bytes = max(path.stat().st_size for path in args.base.glob("*.safetensors"))
        pulse.phase("loading the model", num_bytes=file_bytes)
        model = build_training_model(
            args.base,
            config,
            plan,
            world,
            compute_dtype=dtype,
            attention=attention,
            moved=pulse.moved,
        )
        pulse.phase("checking the model", num_bytes=file_bytes, least_s=FIRST_PASS_S)
        checks += startup_checks(model, store, args.base, world, moved=pulse.moved)
        journal, selected_step = train(args, config, plan, world, store, model, pulse)
        pulse.phase("writing the results", num_bytes=model.state_bytes())
        write_results(args, config, plan, world, store, model, journal, checks, selected_step)


def train(
    args: argparse.Namespace,
    config: RunConfig,
    plan: Plan,
    world: World,
    store: TokenStore,
    model: TrainingModel,
    pulse: Pulse,
) -> tuple[Journal, int]:
    """Train from the newest checkpoint to the end, and leave the selected adapter in the model;
    return its step too.

    A signal saves one more checkpoint and stops.
    """
    settings, identity = config.train, run_identity(args)
    optimizer = make_optimizer(model.training, settings)
    state_bytes = model.state_bytes()
    pulse.phase("looking for a checkpoint", num_bytes=(settings.keep_checkpoints + 1) * state_bytes)
    resumed = resume_(args.checkpoints, model.training, optimizer, identity=identity, world=world)
    journal = Journal(
        args.checkpoints, resumed=resumed, log_every=settings.log_every_steps, world=world
    )
    writer = CheckpointWriter(
        args.checkpoints,
        keep=settings.keep_checkpoints,
        identity=identity,
        world=world,
        newest=resumed.step,
    )
    cadence = Cadence(settings.checkpoint_every_steps, settings.checkpoint_every_minutes)
    num_steps = plan.num_steps
    heldout = open_heldout(
        store, settings, num_steps=num_steps, micro_batch_size=plan.micro_batch_size
    )
    best = open_best(args.checkpoints, settings, journal.rows, world=world)
    if resumed.step:
        logger.info("continuing after step %d of %d", resumed.step, num_steps)
    bar = progress_bar(args.run, done=resumed.step, num_steps=num_steps, world=world)
    stepping = steps(
        model.training, optimizer, store, settings,
        first_step=resumed.step, num_steps=num_steps, micro_batch_size=plan.micro_batch_size,
        elapsed_s=journal.elapsed_s, world=world,
    )  # fmt: skip
    pulse.step(resumed.step + 1)
    with (
        StopRequest() as stop,
        writer.finishing(),
        bar,
        shown(args, config, journal, world) as show,
    ):
        for metrics in stepping:
            step, last = metrics.step, metrics.step == num_steps
            if heldout is not None and heldout.due(step):
                pulse.phase("held-out loss")
                loss = heldout.loss(model.training, world=world, moved=pulse.moved)
                metrics = replace(metrics, heldout_loss=loss)
            if journal.add(metrics):
                show(metrics.as_dict())
            if best is not None and metrics.heldout_loss is not None:
                best.offer(model.training, loss=metrics.heldout_loss, step=step)
            bar.update()
            bar.set_postfix_str(journal.line(metrics), refresh=False)
            due = last or cadence.due(step=step, last_saved_s=writer.last_saved_s)
            stopping, saving = on_any((stop.asked, due), group=world.io_group)
            if saving or stopping:
                pulse.phase("saving", num_bytes=state_bytes)
                TokenStore.open(args.tokens)  # what was cut off a mapped file reads as zeros
                writer.save(model.training, optimizer, step=step)
            if stopping and not last:
                stop_as_asked(writer, step=step, num_steps=num_steps)
            pulse.step(step + 1)
        pulse.phase("saving", num_bytes=state_bytes)
    return journal, select_adapter(model, best, last_step=num_steps)


def progress_bar(run: str, *, done: int, num_steps: int, world: World) -> "tqdm[NoReturn]":
    """Return the bar of the main process, on a terminal alone; on all others one that shows
    nothing.
    """
    return tqdm(
        total=num_steps, initial=done, desc=run, unit="step", file=sys.stderr,
        disable=None if world.is_main else True,
    )  # fmt: skip


def select_adapter(model: TrainingModel, best: BestAdapter | None, *, last_step: int) -> int:
    """Put the best adapter back into the model if it is not the last one; return the step of the
    one that is there.
    """
    if best is None or best.step == last_step:
        return last_step
    best.load_(model.training)
    logger.info("the adapter of step %d has the lowest held-out loss, %.4f", best.step, best.loss)
    return best.step


def stop_as_asked(writer: CheckpointWriter, *, step: int, num_steps: int) -> NoReturn:
    """Wait for the checkpoint of `step`, and end with the status that has the run repeated."""
    writer.wait()
    logger.info("stopped after step %d of %d as asked; checkpoint saved", step, num_steps)
    sys.exit(os.EX_TEMPFAIL)


def shown(
    args: argparse.Namespace, config: RunConfig, journal: Journal, world: World
) -> AbstractContextManager[View]:
    """Return the live view of the run; on all but the main process one that shows nothing."""
    if not world.is_main:
        return nullcontext(lambda row: None)
    return live_view(
        tracking_settings(args),
        folder=args.tracking_folder,
        run=args.run,
        identity=args.checkpoints.name,
        rows=journal.rows,
        config=config.model_dump(mode="json", include={"model", "lora", "train"}),
    )


def run_identity(args: argparse.Namespace) -> str:
    """Return what names the run's settings, data and base: its checkpoints' folder name without the
    run's.
    """
    name: str = args.checkpoints.name
    return name.removeprefix(f"{args.run}-")


def write_results(
    args: argparse.Namespace,
    config: RunConfig,
    plan: Plan,
    world: World,
    store: TokenStore,
    model: TrainingModel,
    journal: Journal,
    checks: list[dict[str, Any]],
    selected_step: int,
) -> None:
    """Write the sharded adapter, the parity record, metrics and summary to a folder that appears as
    a whole.
    """
    partial = args.output.with_name(f".{args.output.name}.partial")
    if world.is_main:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "adapter").mkdir(parents=True)
    torch.distributed.barrier(world.io_group)
    save_adapter(model.training, partial / "adapter", world=world)
    logits = trained_logits(model.training, store, device=world.device)
    peak = journal.peak_over_processes()
    if not world.is_main:
        return
    save_logits(logits, partial / "parity.safetensors")
    write_json(partial / "adapter_config.json", model.adapter_config())
    journal.copy_to(partial / "metrics.jsonl")
    summary = summarize(
        journal,
        run=args.run,
        fingerprint=run_identity(args),
        config=config,
        plan=plan,
        store=store,
        model=model,
        world=world,
        predicted_bytes=read_record(args.preflight, Preflight).peak_bytes,
        peak_bytes=peak,
        checks=checks,
        selected_step=selected_step,
    )
    write_json(partial / "summary.json", summary | {"provenance": provenance()})
    put_in_place(partial, args.output)
    logger.info(
        "trained %d steps in %.0f s: loss %.3f -> %.3f",
        plan.num_steps, journal.elapsed_s, summary["first_loss"], summary["final_loss"],
    )  # fmt: skip


if __name__ == "__main__":
    run(
        main, command_line(__doc__), locks_itself=True
    )  # the checkpoints, by the worker that writes them
