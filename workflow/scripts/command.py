"""Shared parts of every stage's command line: `--config`, `--log`, logs, readable errors.

A stage calls `run(main, parser)` and nothing else of this module. A `UserError` becomes one message
on the terminal and exit status 1; any other exception is a defect, shown with its traceback. Both
are in the log too."""

import argparse
import gc
import logging
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

from workflow import scripts
from workflow.lib.artifacts.stage_logs import BEGUN, ENDED, ERRORS_FROM_LOG
from workflow.lib.settings.forms import EXPORTS, FOLDERS, FORMS
from workflow.lib.settings.overrides import merge
from workflow.lib.system.environment import follows, is_worker
from workflow.lib.system.errors import PeerLostError, StoppedError, UserError
from workflow.lib.system.files import read_checked_json, unwritable
from workflow.lib.system.input_files import Inputs
from workflow.lib.system.limits import INTERRUPTED, watched
from workflow.lib.system.locks import exclusive
from workflow.lib.system.redaction import redacted, secret_values

logger = logging.getLogger("workflow")

WAIT_S = 60.0  # for a process that writes the same output
# A dying process' connections may close before its death is visible: a process that lost it waits,
# so that the launcher sees the cause first.
PEER_FIRST_S = 2.0


class Folder(argparse.Action):
    """A folder, named by itself or, as rules have inputs, by a file in it; None without a value."""

    def __call__(self, parser: Any, namespace: Any, words: Any, option: str | None = None) -> None:
        path = Path(words[0]) if words else None
        setattr(namespace, self.dest, path.parent if path and path.is_file() else path)


class Settings(argparse.Action):
    """A JSON object with its checksum in one file, or in several that complete each other."""

    def __call__(self, parser: Any, namespace: Any, words: Any, option: str | None = None) -> None:
        settings: dict[str, Any] = {}
        for word in words:
            try:
                settings = merge(settings, read_checked_json(Path(word)))
            except (OSError, TypeError, ValueError) as error:
                parser.error(f"argument {option}: {word} holds no settings ({error})")
        setattr(namespace, self.dest, settings)


# Options of stages: their kind, and what they name.
OPTIONS: dict[str, tuple[type, str]] = {
    "adapter": (Folder, "folder of the exported adapter"),
    "adapter_config": (Path, "adapter_config.json"),
    "archive": (Path, "folder of finished parts"),
    "base": (Folder, "folder of the NF4 base"),
    "card": (Path, "the model card"),
    "chat_template": (str, "Jinja file; default: the tokenizer's own template"),
    "checkpoints": (Path, "folder of the run's checkpoints, kept between invocations"),
    "comparison": (Path, "the comparison beside the output"),
    "converter": (Folder, "folder of llama.cpp's converters; default: export.llama_cpp"),
    "description": (Path, "description of the model, made anew where it is not there"),
    "evaluation": (Path, "folder of the run's evaluation"),
    "finetune": (Folder, "folder of the finetune stage"),
    "folder": (Folder, "folder to upload"),
    "job": (Path, "file of a worker's cases"),
    "manifest": (Path, "manifest.json of the tokens"),
    "model": (Folder, "folder of the original model"),
    "output": (Path, "file or folder to write"),
    "parity": (Path, "parity.json of the export"),
    "preflight": (Path, "preflight.json with the plan"),
    "python": (Path, "Python of vLLM"),
    "run": (str, "name of the run"),
    "runs_dir": (Path, "folder with a folder a run"),
    "scores": (Folder, "folder of the scores of the tokens, by a reference or a teacher"),
    "sensitivities": (Path, "sensitivities of the model's linears, for quantize.keep: auto"),
    "served": (Path, "served.json of the run"),
    "start": (Folder, "folder of the adapter that the run continues"),
    "step": (int, "step of the checkpoint"),
    "summary": (Path, "summary.json of the training"),
    "tokenizer": (Folder, "folder of the tokenizer"),
    "tokens": (Folder, "folder of the tokens"),
    **{name: (Folder, f"folder of an export: {FORMS[name].meaning}") for name in EXPORTS},
}


def stage_parser(
    description: str | None, *, needs: str = "", takes: str = ""
) -> argparse.ArgumentParser:
    """Return a command's parser that also has the stage's settings, as Snakemake writes them."""
    parser = command_parser(description, needs=needs, takes=takes)
    add_settings(parser, "--config", required=True, help="the stage's settings")
    return parser


