"""The command line that all stages share: exit status, one message for a mistake, a traceback for a
defect, the log."""

import argparse
import errno
import io
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked_stage import command_line, forked_stage, settings_file
from workflow.lib.artifacts.stage_logs import ERRORS_FROM_LOG
from workflow.lib.system.errors import UserError
from workflow.scripts.command import (
    LogFile,
    Terminal,
    command_parser,
    interrupt,
    only_writer,
    run,
    stage_parser,
)

logger = logging.getLogger("workflow")


@pytest.mark.parametrize(
    ("stage", "package"),
    [
        *((name, "torch") for name in ("tokenize_dataset", "preview", "preflight_run")),
        *((name, "torch") for name in ("write_card", "render_report", "evaluate_run")),
        *((name, "scipy") for name in ("describe_model", "quantize_base", "consolidate")),
        ("finetune_worker", "scipy"),
    ],
)
def test_stage_starts_without_packages_that_it_does_not_use(stage, package):
    command = [sys.executable, "-X", "importtime", "-m", f"workflow.scripts.{stage}", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert package not in imported
    assert "was not found" not in done.stderr


@pytest.fixture(autouse=True)
def _handlers_are_put_back():
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    for handler in set(logger.handlers) - set(handlers):
        handler.close()
    logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate


def outcome(main, monkeypatch, *options):
    """Run `main` as a stage would; return the exit status, 0 if it returns."""
    monkeypatch.setattr(sys, "argv", ["stage", *command_line({"config": {"a": [1]}}), *options])
    assert callable(main)
    try:
        run(main, stage_parser("What it does."))
    except SystemExit as stop:
        return stop.code
    return 0


def succeed(args):
    assert args.config == {"a": [1]}
    logger.info("derived fact")
    logger.debug("detail")


def mistake(args):
    raise UserError("train.epochs = 0: must be above 0. Raise it.")


def defect(args):
    raise KeyError("missing")


def full_disk(args):
    raise OSError(errno.ENOSPC, "No space left on device", "train.input_ids.npy")


def interrupted(args):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("main", "status"),
    [(succeed, 0), (mistake, 1), (defect, 1), (full_disk, 1), (interrupted, 130)],
)
def test_exit_status(monkeypatch, main, status):
    assert outcome(main, monkeypatch) == status


def test_interrupt_that_is_told_twice_interrupts_once():
    """By the terminal and by Snakemake: what a stage tidies up is not cut."""
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_full_disk_is_one_message_without_traceback(monkeypatch, capsys):
    outcome(full_disk, monkeypatch)
    said = capsys.readouterr().err
    assert said.startswith("the disk is full (train.input_ids.npy).")
    assert "Traceback" not in said


def test_second_process_may_not_write_the_same_output(monkeypatch, capsys, tmp_path):
    """One that outlived a killed Snakemake, say."""
    from workflow.scripts import command

    monkeypatch.setattr(command, "WAIT_S", 0.0)
    output = tmp_path / "tokens"
    args = argparse.Namespace(output=output)
    with (
        only_writer(args),
        pytest.raises(UserError, match=f"is writing {output}"),
        only_writer(args),
    ):
        pass


def test_mistake_is_one_message_without_traceback(monkeypatch, capsys, tmp_path):
    outcome(mistake, monkeypatch, "--log", str(tmp_path / "log"))
    assert capsys.readouterr().err == "train.epochs = 0: must be above 0. Raise it.\n"
    written = (tmp_path / "log").read_text()
    assert re.fullmatch(
        r".* DEBUG the stage has begun\n\d{4}-\d\d-\d\d [\d:,]+ ERROR train\.epochs = 0: must be "
        r"above 0\. Raise it\.\n",
        written,
    )


def test_quoted_name_cannot_steer_the_terminal(monkeypatch, capsys, tmp_path):
    def quote(args):
        raise UserError("no such file: a\x1b]0;title\x07\x9b2Jb\r")

    outcome(quote, monkeypatch, "--log", str(tmp_path / "log"))
    for text in (capsys.readouterr().err, (tmp_path / "log").read_text()):
        assert r"no such file: a\x1b]0;title\x07\x9b2Jb\x0d" in text


def test_defect_has_its_traceback_on_terminal_and_in_the_log(monkeypatch, capsys, tmp_path):
    outcome(defect, monkeypatch, "--log", str(tmp_path / "log"))
    for text in (capsys.readouterr().err, (tmp_path / "log").read_text()):
        assert "stage failed unexpectedly" in text
        assert "Traceback (most recent call last)" in text
        assert text.endswith("KeyError: 'missing'\n")


def test_log_has_details_that_the_terminal_has_not(monkeypatch, capsys, tmp_path):
    log = tmp_path / "logs" / "stage" / "demo.log"
    outcome(succeed, monkeypatch, "--log", str(log))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "derived fact\n")
    assert [line.split(" ", 2)[2] for line in log.read_text().splitlines()] == [
        "DEBUG the stage has begun",
        "INFO derived fact",
        "DEBUG detail",
        "DEBUG the stage has ended",
    ]


def test_log_is_appended_to(monkeypatch, tmp_path):
    """All workers of a run write to one file."""
    (tmp_path / "log").write_text("earlier\n")
    outcome(succeed, monkeypatch, "--log", str(tmp_path / "log"))
    assert (tmp_path / "log").read_text().startswith("earlier\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the following arguments are required: --config"),
        (
            ["--config", "pyproject.toml"],
            "argument --config: pyproject.toml holds no settings (Exp",
        ),
        (["--config", "none.json"], "argument --config: none.json holds no settings ([Errno 2]"),
    ],
)
def test_wrong_command_line_is_explained(monkeypatch, capsys, options, message):
    monkeypatch.setattr(sys, "argv", ["stage", *options])
    with pytest.raises(SystemExit) as caught:
        run(succeed, stage_parser("What it does."))
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def parsed(words):
    parser = stage_parser("", needs="tokens", takes="start summary")
    return parser.parse_args([*command_line({"config": {}}), *words])


