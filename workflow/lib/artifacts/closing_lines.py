"""The last lines of a finished command: what each run came to, and where it lies."""

from collections.abc import Mapping
from pathlib import Path

from workflow.lib.artifacts.evaluation_record import Evaluation, forgetting
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.training_record import Summary
from workflow.lib.settings.forms import REFERENCES, SubjectName

CARD = "README.md"


def closing_lines(results: Path, run: str, *, served: SubjectName, since: float) -> list[str]:
    """Return the lines of a run that was trained, exported or evaluated after `since` (Unix
    seconds); of another run none. served: the model that the verdict is about."""
    folder = results / "runs" / run
    evaluated = folder / "evaluate_run" / f"{served}.json"
    exported = folder / "consolidate" / "adapter"
    changed = (folder / "finetune" / "summary.json", exported / "adapter_config.json", evaluated)
    if not any(path.is_file() and path.stat().st_mtime >= since for path in changed):
        return []
    measured = _measured(folder, served)
    forgot = forgetting(measured)
    lines = {
        "loss": _losses(folder, measured, served),
        "warning": str(forgot) if forgot and forgot.is_worse else None,
        "adapter": str(exported),
        "card": _if_there(exported / CARD),
        "report": _if_there(results / "report" / "report.html"),
        "talk to it": f"python -m workflow.scripts.chat {run}",
    }
    return [f"run {run}", *(f"  {key:<11}{text}" for key, text in lines.items() if text)]


def _if_there(path: Path) -> str | None:
    return str(path) if path.is_file() else None


def _measured(folder: Path, served: SubjectName) -> dict[SubjectName, Evaluation]:
    files = {
        name: folder / "evaluate_run" / f"{name}.json"
        for name in dict.fromkeys((*REFERENCES, served))
    }
    return {name: read_record(file, Evaluation) for name, file in files.items() if file.is_file()}


def _losses(folder: Path, measured: Mapping[SubjectName, Evaluation], served: SubjectName) -> str:
    """Return the held-out loss before and after training; without an evaluation, the training
    loss."""
    losses = {name: each.heldout.loss for name, each in measured.items() if each.heldout}
    before = next((subject for subject in losses if subject != served), None)
    if before is not None and served in losses:
        values = f"{losses[before]:.3f} -> {losses[served]:.3f}"
        return f"{values} held out, nats per token ({before} -> {served})"
    summary = read_record(folder / "finetune" / "summary.json", Summary)
    values = f"{summary.first_loss:.3f} -> {summary.final_loss:.3f}"
    return f"{values} of the training (first step -> last steps)"
