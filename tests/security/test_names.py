"""Names and paths, however they are spelled, are data: they work or are refused, and no shell ever
reads them."""

import json

import pytest

from tests.support.refusals import refusal
from tests.support.workflow_project import make_project
from workflow.lib.settings.config import load_config

# Each would leave a file `pwned` if a shell read it, or be taken for an option, or leave its
# folder.
HOSTILE = [
    "a b",
    "it's",
    'say "x"',
    "a;touch pwned",
    "$(touch pwned)",
    "`touch pwned`",
    "a\ntouch pwned",
    "a|touch pwned&",
    "--help",
    "-n",
    "*",
    "{run}",
    "{{x}}",
    "größe-数据",
    "a\\b",
    "#x",
    "%s",
    "!x",
    "~",
]
COLUMN = "{run} a'b\"c;touch pwned;$(touch pwned)`touch pwned`\n--help ../../ß数"
REFUSED_RUN_NAMES = [*HOSTILE, "..", ".", "a/b", "../x", ".hidden", "-x", "_x", "a" * 65, ""]


def rename(project, old, new):
    target = project.root / new
    target.parent.mkdir(parents=True, exist_ok=True)
    (project.root / old).rename(target)


@pytest.fixture(scope="module")
def hostile_folder(tmp_path_factory):
    """A folder to work in whose own name is hostile."""
    folder = tmp_path_factory.mktemp("names") / "w $(touch pwned) 'q\" ;touch pwned"
    folder.mkdir()
    return folder


def pwned(folder):
    return [path for path in folder.rglob("*") if path.name.strip("'\"; ") == "pwned"]


def rename_column(path, old, new):
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    renamed = [{new if key == old else key: value for key, value in row.items()} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in renamed), encoding="utf-8")


def hostile_project(root):
    """A project whose files, column, model, layers, template and title have every hostile character
    at once."""
    project = make_project(root)
    for name in ("train.jsonl", "heldout.jsonl"):
        rename_column(project.root / "data" / name, "prompt", COLUMN)
    every = "-- a b'c\"d;touch pwned;$(touch pwned)`touch pwned`|&*#%s!ß数"
    (project.root / every).mkdir()
    names = {
        "model": f"{every}/-model {every}",
        "data/train.jsonl": f"{every}/-train\n;touch pwned.jsonl",
        "data/heldout.jsonl": f"{every}/--help {every}.jsonl",
    }
    for old, new in names.items():
        rename(project, old, new)
    template = (project.root / names["model"] / "chat_template.jinja").read_text()
    (project.root / every / "--template; $(touch pwned).jinja").write_text(template)
    tasks = project.root / every / "$(touch pwned)"
    tasks.mkdir()
    project.edit(
        {
            "model": {"source": f"./{names['model']}"},
            "data": {
                "train": names["data/train.jsonl"],
                "heldout": names["data/heldout.jsonl"],
                "chat_template": f"./{every}/--template; $(touch pwned).jinja",
                "format": "prompt_completion",
                "columns": {"prompt": COLUMN},
            },
            "lora": {"target_modules": r".*_proj|--x '\"; \$\(touch pwned\)`touch pwned`"},
            "evaluate": {"tasks_dir": f"./{every}/$(touch pwned)"},
            "report": {"title": f"{every}\n<script>alert(1)</script>"},
        }
    )
    return project


def test_stages_work_with_hostile_names_and_run_nothing_of_them(hostile_folder):
    project = hostile_project(hostile_folder / "project")
    done = project.snakemake("preflight")
    assert done.status == 0, done.output
    assert project.json("preflight_run", "preflight.json")["verdict"] == "fits"
    assert pwned(hostile_folder) == []


def test_hub_id_and_revision_are_data_to_every_shell(hostile_folder):
    project = make_project(hostile_folder / "hub")
    hostile = {"source": "$(touch pwned);`touch pwned`/a b'c\"", "revision": "--help;touch pwned"}
    project.edit({"model": hostile})
    done = project.snakemake("preflight")
    assert done.status == 1
    assert "Traceback" not in done.output
    assert "model.source = '$(touch pwned)" in done.output
    assert pwned(hostile_folder) == []


def test_names_and_labels_that_are_no_plain_names_are_refused():
    for name in REFUSED_RUN_NAMES:
        assert "runs: the name" in refusal(load_config, {"runs": {name: {}}})
        for section in ("model", "data"):
            assert f"{section}.name = " in refusal(load_config, {section: {"name": name}})
