"""The model card: metadata that the hub reads, and facts that are the run's."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id
from markdown_it import MarkdownIt

from tests.hub_server import start_hub
from tests.report_examples import HOSTILE, edit, write_run
from workflow.lib.card import CardInputs, model_card
from workflow.lib.records import Evaluation, Manifest, Parity, Summary, TunedEvaluation
from workflow.lib.report_inputs import read_record


def read(folder: Path, **changes: Any) -> CardInputs:
    tokens = folder.parents[1] / "tokens" / f"{folder.name}-data"
    inputs = CardInputs(
        model_id="acme/tiny-1b",
        dataset_id="acme/questions",
        dataset="questions",
        summary=read_record(folder / "finetune" / "summary.json", Summary),
        manifest=read_record(tokens / "manifest.json", Manifest),
        parity=read_record(folder / "consolidate" / "parity.json", Parity),
        base=read_record(folder / "evaluate_run" / "base.json", Evaluation),
        tuned=read_record(folder / "evaluate_run" / "tuned.json", TunedEvaluation),
    )
    return dataclasses.replace(inputs, **changes)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path, "demo", num_steps=3)


def test_metadata_is_read_back_by_the_hubs_own_parser(run: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(model_card(read(run)))
    data = ModelCard.load(tmp_path / "README.md").data
    found = {key: value for key, value in data.to_dict().items() if key != "model-index"}
    assert found == {
        "base_model": "acme/tiny-1b",
        "base_model_relation": "adapter",
        "datasets": "acme/questions",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["lora", "qlora", "fsdp"],
    }
    validate_repo_id(found["base_model"])
    validate_repo_id(found["datasets"])


def validated(card: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Let huggingface_hub validate a card, in a process that takes a stand-in for the hub."""
    (folder / "README.md").write_text(card)
    code = (
        "import sys; from huggingface_hub import ModelCard; ModelCard.load(sys.argv[1]).validate()"
    )
    with start_hub({}) as endpoint:
        return subprocess.run(
            [sys.executable, "-c", code, str(folder / "README.md")],
            env=os.environ | {"HF_ENDPOINT": endpoint, "NO_PROXY": "*", "HF_HUB_OFFLINE": "0"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip


@pytest.mark.parametrize("named", [True, False], ids=["from the hub", "local"])
def test_huggingface_hubs_own_validation_accepts_the_card(
    run: Path, tmp_path: Path, named: bool
) -> None:
    changes = {} if named else {"model_id": None, "dataset_id": None}
    done = validated(model_card(read(run, **changes)), tmp_path)
    assert done.returncode == 0, done.stderr


def test_huggingface_hubs_own_validation_refuses_a_folder_as_data_set(
    run: Path, tmp_path: Path
) -> None:
    done = validated(model_card(read(run, dataset_id="/data/questions.jsonl")), tmp_path)
    assert "\"datasets\" with value '/data/questions.jsonl' is not valid" in done.stderr


def test_results_are_in_the_hubs_terms_unrounded(run: Path) -> None:
    data = ModelCard(model_card(read(run))).data
    results = {(r.dataset_type, r.metric_type): r.metric_value for r in data.eval_results}
    assert data.model_name == "demo"
    assert results == {
        ("acme/questions", "loss"): 1.5123456789,
        ("acme/questions", "perplexity"): 4.5373,
        ("pydocs_mc", "acc"): 0.6137,
        ("pydocs_mc", "acc_norm"): 0.6331,
    }


def test_local_base_and_data_are_described_and_not_linked(run: Path) -> None:
    text = model_card(read(run, model_id=None, dataset_id=None))
    assert not {"base_model", "base_model_relation", "datasets"} & set(
        ModelCard(text).data.to_dict()
    )
    assert "| Base model | <code>example/base-8b</code>, NF4 with bitsandbytes |" in text


@pytest.mark.parametrize(
    "line",
    [
        "# demo",
        "| Rows | 1,997 trained, 1,997 held out, 12 dropped |",
        r"| Adapter | LoRA, rank 16, alpha 32, targets <code>q\_proj</code>, <code>v\_proj</code> |",
        "| Optimizer steps | 3 of 17 rows of 257 tokens |",
        "| Export check | logits of the reloaded adapter within 0.0078 of the trained model's (tolerance 0.05) at 513 positions |",
        r"| loss on 127 held-out documents, nats per token | 2.9877 \[2.8801, 3.0912\] | 1.5123 \[1.4511, 1.5732\] | +1.4753 \[1.3711, 1.5802\], p &lt; 0.001 |",
        r"| pydocs\_mc, acc, 331 items | 0.2519 | 0.6137 | +0.3618 \[0.3021, 0.4214\] |",
        "base = AutoModelForCausalLM.from_pretrained('example/base-8b')",
    ],
)
def test_card_states_the_runs_facts(run: Path, line: str) -> None:
    assert line in model_card(read(run)).splitlines()


def test_card_names_modules_that_were_trained_whole(run: Path) -> None:
    edit(
        run / "finetune" / "summary.json",
        lambda d: d["settings"]["lora"].update(modules_to_save=["embed_tokens", "lm_head"]),
    )
    assert (
        r"<code>v\_proj</code>; <code>embed\_tokens</code> and <code>lm\_head</code> trained whole |"
        in model_card(read(run))
    )


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ([0.1, 0.3], "is lower"),
        ([-0.1, 0.3], "is not clearly different"),
        ([-0.3, -0.1], "is higher"),
    ],
)
def test_first_sentence_follows_the_interval(run: Path, ends: list[float], words: str) -> None:
    edit(
        run / "evaluate_run" / "tuned.json",
        lambda d: d["comparison"].update(loss_difference_ci95=ends),
    )
    assert f"Its held-out loss {words}" in model_card(read(run))


