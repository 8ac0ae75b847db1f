"""Two gloo processes, with slices of one model or a copy each, measure what the stock reload
measures in one."""

import shutil
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.evaluation.test_lm_eval_tasks import WRITE, task_file
from tests.export.test_mixtures import IDS, exported, logits, stock
from tests.support.distributed import TIMEOUT_S, run_distributed
from tests.support.mixtures import tiny_mixture
from tests.support.models import quantized
from tests.support.tiny_export import exported_run, random_documents, tiny_tokens
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.files.model_files import ADAPTER_WEIGHTS
from workflow.lib.checkpoints.tokenizer import load_tokenizer
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.distributed.weight_checks import local_bytes
from workflow.lib.distributed.world import process_group
from workflow.lib.evaluation.evaluated_models import machine_facts, source_files, subjects
from workflow.lib.evaluation.questions import Archive, Measurement, measure, parts, prepare
from workflow.lib.export.sharded_models import load_sharded_adapter, load_sharded_base
from workflow.lib.export.stock_models import load_adapter, load_options
from workflow.lib.settings.config import ModelConfig
from workflow.lib.settings.forms import FOLDERS, SUBJECTS, SubjectName
from workflow.lib.system.errors import UserError

Measurements = dict[SubjectName, Measurement]
EXACT = ModelConfig(compute_dtype="float32")


@dataclass(frozen=True)
class Found:
    """What one process measured, by subject, with slices and with copies; the share of the model's
    bytes that it held; and what it was told of an adapter that does not fit."""

    sliced: Measurements
    copied: Measurements
    held: float
    refusal: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_export(tmp_path_factory.mktemp("export"))


def make_export(folder):
    """Make all that an evaluation reads, and an adapter that lacks a tensor."""
    exported_run(folder)
    shutil.copytree(folder / "adapter", folder / "start")
    incomplete = shutil.copytree(folder / "adapter", folder / "incomplete")
    tensors = load_file(incomplete / ADAPTER_WEIGHTS)
    tensors.pop(min(tensors))
    save_file(tensors, incomplete / ADAPTER_WEIGHTS)
    tiny_tokens(folder / "tokens", random_documents(7))
    (folder / "tasks").mkdir()
    return folder


@pytest.fixture(scope="module")
def settings(folder):
    return make_settings(folder)


def make_settings(folder):
    """7 documents, 3 prompts and 13 items: nothing divides by 2, and answers differ in length."""
    task_file(folder / "tasks", "writes", template=WRITE)
    local = task_file(folder / "tasks", "local")
    asked = {"tasks": ("local", "writes"), "samples": 3, "max_new_tokens": 5}
    return local.model_copy(update={**asked, "batch_size": 6})


def evaluate(folder, settings, device="cpu", *, world, shards=None):
    tokens = TokenStore.open(folder / "tokens")
    questions = prepare(tokens, tokenizer=load_tokenizer(folder / "base"), settings=settings)
    chosen = torch.device(device) if world is None else world.device
    options = load_options(Checkpoint(folder / "base"), device=chosen, settings=EXACT)
    original = folder / "base-original"
    asked = subjects(
        SUBJECTS,
        {name: folder / name for name in FOLDERS} | {"model": original},
        options=options,
        sources=source_files(original, world=world),
        shards=shards,
    )
    machine = machine_facts(options)
    archive = Archive(folder / f"archive of {settings.batch_size}, shards {shards is not None}")
    wanted = parts(questions, world=world)
    return {
        subject.name: measure(subject, wanted, archive=archive, machine=machine, world=world)[0]
        for subject in asked
    }


def load(folder, adapter, world):
    options: dict[str, Any] = {"compute_dtype": torch.float32, "attention": "sdpa"}
    return load_sharded_adapter(
        Checkpoint(folder / "base"), Adapter(folder / adapter), world=world, **options
    )


def refusal(folder, world):
    try:
        load(folder, "incomplete", world)
    except UserError as error:
        return str(error)
    return "loaded"


def in_two_processes(folder, settings, device="cpu"):
    with process_group(device, timeout_s=TIMEOUT_S) as world:
        held, total = local_bytes(load(folder, "adapter", world))
        return Found(
            sliced=evaluate(folder, settings, world=world, shards=world),
            copied=evaluate(folder, settings, world=world),
            held=held / total,
            refusal=refusal(folder, world),
        )


@pytest.fixture(scope="module")
def alone(folder, settings):
    return evaluate(folder, settings.model_copy(update={"batch_size": 5}), world=None)


@pytest.fixture(scope="module")
def together(folder, settings):
    return run_distributed(partial(in_two_processes, folder, settings), world_size=2)


@pytest.fixture(params=["sliced", "copied"])
def measured(request, together):
    first, second = (getattr(found, request.param) for found in together)
    assert first == second
    found: Measurements = first
    return found


EACH = pytest.mark.parametrize("subject", SUBJECTS)


@EACH
def test_losses_are_those_of_one_process(alone, measured, subject):
    """fp32 sums in another order."""
    sums, counts = zip(*measured[subject].losses, strict=True)
    expected_sums, expected_counts = zip(*alone[subject].losses, strict=True)
    assert counts == expected_counts
    assert sums == pytest.approx(expected_sums, rel=2e-5)


@EACH
def test_answers_are_those_of_one_process(alone, measured, subject):
    assert measured[subject].answers == alone[subject].answers


@EACH
def test_task_items_are_those_of_one_process(alone, measured, subject):
    assert {task for task, _ in alone[subject].tasks.items} == {"local", "writes"}
    assert measured[subject].tasks.items == alone[subject].tasks.items


def test_each_process_holds_half_of_a_sharded_model(together):
    assert [found.held for found in together] == pytest.approx([0.5, 0.5], abs=0.05)


def test_adapter_without_a_tensor_is_refused_by_all(together):
    for found in together:
        assert "incomplete does not fit the model: of its tensors, 1 missing" in found.refusal


def share(folder):
    """Return the logits of the sharded models."""
    options = {"compute_dtype": torch.float32, "attention": "eager"}
    found = {}
    with process_group("cpu", timeout_s=TIMEOUT_S) as world, torch.no_grad():
        original = load_sharded_base(Checkpoint(folder / "model"), world=world, **options)
        found["original"] = original(IDS).logits
        for base in ("nf4", "model"):
            tuned = load_sharded_adapter(
                Checkpoint(folder / base), Adapter(folder / "adapter"), world=world, **options
            )
            found[base] = tuned.get_base_model()(IDS).logits
    return found


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_moe"])
def test_shared_mixture_computes_what_the_stock_reload_does(tmp_path, family):
    tiny_mixture(family, tmp_path / "model")
    quantized(tmp_path / "model", tmp_path / "nf4")
    exported(tmp_path, tmp_path / "adapter")
    for found in run_distributed(share, tmp_path, world_size=2):
        expected = logits(stock(tmp_path / "model"))
        torch.testing.assert_close(found["original"], expected, rtol=1e-4, atol=1e-4)
        for base in ("nf4", "model"):
            expected = logits(load_adapter(stock(tmp_path / base), Adapter(tmp_path / "adapter")))
            torch.testing.assert_close(found[base], expected, rtol=1e-4, atol=2e-4)
