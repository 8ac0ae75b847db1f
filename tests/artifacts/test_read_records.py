import pytest

from tests.support.report_examples import edit, write_run
from workflow.lib.artifacts.manifest_record import Manifest
from workflow.lib.artifacts.preflight_record import Preflight
from workflow.lib.artifacts.read_records import read_record, read_steps
from workflow.lib.artifacts.training_record import Summary
from workflow.lib.system.checksums import read_lines, write_lines
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import write_checked_json, write_text


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path, "demo", num_steps=13)


def test_missing_field_is_named_with_its_file(folder):
    path = folder / "finetune" / "summary.json"
    edit(path, lambda document: document["peak_bytes"].pop("measured"))
    with pytest.raises(
        UserError, match=r"summary\.json: the field peak_bytes\.measured is missing\. Run"
    ):
        read_record(path, Summary)


def test_field_of_wrong_type_is_named_with_its_value(folder):
    path = folder / "preflight_run" / "preflight.json"
    edit(path, lambda document: document.update(peak_bytes="12 GiB"))
    with pytest.raises(UserError, match=r"preflight\.json: peak_bytes = '12 GiB': Input should be"):
        read_record(path, Preflight)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda plan: plan.pop("offload_layers"), "the field plan.offload_layers is missing"),
        (lambda plan: plan.update(offload_norms=3), "the field plan.offload_norms is not known"),
    ],
    ids=["older", "newer"],
)
def test_plan_of_another_version_says_what_to_delete(folder, change, problem):
    path = folder / "preflight_run" / "preflight.json"
    edit(path, lambda document: change(document["plan"]))
    with pytest.raises(UserError) as error:
        read_record(path, Preflight)
    assert str(error.value) == (
        f"{path}: {problem}. Another version of the workflow may have written it: delete this file "
        "and run `snakemake --cores all preflight` again."
    )


def test_many_broken_fields_are_counted_and_not_all_listed(folder):
    path = folder / "finetune" / "summary.json"
    write_checked_json(path, {})
    with pytest.raises(UserError, match=r"the field run is missing; .*; and \d+ more\."):
        read_record(path, Summary)


@pytest.mark.parametrize(
    ("content", "kind"),
    [(b"", "valid JSON"), (b"{", "valid JSON"), (b'{"a": NaN', "valid JSON"), (b"\xff{}", "UTF-8")],
)
def test_file_that_is_no_json_is_refused(folder, content, kind):
    path = folder / "finetune" / "summary.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"summary\.json is damaged: it is not {kind}"):
        read_record(path, Summary)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"manifest\.json: there is no such file\. Repeat"):
        read_record(tmp_path / "manifest.json", Manifest)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: [], r"metrics\.jsonl: has no line"),
        (
            lambda rows: [*rows[:4], {k: v for k, v in rows[4].items() if k != "grad_norm"}],
            r"metrics\.jsonl, line 5: the field grad_norm is missing",
        ),
        (lambda rows: [*rows, rows[6]], r"line 14: step = 7 does not follow step 13"),
    ],
)
def test_metrics_that_are_no_run_s_are_refused(folder, change, said):
    path = folder / "finetune" / "metrics.jsonl"
    write_lines(path, change(read_lines(path)))
    with pytest.raises(UserError, match=said):
        read_steps(path)


def test_loss_that_is_not_finite_is_refused(folder):
    path = folder / "finetune" / "metrics.jsonl"
    write_text(path, path.read_text().replace('"loss": ', '"loss": NaN, "was": ', 1))
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged: .*\(line 1\)"):
        read_steps(path)