def command_parser(
    description: str | None, *, needs: str = "", takes: str = ""
) -> argparse.ArgumentParser:
    """Return a parser with `--log`, and those of `OPTIONS` that this command has. needs, takes: the
    names of required and of other ones, which a rule may name without a value."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in (*needs.split(), *takes.split()):
        (kind, text), required = OPTIONS[name], name in needs.split()
        several, one = ("+", None) if required else ("*", "?")
        how: Any = {"type": kind, "nargs": one}
        if issubclass(kind, argparse.Action):
            how = {"action": kind, "nargs": several}
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, required=required, help=text, **how)
    parser.add_argument("--log", type=Path, help="log file; default: standard error only")
    return parser


def add_settings(
    parser: argparse.ArgumentParser, option: str, *, help: str, required: bool = False
) -> None:
    """Add an option whose value is the JSON object of files."""
    parser.add_argument(
        option, action=Settings, nargs="+", metavar="FILE", required=required, help=help
    )


def form_folders(args: argparse.Namespace) -> dict[str, Path]:
    """Return the folders of the model's forms on a command line, by the names of `FOLDERS`."""
    folders = {name: getattr(args, name, None) for name in FOLDERS}
    return {name: folder for name, folder in folders.items() if folder is not None}


def run(
    main: Callable[[argparse.Namespace], None],
    parser: argparse.ArgumentParser,
    *,
    locks_itself: bool = False,
) -> None:
    """Parse the command line, call `main`, and exit.

    The status is 0, 1 (user's mistake or defect), 75 (training stopped by a signal) or 130 (another
    stage, by Ctrl-C).
    """
    gc.freeze()  # imported objects are never garbage
    gc.enable()
    args = parser.parse_args()
    start_log(args.log)
    work = reported_to_launcher(main) if is_worker() else main
    try:
        # From here on there is work to end in order.
        if signal.getsignal(signal.SIGINT) is scripts.leave:
            signal.signal(signal.SIGINT, interrupt)
        with ExitStack() as stack:
            stack.enter_context(watched(report_excess))
            if not locks_itself:
                stack.enter_context(only_writer(args))
                stack.enter_context(unchanged_inputs(args))
            mark_log(BEGUN)
            work(args)
            mark_log(ENDED)
    except SystemExit:
        raise
    except BaseException as error:  # a panic of Rust is no `Exception`
        end_by(error, prog=parser.prog)


def report_excess(message: str) -> None:
    """Log the error of a stage that its watcher ends; of a worker its launcher logs it."""
    if not is_worker():
        logger.error("%s", message)
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(UserError(message))


def end_by(error: BaseException, *, prog: str) -> NoReturn:
    """Log the error that ended the stage, and exit with its status.

    Call it where the error is handled: a defect is shown with its traceback."""
    if isinstance(error, StoppedError):
        logger.warning("%s", error)
        sys.exit(os.EX_TEMPFAIL)
    if isinstance(error, KeyboardInterrupt):
        logger.error(INTERRUPTED)
        sys.exit(130)
    if is_worker():  # the launcher logs it once for all
        keep_to_file()
    if isinstance(error, UserError):
        logger.error("%s", error)
    elif isinstance(error, PeerLostError):
        logger.error("%s", error, exc_info=is_worker())
        if is_worker():
            time.sleep(PEER_FIRST_S)
    elif (message := unwritable(error)) is not None:
        logger.error("%s", message)
    else:
        logger.exception("%s failed unexpectedly", prog)
    fail()


def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    """Raise `KeyboardInterrupt`, once.

    The terminal and Snakemake both signal a stage, and the second signal must not cut its
    cleanup."""
    signal.signal(signum, lambda *_: None)
    raise KeyboardInterrupt


def fail() -> NoReturn:
    """Exit with status 1.

    A worker exits at once: cleanup of Python and NCCL at an exit may wait for processes that wait
    for this one."""
    if not is_worker():
        sys.exit(1)
    with suppress(OSError, ValueError):  # a full disk, a closed pipe
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)


def mark_log(mark: str) -> None:
    """Mark the stage's begin or end in the log, which its workers share."""
    if not is_worker():
        logger.debug(mark)


