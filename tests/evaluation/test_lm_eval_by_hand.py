"""The harness' own command line, started by hand on the exported files, scores what the evaluation
stage reports.

Not to the last bit on a CPU: the stage computes in float32, while the harness by hand leaves what
is not quantized in the checkpoint's bfloat16, and bitsandbytes may repack the 4-bit weights for the
CPU. So two log-likelihoods are held equal within `TOLERANCE`, and an item's verdict wherever two
such errors cannot swap its two best answers."""

import json
import math
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_stage import forked_stage
from tests.support.models import stock_base
from tests.support.preloaded_python import SETTLED, preloaded_python
from tests.support.tiny_export import tiny_adapter
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.tokenizer import load_tokenizer
from workflow.lib.evaluation.lm_eval_tasks import load_tasks, run_tasks
from workflow.lib.evaluation.task_files import OFFLINE, SINGLE_PROCESS
from workflow.lib.evaluation.task_scores import TaskScores
from workflow.lib.export.stock_models import load_adapter
from workflow.lib.settings.config import EvaluateConfig

ROOT = Path(__file__).parents[2]
RESOURCES = ROOT / "workflow" / "resources"
ITEMS = 12
# Nats of an answer. Seen: 0.08 of a mean of -85.5, which is -50.4 without the adapter.
TOLERANCE = 0.4
# How likely the right answers are: a score that every weight of the adapter moves.
LIKELIHOOD = f"""
task: likelihood
dataset_path: json
dataset_kwargs: {{data_files: {{test: {RESOURCES}/tasks/pydocs_mc.jsonl}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
metric_list: [{{metric: perplexity, aggregation: perplexity, higher_is_better: false}}]
metadata: {{version: 1.0}}
"""
TASKS = ("pydocs_mc", "likelihood")


@dataclass(frozen=True)
class Measured:
    """The scores of the tuned model and of its base, and the folder of what the harness wrote by
    hand."""

    tuned: dict[str, TaskScores]
    base: dict[str, TaskScores]
    folder: Path

    def by_hand(self) -> dict[str, Any]:
        (file,) = self.folder.rglob("results_*.json")
        results: dict[str, Any] = json.loads(file.read_text())["results"]
        return results

    def items_by_hand(self) -> list[dict[str, Any]]:
        (file,) = self.folder.rglob("samples_pydocs_mc_*.jsonl")
        return [json.loads(line) for line in file.read_text().splitlines()]


def quantize(folder):
    files = ["--model", str(RESOURCES / "base"), "--output", str(folder)]
    done = forked_stage("quantize_base", *files, config={"quantize": {}})
    assert done.returncode == 0, done.stderr


def run_by_hand(folder):
    # softmax_dtype: else log-likelihoods are added up in bfloat16, in steps of a quarter or half.
    model = f"pretrained={folder}/base,peft={folder}/adapter,dtype=float32,softmax_dtype=float32"
    tasks = ["--tasks", ",".join(TASKS), "--include_path", f"{folder}/tasks"]
    options = ["--device", "cpu", "--batch_size", "8", "--limit", str(ITEMS)]
    output = ["--apply_chat_template", "--log_samples", "--output_path", f"{folder}/scores"]
    model_options = ["--model", "hf", "--model_args", model]
    forked = [preloaded_python(), "-m", "tests.support.run_script"]
    done = subprocess.run(
        [*forked, "-m", "lm_eval", "run", *model_options, *tasks, *options, *output],
        cwd=ROOT,
        env=os.environ | SETTLED | OFFLINE | SINGLE_PROCESS | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("by_hand")
    quantize(folder / "base")
    (folder / "tasks").mkdir()
    shutil.copy(RESOURCES / "tasks" / "pydocs_mc.yaml", folder / "tasks")
    (folder / "tasks" / "likelihood.yaml").write_text(LIKELIHOOD)

    settings = EvaluateConfig(tasks=TASKS, tasks_dir=str(folder / "tasks"), task_limit=ITEMS)
    tokenizer = load_tokenizer(folder / "base")
    tasks = load_tasks(settings, tokenizer=tokenizer, trained_template_sha256=None)

    def scores(model):
        return {
            name: run_tasks(model, task, tokenizer=tokenizer, settings=settings)
            for name, task in tasks.items()
        }

    tiny_adapter(stock_base(folder / "base"), folder / "adapter")
    tuned = load_adapter(stock_base(folder / "base"), Adapter(folder / "adapter"))
    run_by_hand(folder)
    with (
        pytest.MonkeyPatch.context() as variables
    ):  # as the stage does before it imports the harness
        for name, value in SINGLE_PROCESS.items():
            variables.setenv(name, value)
        ours = scores(tuned)
        with tuned.disable_adapter():
            return Measured(ours, scores(tuned), folder / "scores")


def mean_log_likelihood(scores):
    perplexity = scores["likelihood"].scores["likelihood"].metrics["perplexity"].value
    return -math.log(perplexity)


def test_answers_are_as_likely_by_hand(measured):
    ours = mean_log_likelihood(measured.tuned)
    by_hand = -math.log(measured.by_hand()["likelihood"]["perplexity,none"])
    assert by_hand == pytest.approx(ours, abs=TOLERANCE)
    assert abs(ours - mean_log_likelihood(measured.base)) > 20 * TOLERANCE


def test_items_have_the_same_prompts_and_verdicts_by_hand(measured):
    ours = measured.tuned["pydocs_mc"].items["pydocs_mc", "acc"]
    base = measured.base["pydocs_mc"].items["pydocs_mc", "acc"]
    items = measured.items_by_hand()
    # The hashes are those of the item and of its whole prompt, chat template included.
    by_hand = {(item["doc_id"], item["doc_hash"], item["prompt_hash"]): item for item in items}
    assert by_hand.keys() == ours.keys()
    clear = [key for key, item in by_hand.items() if margin(item) > 2 * TOLERANCE]
    assert len(clear) > ITEMS // 2
    assert {key: by_hand[key]["acc"] for key in clear} == {key: ours[key] for key in clear}
    assert sum(base[key] != ours[key] for key in clear) > ITEMS // 6


def margin(item):
    """How much likelier the best answer is than the next one, nats."""
    best, second, *_ = sorted((float(answer[0][0]) for answer in item["resps"]), reverse=True)
    return best - second
