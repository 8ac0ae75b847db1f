import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_harness import task_file
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer
from tests.tiny_export import random_documents, tiny_adapter, tiny_base, tiny_tokens
from workflow.lib.artifacts import canonical_json
from workflow.lib.config import EvaluateConfig
from workflow.lib.records import Evaluation, TunedEvaluation

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    tiny_adapter(tiny_base(folder / "base"), folder / "adapter")
    tiny_tokenizer(folder / "base", chat_template=False)
    (folder / "template.jinja").write_text(CHAT_TEMPLATE)
    tiny_tokens(folder / "tokens", random_documents(7))
    (folder / "tasks").mkdir()
    return folder


def evaluate(folder: Path, output: Path, settings: EvaluateConfig):
    config = canonical_json({"model": {}, "evaluate": settings.model_dump(mode="json")})
    outputs = {"output-base": output / "base.json", "output-tuned": output / "tuned.json"}
    inputs = {name: folder / name for name in ("base", "adapter", "tokens")}
    options = inputs | outputs | {"log": output / "log", "run": "demo", "config": config}
    options["chat-template"] = folder / "template.jinja"
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return subprocess.run(
        [sys.executable, "-m", "workflow.scripts.evaluate_run", *arguments],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(output / "hf")},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("output")
    settings = task_file(folder / "tasks", "local").model_copy(
        update={"samples": 2, "max_new_tokens": 4}
    )
    return evaluate(folder, output, settings), output


def test_stage_succeeds_and_writes_both_artifacts_as_the_report_reads_them(finished):
    """The base's tokenizer has no chat template, which would be refused: --chat-template gives it."""
    process, output = finished
    assert process.returncode == 0, process.stderr
    base = Evaluation.model_validate_json((output / "base.json").read_text())
    tuned = TunedEvaluation.model_validate_json((output / "tuned.json").read_text())
    assert (base.run, base.subject, tuned.subject) == ("demo", "base", "tuned")
    assert base.provenance.stage == "evaluate_run"
    assert tuned.comparison.documents == 7
    assert list(tuned.tasks) == ["local"]


def test_log_tells_what_is_measured_and_what_came_out(finished):
    log = (finished[1] / "log").read_text()
    assert "loss of 7 of 7 held-out documents, 2 samples, tasks: local" in log
    assert "held-out loss " in log
    assert "local acc " in log


def test_no_bars_are_drawn_without_a_terminal(finished):
    assert "%|" not in finished[0].stderr


def test_wrong_setting_ends_in_one_message_before_the_weights_are_read(folder, tmp_path):
    settings = EvaluateConfig(tasks=(), max_documents=1)
    process = evaluate(folder, tmp_path, settings)
    assert process.returncode == 1
    assert "evaluate.heldout = True: an interval needs at least 2" in process.stderr
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "base.json").exists()
