import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.evaluation.test_lm_eval_tasks import task_file
from tests.support.models import stock_base
from tests.support.tiny_export import exported_run, random_documents, tiny_adapter, tiny_tokens
from workflow.lib.artifacts.evaluation_record import forgetting
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.tokenizer import load_tokenizer
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.evaluation.evaluated_models import machine_facts, source_files, subjects
from workflow.lib.evaluation.heldout_loss import heldout_losses
from workflow.lib.evaluation.other_texts import OtherTexts
from workflow.lib.evaluation.questions import Archive, content_key, measure, parts, prepare
from workflow.lib.evaluation.results import evaluations, summary_lines
from workflow.lib.evaluation.rewards import Preferences
from workflow.lib.export.stock_models import load_adapter, load_options
from workflow.lib.objectives.from_settings import objective_of
from workflow.lib.settings.config import (
    DistillConfig,
    EvaluateConfig,
    GrpoConfig,
    ModelConfig,
    PreferencesConfig,
)
from workflow.lib.settings.forms import CONVERTED, FOLDERS, SUBJECTS
from workflow.lib.system.checksums import listed_files
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import write_checksums

CPU = torch.device("cpu")
NOTHING: dict[str, list[str]] = {name: [] for name in SUBJECTS}
DOCUMENTS = random_documents(9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = exported_run(tmp_path_factory.mktemp("export"))
    tiny_adapter(load(folder), folder / "start", rank=1)
    write_checksums(folder / "start")
    tiny_tokens(folder / "tokens", DOCUMENTS)
    tiny_tokens(folder / "one", DOCUMENTS[:1])
    return folder


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    local = task_file(tmp_path_factory.mktemp("tasks"), "local")
    return local.model_copy(update={"samples": 3, "max_new_tokens": 5})


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder / "base")


def store(folder, name="tokens"):
    return TokenStore.open(folder / name)


def load(folder, name="base"):
    return stock_base(folder / name)


class Evaluator:
    """Evaluates the folder's models against an archive; tells which parts were measured, by
    subject."""

    def __init__(
        self, folder, archive, tokenizer, *, tokens="tokens", streamed=False, other_texts=None
    ):
        self.folder, self.archive, self.tokenizer = folder, Archive(archive), tokenizer
        self.tokens, self.streamed, self.other_texts = tokens, streamed, other_texts

    def preferences(self, tokens, settings):
        return None

    def __call__(self, settings, world=None):
        tokens = store(self.folder, self.tokens)
        questions = prepare(
            tokens,
            tokenizer=self.tokenizer,
            settings=settings,
            preferences=self.preferences(tokens, settings),
            other_texts=self.other_texts,
        )
        options = load_options(Checkpoint(self.folder / "base"), device=CPU, settings=ModelConfig())
        asked = parts(questions, world=world)
        measured, new = {}, {}
        original = self.folder / "base-original"
        folders = {name: self.folder / name for name in FOLDERS} | {"model": original}
        for subject in subjects(
            SUBJECTS,
            folders,
            options=options,
            sources=source_files(original),
            streamed=self.streamed,
        ):
            measured[subject.name], new[subject.name] = measure(
                subject, asked, archive=self.archive, machine=machine_facts(options), world=world
            )
        found = evaluations(measured, questions, run="demo", served="tuned")
        return questions, measured, found, new


@pytest.fixture(scope="module")
def evaluator(folder, tokenizer):
    return Evaluator(folder, folder / "archive", tokenizer)


@pytest.fixture(scope="module")
def evaluated(evaluator, settings):
    questions, measured, found, _ = evaluator(settings)
    return questions, measured["base"], measured["tuned"], found["base"], found["tuned"]


def test_base_with_the_adapter_off_measures_as_the_plain_base(folder, evaluated):
    plain = heldout_losses(load(folder), DOCUMENTS, batch_size=4, device=CPU)
    assert evaluated[1].losses == plain


def test_subject_is_compared_with_all_before_it(evaluator, evaluated, settings):
    *_, found, _ = evaluator(settings)
    assert [list(written.comparisons) for written in found.values()] == [
        list(SUBJECTS[:position]) for position in range(len(SUBJECTS))
    ]
    cost = found["base"].heldout.loss - found["original"].heldout.loss
    assert found["base"].comparisons["original"].loss_difference == pytest.approx(-cost)
    assert abs(cost) > 1e-3, "4 bits cost nothing"