def reported_to_launcher(
    main: Callable[[argparse.Namespace], None],
) -> Callable[[argparse.Namespace], None]:
    """Report to torchrun which worker failed first, and why. (Only a worker imports torch here.)

    The launcher ends all workers when one dies. One that has already failed ends by itself: that
    signal would cut its message, which names the cause."""
    from torch.distributed.elastic.multiprocessing.errors import record

    def work(args: argparse.Namespace) -> None:
        try:
            main(args)
        except Exception:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise

    return record(work)


@contextmanager
def only_writer(args: argparse.Namespace) -> Iterator[None]:
    """Keep two processes from writing the same output at once.

    One may have outlived a killed Snakemake, the other belong to a repeated command."""
    output: Path | None = getattr(args, "output", None)
    if output is None or is_worker() or follows(os.environ):
        yield
        return
    lock, doing = output.with_name(f".{output.name}.lock"), f"writing {output}"
    with exclusive(lock, doing=doing, wait_s=WAIT_S) as killed:
        if killed is not None:
            logger.info("process %s was killed while it was %s; it is made now", killed, doing)
        yield


WRITTEN = frozenset({"output", "log", "checkpoints", "comparison", "archive", "tracking"})


@contextmanager
def unchanged_inputs(args: argparse.Namespace) -> Iterator[None]:
    """Raise `UserError` after the block, and remove the output, if files and folders of the command
    line were changed in it. A training compares its inputs itself, when it has read them."""
    output: Path | None = getattr(args, "output", None)
    if output is None or is_worker():
        yield
        return
    options = (value for name, value in vars(args).items() if name not in WRITTEN)
    paths = (path for value in options for path in (value if isinstance(value, list) else [value]))
    inputs = Inputs(path for path in paths if isinstance(path, Path) and path != Path())
    yield
    try:
        inputs.check()
    except UserError:
        if output.is_dir():
            shutil.rmtree(output, ignore_errors=True)
        else:
            output.unlink(missing_ok=True)
        raise


# Control characters that a terminal would obey (C0 and C1), spelled out: a message may quote a name
# from a hub or a data file.
CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}


class RedactingFormatter(logging.Formatter):
    """Formats records, tracebacks included, without secrets or control characters.

    Secrets are those of the environment and of URLs.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's text with every secret masked and every control character spelled."""
        text = redacted(super().format(record), secrets=secret_values(os.environ))
        return text.translate(CONTROLS)


def keep_to_file() -> None:
    """Write later records to the log file alone."""
    for handler in logger.handlers:
        if not isinstance(handler, logging.FileHandler):
            handler.setLevel(logging.CRITICAL + 1)


class Terminal(logging.StreamHandler[TextIO]):
    """Standard error: a message begins on a line of its own, also where a progress bar stands."""

    def format(self, record: logging.LogRecord) -> str:
        has_bars = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        return ("\r\x1b[K" if has_bars else "") + super().format(record)


class LogFile(logging.FileHandler):
    """A log that survives its removal: Snakemake removes it before it starts a job, also while the
    same job of another command writes to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, mode="a+", encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # of a full disk, which the stage itself meets
            self._put_back()
        super().emit(record)

    def _put_back(self) -> None:
        removed = self.stream
        if removed is None or self._is_there(removed):
            return
        self.stream = self._open()
        self.stream.seek(0)
        removed.seek(0)
        # Another process of this stage may have put it back.
        if (text := removed.read()) not in self.stream.read():
            self.stream.write(text)
        removed.close()

    def _is_there(self, stream: TextIO) -> bool:
        with suppress(FileNotFoundError):
            now = Path(self.baseFilename).stat()
            return os.path.samestat(os.fstat(stream.fileno()), now)
        return False


def start_log(path: Path | None) -> None:
    """Send records to the terminal and, if given, to a file.

    The terminal gets info and above, short; the file gets all, with time and level. Errors that
    Snakemake's process shows from the file are not shown here too. Deprecations inside packages are
    hidden."""
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    logging.raiseExceptions = False  # a full disk must not print a traceback for every record
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    console = Terminal(sys.stderr)
    console.setLevel(logging.INFO)
    if path is not None and ERRORS_FROM_LOG in os.environ:
        console.addFilter(lambda record: record.levelno < logging.ERROR)
    console.setFormatter(RedactingFormatter("%(message)s"))
    logger.addHandler(console)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = LogFile(path)
        file.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(file)
