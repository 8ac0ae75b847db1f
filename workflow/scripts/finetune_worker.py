"""One process of the training, which `finetune` starts through torchrun.

It reads its slices of the NF4 base, checks the gathered bytes against the checkpoint, resumes from
the newest checkpoint of the same trajectory, and trains. The sharded adapter, metrics and summary
are written at the end, all at once. It is separate from `finetune`, which imports none of the
packages here, so that they are imported once."""

import argparse
import logging
import os
import shutil
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from tqdm import tqdm

from workflow.lib.artifacts.checkpoint_folder import left_by, trained_otherwise
from workflow.lib.artifacts.preflight_record import Preflight
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.trained_content import input_digests
from workflow.lib.artifacts.training_record import Check, Step
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.files.model_files import ADAPTER
from workflow.lib.data.tokens.token_store import MANIFEST, TokenStore, recorded_arrays
from workflow.lib.distributed.heartbeat import FIRST_PASS_S, JOIN_S, JOINING, Pulse
from workflow.lib.distributed.world import World, largest_of_all, process_group
from workflow.lib.export.parity import save_logits, trained_logits
from workflow.lib.model.experts.router_balance import accumulated
from workflow.lib.scores.store import ScoreStore, recorded_scores
from workflow.lib.settings.config import RunConfig
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.checksums import listed_files, recorded_files
from workflow.lib.system.files import file_sha256, provenance, replace_folder, write_checked_json
from workflow.lib.system.input_files import Inputs
from workflow.lib.system.interrupts import StopRequest
from workflow.lib.system.locks import exclusive
from workflow.lib.training.best_adapter import BestAdapter, HeldOut, patience_is_over
from workflow.lib.training.build import TrainingModel, build_training_model, plan_of_device
from workflow.lib.training.checkpoint import Cadence, CheckpointWriter, resume_, save_adapter
from workflow.lib.training.chosen_checkpoint import GO_BACK, chosen_checkpoint
from workflow.lib.training.failure_causes import explained
from workflow.lib.training.live_view import Shown, View, live_view
from workflow.lib.training.loop import Trainer, make_optimizer, peak_bytes
from workflow.lib.training.micro_batch_graphs import MicroBatchGraphs
from workflow.lib.training.run_record import (
    CHECKPOINTS,
    HELDOUT,
    LOSSES,
    Journal,
    TimeWatch,
    TrainingRun,
    summarize,
)
from workflow.lib.training.startup_checks import check_inputs, check_precision, startup_checks
from workflow.scripts.command import logger, run
from workflow.scripts.finetune import command_line, tracking_settings


def main(args: argparse.Namespace) -> None:
    preflight = read_record(args.preflight, Preflight)
    sections = {name: args.config[name] for name in args.config if name != "lineage"}
    config, device = RunConfig.model_validate(sections), torch.device(preflight.plan.device)
    with explained(run=args.run, preflight=preflight, measured_bytes=lambda: peak_bytes(device)):
        work(args, config, preflight.plan, predicted_s=preflight.time.step_s)