def test_original_measures_as_it_does_alone(folder, evaluator, evaluated, settings):
    _, measured, _, _ = evaluator(settings)
    plain = heldout_losses(load(folder, "base-original"), DOCUMENTS, batch_size=4, device=CPU)
    assert measured["original"].losses == plain
    assert measured["tuned_on_original"].losses != measured["tuned"].losses


def test_original_that_is_streamed_has_the_losses_of_a_loaded_one(
    folder, tokenizer, evaluator, evaluated, settings, tmp_path
):
    _, measured, _, _ = evaluator(settings)
    streaming = Evaluator(folder, tmp_path / "archive", tokenizer, streamed=True)
    _, streamed, found, new = streaming(settings)
    sums, counts = zip(*streamed["original"].losses, strict=True)
    expected_sums, expected_counts = zip(*measured["original"].losses, strict=True)
    assert counts == expected_counts
    assert sums == pytest.approx(expected_sums, rel=1e-5)  # fp32 sums in another order
    assert new["original"] == ["heldout"]
    assert (found["original"].tasks, found["original"].samples) == ({}, [])
    assert found["tuned"].comparisons["original"].tasks == {}


OTHER = OtherTexts(random_documents(8, seed=5), ["prose"] * 3 + ["code"] * 5)


@pytest.mark.parametrize("streamed", [False, True])
def test_other_texts_are_measured_as_held_out_documents_are(folder, tokenizer, tmp_path, streamed):
    only = EvaluateConfig(heldout=False, tasks=(), samples=0)
    asking = Evaluator(folder, tmp_path, tokenizer, streamed=streamed, other_texts=OTHER)
    _, measured, found, new = asking(only)
    assert new == {name: ["other_texts"] for name in SUBJECTS}
    alone = heldout_losses(load(folder, "base-original"), OTHER.documents, batch_size=4, device=CPU)
    for got, expected in zip(measured["original"].other_texts, alone, strict=True):
        assert got == pytest.approx(expected, rel=1e-5)  # fp32 sums in another order
    losses = [found[name].other_texts for name in ("original", "tuned")]
    assert list(losses[0].sources) == ["code", "prose"]
    forgot = forgetting(found)
    assert (forgot.reference, forgot.served, forgot.difference.documents) == (
        "original",
        "tuned",
        8,
    )
    assert forgot.nats == pytest.approx(losses[1].loss - losses[0].loss)
    for kind, paired in forgot.difference.sources.items():
        before, after = (each.sources[kind].loss for each in losses)
        assert paired.loss_difference == pytest.approx(before - after)


def test_start_is_the_base_with_its_own_adapter(folder, evaluator, evaluated, settings):
    _, measured, _, _ = evaluator(settings)
    plain = load_adapter(load(folder), Adapter(folder / "start"))
    assert measured["start"].losses == heldout_losses(plain, DOCUMENTS, batch_size=4, device=CPU)
    assert measured["tuned"].losses != measured["start"].losses


class OfPairs(Evaluator):
    """Evaluates training on pairs: the rewards of their two answers, without a reference."""

    def preferences(self, tokens, settings):
        objective = objective_of(
            "simpo", PreferencesConfig(beta=1.0), DistillConfig(), GrpoConfig()
        )
        return Preferences.of(tokens, objective, None, settings=settings)


@pytest.fixture(scope="module")
def of_pairs(folder, tokenizer):
    tiny_tokens(folder / "pairs", DOCUMENTS[:8], examples="pairs")
    return OfPairs(folder, folder / "archive-of-pairs", tokenizer, tokens="pairs")


LOSS_ONLY = EvaluateConfig(tasks=(), samples=2, max_new_tokens=3)


def test_rewards_are_of_the_answers_of_all_models(of_pairs):
    _, measured, found, new = of_pairs(LOSS_ONLY)
    assert new == {name: ["heldout", "other_answers", "samples"] for name in SUBJECTS}
    chosen, rejected = (
        [-loss / count for loss, count in losses]
        for losses in (measured["tuned"].losses, measured["tuned"].others)
    )
    rewards = found["tuned"].rewards
    margins = [c - r for c, r in zip(chosen, rejected, strict=True)]
    assert rewards.margin == pytest.approx(sum(margins) / 4)
    assert rewards.accuracy == sum(margin > 0 for margin in margins) / 4
    paired = found["tuned"].comparisons["base"].rewards
    assert paired.margin == pytest.approx(rewards.margin - found["base"].rewards.margin)
    assert of_pairs(LOSS_ONLY)[3] == NOTHING