def test_files_of_settings_complete_each_other():
    parts = [{"train": {"seed": 1}, "a": 1}, {"train": {"hang_seconds": 2}, "b": [2]}]
    words = ["--config", *(str(settings_file(part)) for part in parts)]
    assert stage_parser("").parse_args(words).config == {
        "train": {"seed": 1, "hang_seconds": 2}, "a": 1, "b": [2],
    }  # fmt: skip


def test_folder_is_named_by_itself_or_by_its_files(tmp_path):
    for name in ("manifest.json", "train.npy"):
        (tmp_path / name).touch()
    for words in ([tmp_path], [tmp_path / "manifest.json", tmp_path / "train.npy"]):
        assert parsed(["--tokens", *map(str, words)]).tokens == tmp_path


def test_option_that_a_rule_names_without_a_value_is_none():
    args = parsed(["--start", "--summary", "--tokens", "tokens"])
    assert (args.start, args.summary, args.tokens) == (None, None, Path("tokens"))
    with pytest.raises(SystemExit):
        parsed(["--tokens"])


@pytest.mark.parametrize("stage", ["download_source", "finetune"])
def test_every_stage_explains_itself(stage):
    done = forked_stage(stage, "--help")
    assert done.returncode == 0
    assert "--config" in done.stdout
    assert "--log" in done.stdout


def test_no_stage_imports_the_compiler_that_a_package_asks_for():
    """A fifth of the time that a stage takes to start."""
    look = (
        "import workflow.scripts, bitsandbytes, sys; print('torch._inductor.compile_fx' in "
        "sys.modules)"
    )
    root = Path(__file__).parents[2]
    unset = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    done = subprocess.run(
        [sys.executable, "-c", look], cwd=root, env=unset, capture_output=True, text=True
    )
    assert done.stdout == "False\n", done.stderr


def test_garbage_is_looked_for_when_a_stage_works_and_not_while_it_is_imported():
    """The import is what `python -m` makes of a stage before it finds its module."""
    look = (
        "import gc, sys; sys.argv = ['-m']; import workflow.scripts; found = [gc.isenabled()]\n"
        "from workflow.scripts.command import command_parser, run\n"
        "sys.argv = ['stage']\n"
        "parser = command_parser(None)\n"
        "run(lambda args: found.append(gc.isenabled()), parser)\n"
        "print(found)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", look], cwd=root, capture_output=True, text=True)
    assert done.stdout == "[False, True]\n", done.stderr


def test_ctrl_c_during_the_imports_ends_a_stage_without_traceback():
    stage = [sys.executable, "-X", "importtime", "-m", "workflow.scripts.quantize_base", "--help"]
    process = subprocess.Popen(
        stage,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    # A module is told when its import is done: torch's first part, seconds before torch itself.
    next(line for line in process.stderr if " torch." in line)
    process.send_signal(signal.SIGINT)
    said = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in "".join(said)


@pytest.mark.parametrize("made", ["folder", "file"])
def test_result_of_a_stage_whose_input_changed_is_not_kept(tmp_path, monkeypatch, capsys, made):
    model, output = tmp_path / "model", tmp_path / "result"
    model.mkdir()
    (model / "config.json").write_text("{}")

    def work(args):
        if made == "folder":
            output.mkdir()
        (output / "part" if made == "folder" else output).write_text("of the old config")
        (model / "config.json").write_text('{"hidden_size": 2}')

    options = ["--model", str(model), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["stage", *options])
    with pytest.raises(SystemExit, match="1"):
        run(work, command_parser("", needs="model output"))
    assert f"{model / 'config.json'} was changed while it was read" in capsys.readouterr().err
    assert not output.exists()


def test_log_that_another_command_removes_keeps_its_lines(tmp_path):
    """Snakemake removes the log of a job before it starts that, also while another runs it."""
    path = tmp_path / "stage.log"
    both = [LogFile(path), LogFile(path)]  # the stage and its worker
    for number, handler in enumerate([*both, *both]):
        if number == 2:
            path.unlink()
            path.write_text("of the other command\n")
        handler.emit(logging.makeLogRecord({"msg": f"line {number}"}))
    for handler in both:
        handler.close()
    lines = path.read_text().splitlines()
    assert sorted(lines) == [*(f"line {number}" for number in range(4)), "of the other command"]


@pytest.mark.parametrize(("is_terminal", "text"), [(True, "\r\x1b[Kdone"), (False, "done")])
def test_message_on_a_terminal_begins_on_a_line_of_its_own(monkeypatch, is_terminal, text):
    """A bar of this or another process may stand there."""
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    Terminal(stream).emit(logging.makeLogRecord({"msg": "done"}))
    assert stream.getvalue() == text + "\n"


def test_error_that_snakemake_shows_from_the_log_is_not_shown_by_the_stage_too(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv(ERRORS_FROM_LOG, "1")
    path = tmp_path / "stage.log"
    assert outcome(mistake, monkeypatch, "--log", str(path)) == 1
    assert "train.epochs" not in capsys.readouterr().err
    assert "train.epochs" in path.read_text()
    logger.handlers.clear()
    assert outcome(mistake, monkeypatch) == 1
    assert "train.epochs" in capsys.readouterr().err, "there is no log"
