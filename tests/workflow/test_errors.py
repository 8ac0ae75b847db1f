"""Mistakes of a user, through the real Snakefile: stopped before training, by one message, with no
traceback."""

import os
import signal
import subprocess
from contextlib import contextmanager, suppress

import pytest

from tests.support.workflow_project import TIMEOUT_S, executed, make_project
from workflow.lib.settings.overrides import merge
from workflow.lib.system.errors import UserError
from workflow.lib.system.hardware import check_writable

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 3


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A project in which nothing has run."""
    return make_project(tmp_path_factory.mktemp("errors") / "fresh")


@pytest.fixture(scope="module")
def described(fresh, tmp_path_factory):
    project = fresh.copy(tmp_path_factory.mktemp("errors") / "described")
    (job,) = project.plan("tokenize")["describe_model"]
    project.run(f"results/models/{job.wildcards['model']}/description.json")
    return project


BESIDE = {"tokenize_dataset", "quantize_base"}


def refusal(project, *, after, target="all"):
    """Run, expect to be refused when the jobs `after` have been started, and others at most beside
    them; return what the user sees."""
    done = project.snakemake(target)
    assert done.status == 1, done.output
    assert "Traceback" not in done.output
    started = set(executed(done.output))
    assert set(after) <= started <= {*after, *(BESIDE if after else ())}
    return done.output


def assert_said(output, *parts):
    """Expect one line with all parts of the message among the last ones, where a user looks."""
    end = output.splitlines()[-6:]
    assert [all(part in line for part in parts) for line in end].count(True) == 1, output


# Of each place where a mistake is found, one: what each message says is a test of its function.
NO_SUCH_LAYER = ["run demo: lora.target_modules = 'q_prj'", "q_proj, k_proj", "all-linear"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"lora": {"alhpa": 8}}, ["lora.alhpa", "no such key", "Did you mean 'alpha'"]),
        (
            {"hardware": {"nodes": 2}},
            [
                "hardware.nodes = 2",
                "this machine is one node",
                "workflow/profiles/slurm, or set it to 1",
            ],
        ),
    ],
)
def test_wrong_setting_stops_before_any_job(fresh, tmp_path, edit, message):
    project = fresh.copy(tmp_path / "project")
    project.edit(edit)
    assert_said(refusal(project, after=[]), *message)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"lora": {"target_modules": ["q_prj"]}}, " ".join(NO_SUCH_LAYER[:1])),
        ({"lora": {"modules_to_save": ["lm_hed"]}}, "run demo: lora.modules_to_save = "),
        ({"train": {"global_batch_size": 3}}, "run demo: train.global_batch_size = 3: must be"),
        ({"data": {"seq_len": 10**6}}, "run demo: data.seq_len = 1000000: the model's max_pos"),
    ],
    ids=["targets", "whole modules", "batch", "length"],
)
def test_dry_run_of_a_model_that_is_there_tells_what_cannot_work(fresh, tmp_path, edit, said):
    project = fresh.copy(tmp_path / "project")
    project.edit(edit)
    done = project.snakemake("-n", "all")
    assert done.status == 1
    assert said in done.output
    assert "Traceback" not in done.output


def test_refusal_names_the_file_that_was_read(fresh, tmp_path):
    project = fresh.copy(tmp_path / "project")
    project.edit({"lora": {"r": 0}})
    (project.root / "config.yaml").rename(project.root / "other.yaml")
    output = project.snakemake("--dry-run", "all", "--configfile", "other.yaml").output
    assert "other.yaml: the settings are not valid:" in output
    assert "lora.r = 0: must be at least 1" in output
    assert "config.yaml" not in output


def test_setting_that_does_not_suit_the_model_stops_before_any_job_or_at_its_description(
    fresh, described, tmp_path
):
    for place, after in ((described, []), (fresh, ["describe_model"])):
        project = place.copy(tmp_path / f"after {after}")
        project.edit({"lora": {"target_modules": ["q_prj"]}})
        assert_said(refusal(project, after=after), *NO_SUCH_LAYER)


@contextmanager
def small_disk(folder):
    """Mount 64 MB there, if this user may; tell whether."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def unwritable(folder):
    """Make a folder read-only, by its mode or, for root, whom no mode stops, by its disk."""
    with small_disk(folder) as mounted:
        if not mounted and os.geteuid() == 0:
            pytest.skip("root may write anything, and mount nothing here")
        if mounted:
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        else:
            folder.chmod(0o555)
        try:
            yield
        finally:
            if not mounted:
                folder.chmod(0o755)


