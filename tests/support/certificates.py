"""A synthetic run with the items of its evaluation, and its certificate."""

from contextlib import chdir
from pathlib import Path

from tests.support.report_examples import SERVED_CHECK, edit
from workflow.lib.artifacts.evaluation_record import DocumentLoss, Items, SubjectItems, TaskItems
from workflow.lib.artifacts.records import Provenance
from workflow.lib.evaluation.certificate import packed, statement, statistics
from workflow.lib.system.checksums import RecordedFile, listed_files
from workflow.lib.system.files import file_sha256, write_checked_json, write_json

LOSSES = {"base": [30.5, 11.0, 24.25], "tuned": [21.0, 8.5, 15.75]}
RIGHT = {"base": [0.0, 1.0, 0.0, 0.0], "tuned": [1.0, 1.0, 0.0, 1.0]}
REQUIRE = {"heldout_loss": -0.02, "heldout_loss/qa": 9.0, "pydocs_mc/acc": 0.1}
TASK, METRIC = "pydocs_mc", "acc"


def subject_items(name: str) -> SubjectItems:
    losses = [
        DocumentLoss(document=number, source="qa", loss_sum=loss, tokens=7 + number)
        for number, loss in enumerate(LOSSES[name])
    ]
    values = [
        (number, f"d{number}", f"p{number}", right) for number, right in enumerate(RIGHT[name])
    ]
    return SubjectItems(losses=losses, tasks=[TaskItems(task=TASK, metric=METRIC, values=values)])


def add_items(folder: Path) -> None:
    """Write `items.json` of a run of `report_examples`, and evaluations that follow from it."""
    items = Items(
        run=folder.name,
        resamples=100,
        seed=0,
        served="tuned",
        overlap={TASK: [0.0, None, 0.25, 1.0]},
        subjects={"base": subject_items("base"), "tuned": subject_items("tuned")},
        provenance=Provenance.now(),
    )
    write_checked_json(folder / "evaluate_run" / "items.json", items.as_json())
    for name, found in statistics(items, {})["measured"].items():

        def follow(document: dict, found: dict = found) -> None:
            document["heldout"].update(found["heldout"])
            metrics = document["tasks"][TASK]["metrics"]
            metrics[METRIC]["value"] = found["tasks"][TASK]["metrics"][METRIC]["value"]
            for other, compared in found["comparisons"].items():
                tasks = compared.pop("tasks")
                document["comparisons"][other].update(compared)
                document["comparisons"][other]["tasks"][TASK][METRIC].update(tasks[TASK][METRIC])

        edit(folder / "evaluate_run" / f"{name}.json", follow)


def hashed(path: Path) -> RecordedFile:
    return RecordedFile(path.parent, path.name, file_sha256(path))


def certify(root: Path, run: str, *, key: Path | None = None) -> Path:
    """Write the certificate of a run below `root`; return its path from there."""
    with chdir(root):
        folder = Path("runs") / run
        adapter, evaluation = folder / "consolidate" / "adapter", folder / "evaluate_run"
        write_checked_json(folder / "check_served" / "served.json", SERVED_CHECK.as_json())
        others = [
            folder / "finetune" / "summary.json",
            folder / "consolidate" / "parity.json",
            folder / "check_served" / "served.json",
            evaluation / "items.json",
            Path("tokens") / f"{run}-data" / "manifest.json",
        ]
        files = [*listed_files(adapter), *map(hashed, others)]
        certificate = folder / "certify_run" / "certificate.json"
        said = statement(
            run,
            files,
            certificate=certificate,
            published=adapter,
            evaluation=evaluation,
            licences={"model": "mit", "data": None},
            require=REQUIRE,
        )
        write_json(certificate, packed(said, key))
        return certificate