def test_heldout_loss_of_pairs_is_that_of_chosen_answers(of_pairs, evaluated):
    _, measured, found, _ = of_pairs(LOSS_ONLY)
    whole = [loss for loss, _ in evaluated[1].losses[:8:2]]
    assert [loss for loss, _ in measured["base"].losses] == pytest.approx(whole)
    assert (found["base"].heldout.of, found["base"].heldout.documents) == ("chosen answers", 4)
    assert {sample.document % 2 for sample in found["base"].samples} == {0}
    assert any("4 chosen answers" in line for line in summary_lines(found))
    assert any(
        line.startswith("rewards of tuned on 4 held-out pairs") for line in summary_lines(found)
    )


def test_rewards_of_an_original_that_is_streamed_are_not_measured(
    folder, tokenizer, tmp_path, of_pairs
):
    streaming = OfPairs(folder, tmp_path, tokenizer, tokens="pairs", streamed=True)
    _, _, found, new = streaming(LOSS_ONLY)
    assert new["original"] == ["heldout"]
    assert found["original"].rewards is None
    assert found["tuned"].comparisons["original"].rewards is None


def test_merging_is_compared_with_tuned(evaluator, evaluated, settings):
    """The merged weights are rounded to bf16, which costs a little and is not nothing."""
    *_, found, _ = evaluator(settings)
    cost = found["merged"].heldout.loss - found["tuned"].heldout.loss
    merged = found["merged"].comparisons
    assert merged["tuned"].loss_difference == pytest.approx(-cost)
    assert 0 < abs(cost) < 0.01
    gain = found["tuned"].comparisons["base"].loss_difference
    assert merged["base"].loss_difference == pytest.approx(gain - cost)
    cost, *lines = summary_lines(found)
    paid = found["base"].heldout.loss - found["original"].heldout.loss
    assert cost.startswith(f"cost of 4 bits: NF4 base - original {paid:+.4f} (95% interval ")
    assert any("original - merged" in line for line in lines)


def test_summary_names_loss_and_task_with_signed_differences(evaluated):
    *_, base, tuned = evaluated
    _, loss, task = summary_lines({"base": base, "tuned": tuned})
    assert loss.startswith(f"held-out loss {base.heldout.loss:.4f} -> ")
    assert (
        f": NF4 base - tuned {tuned.comparisons['base'].loss_difference:+.4f} (95% interval "
        in loss
    )
    assert task.startswith("local acc 0.")
    assert ": tuned - NF4 base " in task


def test_what_is_switched_off_is_null_or_empty(evaluator):
    *_, found, new = evaluator(EvaluateConfig(heldout=False, tasks=(), samples=0))
    written = found["base"]
    assert (written.heldout, written.tasks, written.samples) == (None, {}, [])
    assert new == NOTHING
    assert found["tuned"].comparisons["base"].as_json() == {
        "loss_difference": None,
        "loss_difference_ci95": None,
        "p_value": None,
        "documents": 0,
        "sources": {},
        "tasks": {},
    }


def test_new_task_is_measured_alone(evaluator, evaluated, settings):
    folder = Path(settings.tasks_dir)
    task_file(folder, "added")
    more = settings.model_copy(update={"tasks": ("local", "added")})
    _, _, found, new = evaluator(more)
    assert new == {name: ["task-added"] for name in SUBJECTS}
    assert found["tuned"].tasks["local"] == evaluated[4].tasks["local"]
    assert evaluator(more)[3] == NOTHING


def test_another_batch_size_measures_no_loss_again(evaluator, evaluated, settings):
    other = settings.model_copy(update={"tasks": (), "batch_size": 1})
    assert evaluator(other)[3] == NOTHING