def work(
    args: argparse.Namespace, config: RunConfig, plan: StepPlan, *, predicted_s: float | None = None
) -> None:
    """predicted_s: of a step; None if unknown."""
    rank, step_s = int(os.environ["RANK"]), config.train.hang_seconds
    with ExitStack() as stack:
        pulse = stack.enter_context(Pulse(rank=rank, start_s=args.timeout_s, step_s=step_s))
        if rank == 0:
            lock_checkpoints(args.checkpoints, stack, wait_s=config.train.grace_seconds)
        else:
            logger.setLevel(logging.ERROR)
        pulse.phase(JOINING, least_s=JOIN_S)
        world = stack.enter_context(
            process_group(
                plan.device,
                timeout_s=args.timeout_s,
                shard_size=plan.shards,
                context_parallel=plan.context_parallel,
                moved=pulse.moved,
            )
        )
        torch.use_deterministic_algorithms(config.train.deterministic)
        store = TokenStore.open(args.tokens)
        pulse.phase("checking the files")
        start_files = Inputs([args.start] if args.start else [])
        recorded = listed_files(args.base) + recorded_arrays(args.tokens, store.manifest)
        recorded += [] if args.start is None else recorded_files(args.start)
        if args.scores is not None:
            recorded += recorded_scores(args.scores)
            scores = ScoreStore.open(args.scores, tokens=store, top_k=plan.top_k)
            store = store.with_scores(scores)
        checks = [check_inputs(recorded, world)]
        logger.info("%s: %s", checks[0].name, checks[0].detail)
        base = Checkpoint(args.base)
        plan = plan_of_device(plan, base, config, world)
        # no linear of the base and no layer is larger than one of its files
        file_bytes = max(path.stat().st_size for path in args.base.glob("*.safetensors"))
        pulse.phase("loading the model", num_bytes=file_bytes)
        model = build_training_model(
            base,
            config,
            plan,
            world,
            start=Adapter(args.start) if args.start else None,
        )
        trainable = model.trainable_by_module().items()
        logger.info("trained parameters: %s", ", ".join(f"{name} {n:,}" for name, n in trainable))
        if model.training.router_balance is not None and plan.accumulation_steps > 1:
            logger.info("%s", accumulated(plan.accumulation_steps))
        pulse.phase("checking the model", num_bytes=file_bytes, least_s=FIRST_PASS_S)
        checks += startup_checks(model, store, base, world)
        checks += check_precision(model.training, store, config.train, world)
        inputs = input_digests(
            args.tokens / MANIFEST,
            args.base,
            start=args.start,
            scores=args.scores,
            chooses_by_heldout=config.train.chooses_by_heldout,
        )
        start_files.check()
        training_run = TrainingRun(
            args.run, run_identity(args), config, plan, world, store, model, inputs
        )
        settings = config.train
        every = {
            HELDOUT: settings.evaluate_every_steps,
            CHECKPOINTS: settings.checkpoint_every_steps,
        }
        watch = TimeWatch(predicted_s, plan.num_steps, every)
        journal, selected_step = train(args, training_run, watch, pulse)
        pulse.phase("writing the results", num_bytes=model.state_bytes())
        write_results(
            args, training_run, journal, watch, checks=checks, selected_step=selected_step
        )


def lock_checkpoints(checkpoints: Path, stack: ExitStack, *, wait_s: float) -> None:
    """Lock the run's checkpoints as long as `stack` is open; log a killed process's remains."""
    lock = exclusive(checkpoints / ".lock", doing="training this run", wait_s=wait_s)
    killed_process = stack.enter_context(lock)
    if killed_process is not None:
        logger.info("%s", left_by(killed_process, checkpoints))
    if (others := trained_otherwise(checkpoints)) is not None:
        logger.info("%s", others)


@dataclass(frozen=True)
class RunState:
    """A run in progress: its trainer, measurements and records."""

    trainer: Trainer
    first_step: int
    num_steps: int
    journal: Journal
    writer: CheckpointWriter
    cadence: Cadence
    heldout: HeldOut | None
    best: BestAdapter | None
    state_bytes: int
    """Of a checkpoint, over all processes."""
    pulse: Pulse
    watch: TimeWatch

    @property
    def ends_early(self) -> bool:
        """Whether the held-out losses end the run, on all processes alike."""
        patience = self.trainer.settings.early_stopping_patience
        return patience_is_over(self.journal.heldout, patience)


def train(
    args: argparse.Namespace, run: TrainingRun, watch: TimeWatch, pulse: Pulse
) -> tuple[Journal, int]:
    """Train from the newest checkpoint to the end, and leave the selected adapter in the model;
    return its step too. A signal saves one more checkpoint and stops."""
    state = resume_run(args.checkpoints, run, watch, pulse)
    first_step, num_steps, journal = state.first_step, state.num_steps, state.journal
    training = run.model.training
    bar = progress_bar(args.run, done=first_step, num_steps=num_steps, world=run.world)
    # A run that had ended before its interruption takes no more step.
    last_step = first_step if state.ends_early else num_steps
    pulse.step(first_step + 1)
    with (
        StopRequest() as stop,
        state.writer.finishing(),
        bar,
        shown(args, run.config, journal, run.world) as show,
    ):
        for metrics in state.trainer.steps(
            first_step=first_step, num_steps=last_step, elapsed_s=journal.clock.elapsed_s
        ):
            if message := watch.after_step(
                metrics.tokens / metrics.tokens_per_s, step=metrics.step
            ):
                logger.info("%s", message)
            metrics = with_heldout_loss(metrics, state)
            if journal.add(metrics, coming_s=watch.coming_s):
                show(metrics.as_json())
            if state.best is not None and metrics.heldout_loss is not None:
                state.best.offer(training, loss=metrics.heldout_loss, step=metrics.step)
            bar.update()
            bar.set_postfix_str(journal.line(metrics), refresh=False)
            save_or_stop(
                state, step=metrics.step, stop_requested=stop.requested, tokens=args.tokens
            )
            if state.ends_early:
                break
            pulse.step(metrics.step + 1)
        pulse.phase("saving", num_bytes=state.state_bytes)
    journal.graphs_off = state.trainer.graphs_off
    if state.ends_early:
        logger.info(
            "ended after step %d of %d: none of the last %d held-out losses is the lowest so far "
            "(train.early_stopping_patience)",
            *(journal.step, num_steps, run.config.train.early_stopping_patience),
        )
    return journal, select_adapter(run.model, state.best, last_step=journal.step)