@pytest.mark.parametrize("name", ["results", ".snakemake"])
def test_folder_that_cannot_be_written_is_named_before_any_job(fresh, tmp_path, name):
    """Snakemake's own folder too: it would tell by a traceback."""
    project = fresh.copy(tmp_path / "project")
    with unwritable(project.root / name):
        output = refusal(project, after=[])
    assert_said(output, f"{name} cannot be written: its", "Mend that, and repeat the command")


def test_full_disk_is_told_before_any_job(tmp_path):
    with small_disk(tmp_path / "disk") as mounted:
        if not mounted:
            pytest.skip("nothing can be mounted here")
        check_writable([tmp_path / "disk" / "results"])
        with (tmp_path / "disk" / "ballast").open("wb") as ballast, suppress(OSError):
            while ballast.write(bytes(2**20)):
                ballast.flush()
        with pytest.raises(UserError, match=r"results cannot be written: its disk is full \("):
            check_writable([tmp_path / "disk" / "results"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_before_any_job_ends_the_command_with_a_word(fresh, tmp_path, number):
    """It arrives while the graph of a hundred runs is built, which takes seconds."""
    project = fresh.copy(tmp_path / "project")
    project.edit({"runs": {f"run{seed}": {"train": {"seed": seed}} for seed in range(100)}})
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's `&` ignores it
    try:
        process = project.start("--dry-run", "all")
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    assert any("Building DAG" in line for line in process.stdout)
    process.send_signal(number)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "interrupted; the same command takes up the work again" in output
    assert "Traceback" not in output


def write_png(project):
    (project.root / "data" / "train.jsonl").write_bytes(PNG)


def test_unusable_data_stop_at_tokenization(described, tmp_path):
    project = described.copy(tmp_path / "project")
    write_png(project)
    message = ["data.train = 'data/train.jsonl'", "PNG image", "Name a .jsonl file"]
    assert_said(refusal(project, after=["tokenize_dataset"]), *message)


def test_setting_that_cannot_work_on_this_machine_stops_at_the_description(fresh, tmp_path):
    project = fresh.copy(tmp_path / "project")
    write_png(project)  # which would be refused, if it were read
    project.edit({"hardware": {"gpus": 99}, "train": {"global_batch_size": 99}})
    message = ["hardware.gpus = 99", "this machine shows", "Set it to that number or below"]
    assert_said(refusal(project, after=["describe_model"]), *message)


def test_run_that_does_not_fit_stops_all_with_its_table_before_training(described, tmp_path):
    project = described.copy(tmp_path / "project")
    runs = {"demo": {}, "second": {"hardware": {"host_memory_gib": 0.01}}}
    project.write_settings(merge(project.settings, {"runs": runs}))
    done = project.snakemake("all")
    assert done.status == 1
    assert set(executed(done.output)) <= {"preflight_run", *BESIDE}
    assert_said(done.output, "run second does not fit")
    log = (project.root / "logs" / "preflight_run" / "second.log").read_text()
    for text in (done.output, log):
        assert "│ does not fit" in text
        assert "adam_moments" in text


def test_unit_tests_of_a_project_in_which_nothing_has_run_are_refused(fresh):
    done = fresh.snakemake("--generate-unit-tests")
    assert done.status == 1, done.output
    assert "Traceback" not in done.output
    assert_said(done.output, "--generate-unit-tests copies", "results/runs/demo/finetune is not")
