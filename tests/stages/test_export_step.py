"""The stage: the adapter of a kept checkpoint, as stock PEFT loads it."""

import argparse
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.support.finished import CONFIG, STEPS, arguments
from tests.system.test_checksums import flip
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.distributed.sharded_files import read_whole
from workflow.lib.export import adapter_files
from workflow.lib.export.adapter_files import read_sharded_adapter
from workflow.lib.export.stock_models import load_adapter, load_base
from workflow.lib.system.checksums import check_files, listed_files
from workflow.lib.system.errors import UserError
from workflow.scripts.export_step import NOT_REACHED, main

SAVED = 4  # the checkpoint before the last


def export(run, output, *, step, checkpoints=None, summary=None):
    main(
        argparse.Namespace(
            config=CONFIG.model_dump(mode="json", include={"model", "export"}),
            checkpoints=checkpoints or arguments(run).checkpoints,
            step=step,
            base=run / "base",
            model=run / "model",
            manifest=run / "tokens" / "manifest.json",
            summary=summary,
            output=output,
        )
    )


def exported(run, output, **options):
    export(run, output, **options)
    return load_file(output / "adapter_model.safetensors")


@pytest.mark.parametrize("step", [SAVED, STEPS])
def test_stock_peft_loads_the_values_of_the_checkpoint(run, tmp_path, step):
    found = exported(run, tmp_path / "step", step=step)
    saved = read_whole(arguments(run).checkpoints / f"step-{step:08d}")
    device = torch.device("cpu")
    base = load_base(
        Checkpoint(run / "base"), device=device, compute_dtype=torch.float32, attention="eager"
    )
    model = load_adapter(base, Adapter(tmp_path / "step"))
    loaded = {n.replace(".default.", "."): p for n, p in model.named_parameters() if ".lora_" in n}
    assert loaded.keys() == found.keys() == {n[8:] for n in saved if n.startswith("adapter/")}
    assert all(torch.equal(loaded[name].detach(), saved[f"adapter/{name}"]) for name in loaded)


def test_adapter_of_the_last_step_is_the_one_that_the_run_leaves(run, tmp_path):
    found = exported(run, tmp_path / "step", step=STEPS)
    last = read_sharded_adapter(run / "finetune" / "adapter")
    assert found.keys() == last.keys()
    assert all(torch.equal(found[name], last[name]) for name in last)


def test_step_before_which_no_round_had_anything_to_learn_is_exported(run, tmp_path, monkeypatch):
    def zeroed(folder, *, below):
        return {
            name: x.zero_() if ".lora_B." in name else x
            for name, x in read_whole(folder, below=below).items()
        }

    monkeypatch.setattr(adapter_files, "read_whole", zeroed)
    found = exported(run, tmp_path / "step", step=SAVED)
    assert not any(x.any() for name, x in found.items() if ".lora_B." in name)
    assert any(x.any() for x in found.values())


def test_folder_holds_its_tokenizer_and_checksums_of_every_file(run, tmp_path):
    exported(run, tmp_path / "step", step=SAVED)
    listed = listed_files(tmp_path / "step")
    check_files(listed)
    names = {path.name for path in (tmp_path / "step").iterdir()}
    assert names == {file.name for file in listed} | {"SHA256SUMS"}
    assert names >= {"adapter_config.json", "tokenizer.json", "chat_template.jinja"}


def test_step_without_a_checkpoint_is_refused_with_those_that_are_there(run, tmp_path):
    with pytest.raises(UserError) as refused:
        exported(run, tmp_path / "step", step=6)
    folder = arguments(run).checkpoints
    begins = f"export.steps = 6: {folder} has no checkpoint of it, only those of steps 4, 7. "
    assert str(refused.value).startswith(begins)
    assert list(tmp_path.iterdir()) == []


def test_step_that_an_early_end_kept_the_run_from_is_told_and_fails_nothing(run, tmp_path):
    export(run, tmp_path / "step", step=STEPS + 1, summary=run / "finetune" / "summary.json")
    listed = listed_files(tmp_path / "step")
    check_files(listed)
    assert [file.name for file in listed] == [NOT_REACHED]
    assert (tmp_path / "step" / NOT_REACHED).read_text() == (
        f"export.steps = {STEPS + 1}: there is no adapter of this step, since "
        f"train.early_stopping_patience ended the run after step {STEPS}.\n"
    )


def test_damaged_checkpoint_exports_nothing(run, tmp_path):
    shutil.copytree(arguments(run).checkpoints, tmp_path / "kept")
    flip(next((tmp_path / "kept" / f"step-{SAVED:08d}").glob("shard-*")), -1)
    with pytest.raises(UserError, match="does not have its SHA-256"):
        exported(run, tmp_path / "step", step=SAVED, checkpoints=tmp_path / "kept")
    assert not (tmp_path / "step").exists()