def resume_run(checkpoints: Path, run: TrainingRun, watch: TimeWatch, pulse: Pulse) -> RunState:
    """Load the newest checkpoint, if any, and open the records of further steps. Collective."""
    settings, training, world = run.config.train, run.model.training, run.world
    num_steps = run.plan.num_steps
    state_bytes = run.model.state_bytes()
    optimizer = make_optimizer(training, settings)
    pulse.phase("looking for a checkpoint", num_bytes=(settings.keep_checkpoints + 1) * state_bytes)
    resumed = resume_(
        checkpoints,
        training,
        optimizer,
        identity=run.identity,
        world=world,
        num_steps=num_steps,
        inputs=run.inputs,
    )
    if resumed.measured_otherwise:
        logger.warning(
            "the held-out data are others than before step %d: earlier held-out losses are left "
            "out of the metrics",
            resumed.step,
        )
    exported = run.config.export.steps
    for step in (x for x in exported if x <= resumed.step):
        chosen_checkpoint(checkpoints, step, setting="export.steps", change=GO_BACK)
    if world.is_main:
        write_checked_json(checkpoints / ADAPTER, run.model.adapter_config())
    journal = Journal(
        checkpoints,
        resumed=resumed,
        log_every=settings.log_every_steps,
        num_steps=num_steps,
        world=world,
    )
    writer = CheckpointWriter(
        checkpoints,
        keep=settings.keep_checkpoints,
        identity=run.identity,
        world=world,
        newest=resumed.step,
        exported=exported,
        inputs=run.inputs,
    )
    cadence = Cadence(settings.checkpoint_every_steps, settings.checkpoint_every_minutes, exported)
    best = (
        BestAdapter(checkpoints, journal.rows, world=world) if settings.select == "best" else None
    )
    if resumed.step:
        logger.info("continuing after step %d of %d", resumed.step, num_steps)
    graphs = MicroBatchGraphs(training, world) if run.plan.graphed else None
    rows = run.plan.micro_batch_size
    trainer = Trainer.over(
        training, optimizer, run.store, settings, rows, world, graphs, watch.waited
    )
    return RunState(
        trainer=trainer,
        first_step=resumed.step,
        num_steps=num_steps,
        journal=journal,
        writer=writer,
        cadence=cadence,
        heldout=held_out(run),
        best=best,
        state_bytes=state_bytes,
        pulse=pulse,
        watch=watch,
    )


def held_out(run: TrainingRun) -> HeldOut | None:
    """Return the held-out loss during the training, if there is one."""
    settings = run.config.train
    if settings.evaluate_every_steps is None:
        return None
    return HeldOut(
        run.store,
        every=settings.evaluate_every_steps,
        num_steps=run.plan.num_steps,
        at_most=settings.evaluate_documents,
        seed=settings.seed,
        micro_batch_size=run.plan.micro_batch_size,
    )


def with_heldout_loss(metrics: Step, state: RunState) -> Step:
    """Return a step's metrics with the held-out loss when it is due. Collective."""
    if state.heldout is None or not state.heldout.due(metrics.step):
        return metrics
    state.pulse.phase("held-out loss")
    trainer = state.trainer
    trainer.release_graphs()
    with state.watch.part(HELDOUT):
        losses = state.heldout.losses(trainer.training, world=trainer.world)
    several = {"heldout_losses": losses.by_source} if len(losses.by_source) > 1 else {}
    return metrics.model_copy(update={"heldout_loss": losses.whole, **several})


