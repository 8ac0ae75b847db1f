"""The stage reads no base and no tokens that were damaged, and says that it looked."""

import shutil
from dataclasses import replace

import pytest
import torch

from tests.support.distributed import run_distributed
from tests.support.finished import CONFIG, PLAN, SEQ_LEN, arguments, finetune, finished, prepare
from tests.support.models import VOCAB
from tests.support.scores import FACTS
from tests.system.test_checksums import flip, flip_tensor
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.distributed.sharded_files import read_whole
from workflow.lib.export.adapter_files import read_sharded_adapter, save_adapter
from workflow.lib.export.stock_models import load_base
from workflow.lib.scores.scoring import WholeModel, rows_of
from workflow.lib.scores.store import ScoreWriter
from workflow.lib.settings.config import DistillConfig
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_checked_json


def refused_training(folder):
    """Be a worker of the stage, on files that were damaged before; return the message."""
    try:
        finetune(arguments(folder))
    except UserError as error:
        return str(error)
    return "no error"


@pytest.fixture
def prepared(tmp_path):
    prepare(tmp_path)
    return tmp_path


def flip_weight(folder):
    return flip_tensor(folder / "base", "model.layers.1.mlp.up_proj.weight")


def flip_token(folder):
    path = folder / "tokens" / "train.input_ids.npy"
    flip(path, -4)
    return path


DAMAGES = {"packed weight": flip_weight, "token": flip_token}  # they open, and train to the end


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_bit_of_base_or_tokens_stops_all_processes_before_the_model_is_loaded(prepared, damage):
    path = DAMAGES[damage](prepared)
    messages = run_distributed(refused_training, prepared, world_size=2)
    assert set(messages) == {
        f"{path} is damaged: it does not have the SHA-256 that was recorded when it was made. "
        f"Delete the folder {path.parent} and repeat the command; the folder is made again."
    }
    assert not (prepared / "finetune").exists()
    assert list((prepared / "checkpoints").glob("*/step-*")) == []


def test_summary_tells_that_the_files_were_compared_with_their_record(prepared):
    run_distributed(finetune, arguments(prepared), world_size=2)
    first, *others = read_checked_json(prepared / "finetune" / "summary.json")["checks"]
    files = [*(prepared / "base").glob("*[!S]"), *(prepared / "tokens").glob("*.npy")]
    assert first == {
        "name": "base and tokens have their recorded SHA-256",
        "passed": True,
        "detail": f"{len(files)} files, {sum(p.stat().st_size for p in files):,} bytes",
    }
    assert any("gathered bytes equal checkpoint bytes" in check["name"] for check in others)


def test_student_that_is_its_own_teacher_begins_without_loss(prepared):
    """Its scores are of stock packages, by document, and rows are in another order."""
    tokens, top_k = TokenStore.open(prepared / "tokens"), 5
    device, dtype = torch.device("cpu"), torch.float32
    model = load_base(
        Checkpoint(prepared / "base"), device=device, compute_dtype=dtype, attention="sdpa"
    )
    scorer = WholeModel(model, device=device, top_k=top_k, vocabulary=VOCAB)
    facts = FACTS | {"model": "start", "top_k": top_k}
    writer = ScoreWriter(prepared / "scores", facts, tokens, shard_tokens=3 * SEQ_LEN)
    for part in writer.prepare():
        rows = rows_of(tokens, part, attention=scorer.attention)
        writer.add(part, scorer.scores(rows, lambda share: None))
    writer.finish()
    train = CONFIG.train.model_copy(update={"objective": "distill"})
    teacher = DistillConfig(teacher="start", top_k=top_k)
    config = CONFIG.model_copy(update={"train": train, "distill": teacher})
    args = arguments(prepared)
    args.scores = prepared / "scores"
    plan = replace(PLAN, objective="distill", top_k=top_k)
    run_distributed(finetune, args, config, plan, world_size=2)
    # of scores of other tokens it would be of the size of an untrained model's loss
    assert abs(read_checked_json(args.output / "summary.json")["first_loss"]) < 1e-5


def refused_step(args):
    export = CONFIG.export.model_copy(update={"steps": (4, 6)})
    try:
        finetune(args, CONFIG.model_copy(update={"export": export}))
    except UserError as error:
        return str(error)
    return "no error"


def test_run_that_is_past_a_step_without_its_checkpoint_does_not_go_on(shared_folder, tmp_path):
    args = arguments(finished(shared_folder))
    shutil.copytree(args.checkpoints, tmp_path / "demo-0123456789ab")
    args.checkpoints, args.output = tmp_path / "demo-0123456789ab", tmp_path / "finetune"
    messages = run_distributed(refused_step, args, world_size=2)
    (said,) = {*messages}
    assert said.startswith(f"export.steps = 6: {args.checkpoints} has no checkpoint of it, ")


def test_run_with_more_steps_goes_on_from_a_shorter_one_with_the_same_steps(prepared, tmp_path):
    """And one with fewer steps leaves the checkpoints of the longer one alone."""
    steady = {"lr_schedule": "constant", "warmup_share": 0.0}

    def trained(num_steps, folder):
        train = CONFIG.train.model_copy(update=steady | {"max_steps": num_steps})
        assert train.begins_longer_runs
        args = arguments(prepared)
        args.checkpoints, args.output = folder / "checkpoints", folder / f"of-{num_steps}"
        plan = replace(PLAN, num_steps=num_steps)
        run_distributed(
            finetune, args, CONFIG.model_copy(update={"train": train}), plan, world_size=2
        )
        summary = read_checked_json(args.output / "summary.json")
        return summary["resumed_from_steps"], read_whole(args.output / "adapter")

    _, whole = trained(7, tmp_path / "whole")
    begun, short = trained(3, tmp_path / "parts")
    resumed, longer = trained(7, tmp_path / "parts")
    assert (begun, resumed) == ([], [3])
    assert all(torch.equal(longer[name], value) for name, value in whole.items())
    shutil.rmtree(tmp_path / "parts" / "of-3")
    _, again = trained(3, tmp_path / "parts")
    assert all(torch.equal(again[name], value) for name, value in short.items())
    steps = {path.name for path in (tmp_path / "parts" / "checkpoints").glob("step-*")}
    assert {"step-00000003", "step-00000007"} <= steps


def test_continued_run_that_resumes_is_bit_equal(prepared, shared_folder):
    """It begins with the values of the adapter that it starts from, and goes on from its own."""
    before = finished(shared_folder) / "finetune"
    adapter = read_sharded_adapter(before / "adapter")
    save_adapter(adapter, read_checked_json(before / "adapter_config.json"), prepared / "start")
    config = CONFIG.model_copy(
        update={"train": CONFIG.train.model_copy(update={"start_from": "start"})}
    )
    args = arguments(prepared)
    args.start = prepared / "start"
    args.config["lineage"] = [{"adapter": "start"}]
    run_distributed(finetune, args, config, world_size=2)
    summary = read_checked_json(args.output / "summary.json")
    assert summary["lineage"] == args.config["lineage"]
    earlier = read_checked_json(before / "summary.json")
    assert summary["first_loss"] < earlier["first_loss"]  # the same rows, seen before
    whole = read_whole(args.output / "adapter")
    steps = sorted(args.checkpoints.glob("step-*"))
    assert len(steps) == 2
    shutil.rmtree(steps[-1])
    shutil.rmtree(args.output)
    run_distributed(finetune, args, config, world_size=2)
    assert read_checked_json(args.output / "summary.json")["resumed_from_steps"] == [4]
    resumed = read_whole(args.output / "adapter")
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
