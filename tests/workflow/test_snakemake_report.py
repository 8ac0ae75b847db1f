"""Snakemake's own report: made without a network, with a caption and a category for what it
shows.
"""

import re
from pathlib import Path

import pytest

from tests.support.workflow_project import Project

CAPTIONS = Path(__file__).resolve().parents[2] / "workflow" / "report" / "captions"


@pytest.fixture(scope="module")
def page(finished_project: Project, tmp_path_factory: pytest.TempPathFactory) -> str:
    project = finished_project.copy(tmp_path_factory.mktemp("snakemake-report") / "project")
    done = project.snakemake("--report", "snakemake.html")
    assert done.status == 0, done.output
    return (project.root / "snakemake.html").read_text(encoding="utf-8")


def test_every_category_is_there(page: str) -> None:
    assert all(f'"{name}"' in page for name in ("Prediction", "Training", "Export", "Report"))


def test_every_caption_is_there(page: str) -> None:
    opening = {
        path.stem: path.read_text().split("{")[0].split("``")[0] for path in CAPTIONS.glob("*.rst")
    }
    assert len(opening) > 5
    words = " ".join(re.sub(r"<[^>]+>", "", page.replace("\\n", " ")).split())
    assert [name for name, text in opening.items() if " ".join(text.split()) not in words] == []


def test_report_of_the_results_is_in_it(page: str) -> None:
    assert all(name in page for name in ("report.html", "comparison.csv"))