def test_task_without_a_clear_gain_is_among_the_limits(run: Path) -> None:
    gain = {"difference": 0.01, "difference_ci95": [-0.02, 0.04]}
    edit(
        run / "evaluate_run" / "tuned.json",
        lambda d: d["comparison"]["tasks"]["pydocs_mc"]["acc"].update(gain),
    )
    assert r"- No clear gain over the base on: pydocs\_mc." in model_card(read(run))


def test_run_that_measured_nothing_says_so(run: Path) -> None:
    for subject in ("base", "tuned"):
        edit(run / "evaluate_run" / f"{subject}.json", lambda d: d.update(heldout=None, tasks={}))
    nothing = {"loss_difference": None, "loss_difference_ci95": None, "p_value": None, "tasks": {}}
    edit(run / "evaluate_run" / "tuned.json", lambda d: d["comparison"].update(nothing))
    text = model_card(read(run))
    assert "Nothing was measured." in text
    assert "model-index" not in ModelCard(text).data.to_dict()


def test_hostile_text_is_neither_markup_nor_metadata(run: Path) -> None:
    hostile = f"{HOSTILE} | [a](http://x.example) **b**\n---\nlicense: mit\n# c"
    edit(
        run / "finetune" / "summary.json",
        lambda d: (d["settings"]["model"].update(source=hostile), d.update(device_name=hostile)),
    )
    for subject in ("base", "tuned"):
        edit(
            run / "evaluate_run" / f"{subject}.json",
            lambda d: d.update(tasks={hostile: d["tasks"].pop("pydocs_mc")}),
        )
    edit(
        run / "evaluate_run" / "tuned.json",
        lambda d: d["comparison"].update(tasks={hostile: d["comparison"]["tasks"]["pydocs_mc"]}),
    )
    text = model_card(read(run))
    assert "license" not in ModelCard(text).data.to_dict()
    page = MarkdownIt("commonmark", {"html": True}).enable("table").render(ModelCard(text).text)
    assert not [tag for tag in ("<script", "<img", "<a ", "<strong", "\x1b") if tag in page]
    assert page.count("<h1>") == 1