def test_base_is_not_measured_again_for_another_adapter(
    folder, tokenizer, evaluated, settings, tmp_path
):
    for name in ("base", "base-original"):
        shutil.copytree(folder / name, tmp_path / name)
    tiny_adapter(load(folder), tmp_path / "adapter", rank=2)
    for name in ("merged", "start", "tokens", *CONVERTED):
        shutil.copytree(folder / name, tmp_path / name)
    write_checksums(tmp_path / "adapter")
    *_, new = Evaluator(tmp_path, folder / "archive", tokenizer)(
        settings.model_copy(update={"tasks": ()})
    )
    again = ["heldout", "samples"]
    assert new == NOTHING | {"tuned": again, "tuned_on_original": again}


def test_one_document_is_too_few_for_an_interval(folder, tokenizer):
    with pytest.raises(
        UserError, match=r"evaluate\.heldout = true: an interval needs at least 2 .* there are 1\."
    ):
        prepare(store(folder, "one"), tokenizer=tokenizer, settings=EvaluateConfig(tasks=()))


def test_broken_weights_are_named_as_such(folder, tokenizer, tmp_path):
    broken = tmp_path / "broken"
    for name in ("base", "base-original", "tokens", "merged", "start", "adapter", *CONVERTED):
        shutil.copytree(folder / name, broken / name)
    tensors = load_file(broken / "adapter" / "adapter_model.safetensors")
    name = min(n for n in tensors if "layers.1.mlp.down_proj.lora_B" in n)
    tensors[name].fill_(float("nan"))
    save_file(tensors, broken / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
    write_checksums(broken / "adapter")
    loss_only = EvaluateConfig(tasks=(), samples=0)
    with pytest.raises(
        UserError, match=r"The loss of tuned on original is nan.*lower train\.learning_rate"
    ):
        Evaluator(broken, tmp_path / "archive", tokenizer)(loss_only)


FACTS = {"documents": "0123", "dtype": "float32"}
VALUE = [[1.25, 3], [0.1, 7]]


@pytest.fixture
def archive(tmp_path):
    return Archive(tmp_path / "evaluations")


@pytest.mark.parametrize(
    ("subject", "part", "facts", "found"),
    [
        ("subject", "heldout", FACTS, VALUE),
        ("other", "heldout", FACTS, None),
        ("subject", "samples", FACTS, None),
        ("subject", "heldout", FACTS | {"dtype": "bfloat16"}, None),
    ],
)
def test_what_was_kept_is_found_for_its_subject_part_and_facts(
    archive, subject, part, facts, found
):
    archive.keep("subject", "heldout", FACTS, VALUE)
    assert archive.find(subject, part, facts) == found


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("1.25", "1.24"),
        lambda text: "[]",
        lambda text: "",
    ],
    ids=["cut", "edited", "of another kind", "empty"],
)
def test_damaged_entry_is_ignored_with_a_note(archive, damage, caplog, monkeypatch):
    archive.keep("subject", "heldout", FACTS, VALUE)
    (file,) = archive.folder.glob("*/*.json")
    file.write_text(damage(file.read_text()))
    monkeypatch.setattr(logging.getLogger("workflow"), "propagate", True)
    assert archive.find("subject", "heldout", FACTS) is None
    assert f"{file} is damaged" in caplog.text
    archive.keep("subject", "heldout", FACTS, VALUE)
    assert archive.find("subject", "heldout", FACTS) == VALUE


def test_entry_tells_what_made_it_and_its_name_what_it_is(archive):
    archive.keep("subject", "task-mmlu/law", FACTS, VALUE)
    (file,) = archive.folder.glob("subject/task-mmlu_law-*.json")
    assert json.loads(file.read_text())["provenance"]["packages"]["torch"]


def recorded(path, **files):
    path.mkdir()
    for name, text in files.items():
        (path / name).write_text(text)
    write_checksums(path)
    return path


def test_key_of_folders_is_that_of_their_content_but_for_what_describes_them(tmp_path):
    one = recorded(tmp_path / "one", weights="a", config="b", **{"README.md": "made today"})
    same = recorded(tmp_path / "same", weights="a", config="b", **{"README.md": "made before"})
    other = recorded(tmp_path / "other", weights="a", config="c")
    first, equal, second = (listed_files(path) for path in (one, same, other))
    assert content_key(first) == content_key(equal)
    assert len({content_key(first), content_key(second), content_key(first, second)}) == 3
