"""The causes that are repeated when a workflow stops."""

import logging
import os
import subprocess
import time

import pytest

from workflow.lib.artifacts.stage_logs import (
    BEGUN,
    ENDED,
    FailedJobs,
    ShortJobs,
    failure_causes,
    from_the_future,
)
from workflow.lib.system.errors import PeerLostError
from workflow.lib.system.limits import INTERRUPTED

STAMP = "2026-11-21 10:11:55,585"


def log(folder, *lines, name="finetune/demo.log"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines))
    return path


CAUSES = {
    "last error": (
        [f"{STAMP} INFO began", f"{STAMP} ERROR data.train: no rows"],
        "data.train: no rows",
    ),
    "later success": ([f"{STAMP} ERROR first try", f"{STAMP} INFO second try worked"], None),
    "traceback, by its ends": (
        [f"{STAMP} ERROR failed unexpectedly", "Traceback:", "  x", "KeyError: 'a'"],
        "failed unexpectedly ... KeyError: 'a'",
    ),
    "message of several lines, whole": (
        [f"{STAMP} ERROR 2 rows are unusable.", "  row 1: null", "All: rejects.jsonl"],
        "2 rows are unusable.\n  row 1: null\nAll: rejects.jsonl",
    ),
    "another command's stage, which writes on": (
        [
            f"{STAMP} DEBUG {BEGUN}",
            f"{STAMP} DEBUG {BEGUN}",
            f"{STAMP} ERROR is in use",
            f"{STAMP} INFO step 3",
        ],
        "is in use",
    ),
    "end that was told": (
        [f"{STAMP} DEBUG {BEGUN}", f"{STAMP} INFO done", f"{STAMP} DEBUG {ENDED}"],
        None,
    ),
}


@pytest.mark.parametrize(("lines", "cause"), CAUSES.values(), ids=CAUSES)
def test_error_that_ends_a_log_is_the_cause(tmp_path, lines, cause):
    assert failure_causes(tmp_path / "logs", since=0) == [], "a workflow without logs"
    path = log(tmp_path, *lines)
    assert failure_causes(tmp_path, since=0) == ([f"{path}: {cause}"] if cause else [])


def snakemakes(message, **extra):
    return logging.makeLogRecord({"msg": message, "levelno": logging.ERROR, **extra})


def test_error_of_a_failed_job_is_shown_once_in_place_of_its_command(tmp_path, capsys):
    command = snakemakes('CalledProcessError in file "x.smk", line 1:\nCommand ...')
    failed = snakemakes(None, event="job_error")
    filtering = FailedJobs(tmp_path, since=0)
    assert filtering.filter(snakemakes("Select jobs to execute..."))
    assert filtering.filter(failed), "a job without a log of its own"
    log(tmp_path, f"{STAMP} ERROR data.train: no rows")
    assert not filtering.filter(command)
    assert not filtering.filter(failed)
    assert not filtering.show()
    assert not filtering.filter(snakemakes("At least one job did not complete successfully."))
    assert capsys.readouterr().err.count("data.train: no rows") == 1


def test_interrupted_jobs_without_an_error_of_their_own_are_told_as_interrupted(tmp_path, capsys):
    log(tmp_path, f"{STAMP} DEBUG {BEGUN}", f"{STAMP} DEBUG {ENDED}")  # it imports packages
    filtering = FailedJobs(tmp_path, since=0, is_interrupted=lambda: True)
    assert not filtering.filter(snakemakes(None, event="job_error"))
    assert not filtering.filter(snakemakes("At least one job did not complete successfully."))
    filtering.show_last()
    assert capsys.readouterr().err == f"{INTERRUPTED}\n"


def test_a_failed_job_ends_those_that_prepare_others_which_are_not_told(tmp_path, capsys):
    filtering = FailedJobs(tmp_path, since=0, end_others=lambda: True)
    log(tmp_path, f"{STAMP} ERROR does not fit", name="preflight_run/a.log")
    assert not filtering.filter(snakemakes(None, event="job_error"))
    log(tmp_path, f"{STAMP} DEBUG {BEGUN}", name="quantize_base/b.log")
    assert not filtering.filter(snakemakes(None, event="job_error"))
    assert not filtering.filter(snakemakes("Finished jobid: 4", event="job_finished"))
    printed = capsys.readouterr().err
    assert printed.count("does not fit") == 1
    assert "without a word" not in printed


def test_logs_of_earlier_invocations_are_left_out(tmp_path):
    path = log(tmp_path, f"{STAMP} ERROR old")
    assert failure_causes(tmp_path, since=path.stat().st_mtime + 1) == []
    os.utime(path, (0, time.time() + 3600))  # the clock was put back since
    assert failure_causes(tmp_path, since=time.time() - 1) == []


def test_a_stage_that_was_killed_is_told_with_its_last_words(tmp_path):
    plan = [f"{STAMP} DEBUG {BEGUN}", f"{STAMP} INFO fits", f"{STAMP} DEBUG {ENDED}"]
    path = log(tmp_path, *plan, f"{STAMP} DEBUG {BEGUN}", f"{STAMP} DEBUG step 17: loss 2.1")
    (cause,) = failure_causes(tmp_path, since=0)
    assert cause.startswith(f"{path}: the stage ended without a word; the last was: step 17: loss")
    assert "Repeat the command" in cause


def test_the_cause_on_one_machine_is_told_though_others_write_after_it(tmp_path):
    before = [f"{STAMP} ERROR of an earlier start", f"{STAMP} DEBUG {BEGUN}"]
    lost = f"{STAMP} ERROR {PeerLostError('Connection reset by peer')}"
    stopped = f"{STAMP} WARNING training was stopped by a signal"
    path = log(tmp_path, *before, lost, f"{STAMP} ERROR killed by SIGBUS", lost, stopped)
    assert failure_causes(tmp_path, since=0) == [f"{path}: killed by SIGBUS"]
    log(tmp_path, *before, lost)
    assert failure_causes(tmp_path, since=0) == [
        f"{path}: lost another process: Connection reset by peer"
    ]
    log(tmp_path, *before, f"{STAMP} WARNING a damaged checkpoint", stopped)
    assert failure_causes(tmp_path, since=0) == [f"{path}: training was stopped by a signal"]


def test_files_from_the_future_are_named_with_the_command_that_mends_them(tmp_path):
    rows, results = tmp_path / "my rows.jsonl", tmp_path / "results"
    made = results / "base" / "model.safetensors"
    made.parent.mkdir(parents=True)
    for path in (rows, made):
        path.touch()
        os.utime(path, (0, time.time() + 86_400))
    message = from_the_future([tmp_path / "sound", rows, results]) or ""
    _, _, command = message.partition("This mends it: ")
    subprocess.run(command, shell=True, check=True)
    assert from_the_future([rows, results]) is None


def test_job_that_starts_is_told_without_paths_of_its_inputs_and_outputs():
    inner = logging.Formatter("{rule_name}: {input} {output} {log} {reason}", style="{")
    reason = "Missing output files: out/a, out/b; Updated input files: mine.jsonl"
    reason += "; Params have changed since last execution: before: '{}' now: '{}'"
    told = {"event": "job_info", "rule_name": "finetune", "input": ["in"], "output": ["out"]}
    record = logging.makeLogRecord(told | {"log": "finetune.log", "reason": reason})
    shown = ShortJobs(inner).format(record)
    assert shown == (
        "finetune: [] [] finetune.log Missing output files; Updated input files: mine.jsonl; "
        "Params have changed since last execution"
    )
    assert record.reason == reason  # which Snakemake's own log shows