def save_or_stop(state: RunState, *, step: int, stop_requested: bool, tokens: Path) -> None:
    """Start a checkpoint of `step` if it is due on any process; stop if any must. Collective."""
    last = step == state.num_steps or state.ends_early
    due = last or state.cadence.due(step=step, last_saved_s=state.writer.last_saved_s)
    # Clocks differ, and a signal may reach one process alone, but saving is collective.
    stopping, saving = largest_of_all((stop_requested, due), world=state.trainer.world)
    if saving or stopping:
        state.pulse.phase("saving", num_bytes=state.state_bytes)
        TokenStore.open(tokens)  # bytes cut off a mapped file read as zeros
        with state.watch.part(CHECKPOINTS):
            state.writer.save(
                state.trainer.training,
                state.trainer.optimizer,
                step=step,
                clock=state.journal.clock,
            )
    if stopping and not last:
        state.writer.wait()
        logger.info("stopped after step %d of %d as asked; checkpoint saved", step, state.num_steps)
        sys.exit(os.EX_TEMPFAIL)  # for a repeated run


def progress_bar(run: str, *, done: int, num_steps: int, world: World) -> "tqdm[NoReturn]":
    """Return the bar of the main process, on a terminal alone; on all others a hidden one."""
    return tqdm(
        total=num_steps,
        initial=done,
        desc=run,
        unit="step",
        file=sys.stderr,
        disable=None if world.is_main else True,
    )


def select_adapter(model: TrainingModel, best: BestAdapter | None, *, last_step: int) -> int:
    """Load the best adapter into the model if it is not the last one; return its step."""
    if best is None or best.step == last_step:
        return last_step
    best.load_(model.training)
    logger.info("the adapter of step %d has the lowest held-out loss, %.4f", best.step, best.loss)
    return best.step


def shown(
    args: argparse.Namespace, config: RunConfig, journal: Journal, world: World
) -> AbstractContextManager[View]:
    """Return the live view of the run; an empty one on all but the main process."""
    if not world.is_main:
        return nullcontext(lambda row: None)
    trained = config.model_dump(mode="json", include={"model", "lora", "train"})
    shown = Shown(args.tracking, args.run, args.checkpoints.name, journal.rows, config=trained)
    return live_view(tracking_settings(args.config), shown)


def run_identity(args: argparse.Namespace) -> str:
    """Return the id of the run's settings, data and base: its checkpoints' folder name without the
    run's."""
    name: str = args.checkpoints.name
    return name.removeprefix(f"{args.run}-")


def write_results(
    args: argparse.Namespace,
    run: TrainingRun,
    journal: Journal,
    watch: TimeWatch,
    *,
    checks: list[Check],
    selected_step: int,
) -> None:
    """Write adapter, parity record, metrics and summary to a folder that appears as a whole."""
    training, world = run.model.training, run.world
    partial = args.output.with_name(f".{args.output.name}.partial")
    if world.is_main:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "adapter").mkdir(parents=True)
    torch.distributed.barrier(world.io_group)  # the others write into the folder, too
    save_adapter(training, partial / "adapter", world=world)
    shared = world.context is not None  # a process has no memory for whole rows
    most_tokens = world.slice_tokens(run.store.seq_len) if shared else None
    logits = trained_logits(training, run.store, device=world.device, most_tokens=most_tokens)
    peak = journal.peak_over_processes()
    if not world.is_main:
        return
    save_logits(logits, partial / "parity.safetensors")
    write_checked_json(partial / "adapter_config.json", run.model.adapter_config())
    journal.copy_to(partial / "metrics.jsonl")
    summary = summarize(
        run,
        journal,
        watch,
        predicted_bytes=read_record(args.preflight, Preflight).peak_bytes,
        peak_bytes=peak,
        checks=checks,
        selected_step=selected_step,
        parity_sha256=file_sha256(partial / "parity.safetensors"),
    )
    lineage = {"lineage": args.config["lineage"]} if "lineage" in args.config else {}
    facts = summary | lineage | {"base": str(args.base), "provenance": provenance()}
    write_checked_json(partial / "summary.json", facts)
    replace_folder(partial, args.output)
    logger.info("%s: loss %.3f -> %.3f", journal.amount(), *map(summary.get, LOSSES))


if __name__ == "__main__":
    # only the writing worker locks the checkpoints, itself
    run(main, command_line(__doc__), locks_itself=True)
