import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.evaluation.test_lm_eval_tasks import WRITE, task_file
from tests.support.forked_stage import forked_stage, refusal_of
from tests.support.scores import FACTS
from tests.support.tiny import CHAT_TEMPLATE, VOCAB_SIZE, tiny_tokenizer
from tests.support.tiny_export import exported_run, random_documents, tiny_tokens
from tests.system.test_checksums import flip, flip_tensor
from workflow.lib.artifacts.evaluation_record import ITEMS, Evaluation, Items
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.export.stock_models import load_base
from workflow.lib.report.verdict import read_measured
from workflow.lib.scores.scoring import WholeModel, rows_of
from workflow.lib.scores.store import ScoreWriter
from workflow.lib.settings.config import EvaluateConfig
from workflow.lib.system.files import read_json, write_checksums

MEASURED = ["original", "base", "tuned", "merged"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = exported_run(tmp_path_factory.mktemp("run"))
    (folder / "base" / "chat_template.jinja").unlink()
    tiny_tokenizer(folder / "base", chat_template=False)
    write_checksums(folder / "base")
    (folder / "template.jinja").write_text(CHAT_TEMPLATE)
    tiny_tokens(folder / "tokens", random_documents(7), rows=random_documents(2, seed=1))
    (folder / "tasks").mkdir()
    return folder


def evaluate(folder, output, settings, *, scores=None, **sections):
    options = {name: folder / name for name in ("base", "adapter", "merged", "tokens")}
    options |= {"model": folder / "base-original", "run": "demo"}
    options |= {"archive": output / "archive", "log": output / "log"}
    options |= {"output": output / "evaluation", "chat_template": folder / "template.jinja"}
    options |= {"scores": scores} if scores else {}
    names = ("model", "train", "preferences", "distill", "grpo")
    sections = {name: {} for name in names} | sections
    chosen = {"subjects": MEASURED, "served": "merged"}
    options["config"] = sections | {"evaluate": settings.model_dump(mode="json") | chosen}
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return forked_stage("evaluate_run", environment=environment, **options)


def refused(folder, output, settings):
    return refusal_of(evaluate(folder, output, settings), output=output / "evaluation")


@pytest.fixture(scope="module")
def settings(folder):
    task_file(folder / "tasks", "writes", template=WRITE)
    local = task_file(folder / "tasks", "local")
    asked = {"tasks": ("local", "writes"), "batch_size": "auto", "samples": 2, "max_new_tokens": 4}
    return local.model_copy(update=asked)


@pytest.fixture(scope="module")
def finished(folder, settings, tmp_path_factory):
    output = tmp_path_factory.mktemp("output")
    return evaluate(folder, output, settings), output


def test_stage_succeeds_and_writes_its_artifacts_as_the_report_reads_them(finished):
    """The base's tokenizer has no chat template, which would be refused: --chat-template gives
    it."""
    process, output = finished
    assert process.returncode == 0, process.stderr
    measured = read_measured(output / "evaluation", run="demo")
    assert list(measured.subjects) == MEASURED
    assert (measured.served.subject, measured.reference.subject) == ("merged", "original")
    assert measured.served.provenance.stage == "evaluate_run"
    assert measured.comparison.documents == 7
    assert list(measured.served.tasks) == ["local", "writes"]
    assert measured.forgetting.difference.documents == 29, "chats need the model's own template"


def test_numbers_of_every_subject_follow_from_the_items(finished):
    evaluation = finished[1] / "evaluation"
    items = read_record(evaluation / ITEMS, Items)
    assert list(items.subjects) == MEASURED
    assert list(items.overlap) == ["local", "writes"]
    for name, subject in items.subjects.items():
        found = read_record(evaluation / f"{name}.json", Evaluation)
        losses = [document.loss_sum for document in subject.losses]
        assert sum(losses) / found.heldout.trained_tokens == pytest.approx(found.heldout.loss)
        for task in subject.tasks:
            mean = sum(value for *_, value in task.values) / len(task.values)
            assert mean == pytest.approx(found.tasks[task.task].metrics[task.metric].value)


def numbers(output):
    found = {}
    for subject in MEASURED:
        content = read_json(output / "evaluation" / f"{subject}.json")
        for document in content["heldout"]["per_document"]:
            found[f"{subject} document {document['document']}"] = document["loss_sum"]
        for task, scores in content["tasks"].items():
            for metric, score in scores["metrics"].items():
                found[f"{subject} {task} {metric}"] = score["value"]
    return found


def texts(output):
    """The answers to every sample prompt, of all subjects."""
    found = [read_json(output / "evaluation" / f"{name}.json")["samples"] for name in MEASURED]
    return [sample["answer"] for samples in found for sample in samples]


def test_two_processes_that_share_the_weights_give_the_same_numbers(
    folder, settings, finished, tmp_path
):
    """Fp32 sums in another order; 7 documents and 13 items do not divide by 2, and batches are
    others."""
    two = settings.model_copy(update={"processes": 2, "shard": True, "batch_size": 3})
    process = evaluate(folder, tmp_path, two)
    assert process.returncode == 0, process.stderr
    assert "2 process(es) that share the weights: loss of 7 of 7" in process.stderr
    assert numbers(tmp_path) == pytest.approx(numbers(finished[1]), rel=2e-5, abs=1e-4)
    assert texts(tmp_path) == texts(finished[1])


def test_base_that_teaches_itself_has_no_loss_by_its_teacher(folder, tmp_path):
    tokens, top_k = TokenStore.open(folder / "tokens"), 5
    device = torch.device("cpu")
    model = load_base(
        Checkpoint(folder / "base"), device=device, compute_dtype=torch.float32, attention="sdpa"
    )
    scorer = WholeModel(model, device=device, top_k=top_k, vocabulary=VOCAB_SIZE)
    writer = ScoreWriter(tmp_path / "scores", FACTS | {"top_k": top_k}, tokens, shard_tokens=100)
    for part in writer.prepare():
        rows = rows_of(tokens, part, attention=scorer.attention)
        writer.add(part, scorer.scores(rows, lambda share: None))
    writer.finish()
    process = evaluate(
        folder,
        tmp_path,
        EvaluateConfig(tasks=(), samples=0, processes=2),
        scores=tmp_path / "scores",
        train={"objective": "distill"},
        distill={"top_k": top_k},
    )
    assert process.returncode == 0, process.stderr
    found = read_measured(tmp_path / "evaluation", run="demo")
    assert abs(found.subjects["base"].objective.loss) < 1e-5  # fp32 sums in another order
    assert found.served.objective.loss > 0.01
    assert found.served.objective.against == "NF4 base"


def test_wrong_setting_ends_in_one_message_before_the_weights_are_read(folder, tmp_path):
    settings = EvaluateConfig(tasks=(), max_documents=1)
    said = refused(folder, tmp_path, settings)
    assert "evaluate.heldout = true: an interval needs at least 2" in said


def flip_token(folder):
    path = folder / "tokens" / "heldout.input_ids.npy"
    flip(path, -4)
    return path


DAMAGES = {
    "base": lambda folder: flip_tensor(folder / "base", "model.layers.1.mlp.up_proj.weight"),
    "merged": lambda folder: flip_tensor(folder / "merged", "model.layers.1.mlp.up_proj.weight"),
    "tokens": flip_token,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named_though_all_parts_were_measured_before(
    folder, settings, finished, tmp_path, damage
):
    """What is archived is keyed by the recorded sums, which a damaged file does not have."""
    copy = Path(shutil.copytree(folder, tmp_path / "run"))
    shutil.copytree(finished[1] / "archive", tmp_path / "archive")
    path = DAMAGES[damage](copy)
    assert refused(copy, tmp_path, settings).splitlines()[-1] == (
        f"{path} is damaged: it does not have the SHA-256 that was recorded when it was made. "
        f"Delete the folder {path.parent} and repeat the command; the folder is made again."
    )
