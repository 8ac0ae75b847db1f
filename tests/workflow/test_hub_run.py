"""Real runs on a model and a dataset of the hub: downloaded, recorded, trained, or refused."""

import json
import shutil

import pytest

from tests.support.hub_server import HubRepo, start_hub
from tests.support.workflow_project import Project, executed, make_project


@pytest.fixture(scope="module")
def hub_files(finished_project):
    return {
        kind: {path.name: path.read_bytes() for path in (finished_project.root / folder).iterdir()}
        for kind, folder in (("model", "model"), ("dataset", "data"))
    }


def hub_project(root, endpoint, **changes):
    """A project without local model and data: both are named by their hub ids."""
    made = make_project(root / "project", hardware={"gpus": 0, "cpu_processes": 1}, **changes)
    shutil.rmtree(made.root / "model")
    shutil.rmtree(made.root / "data")
    made.edit(
        {
            "model": {"source": "acme/tiny"},
            "data": {"source": "acme/qa", "train": "train.jsonl", "heldout": "heldout.jsonl"},
        }
    )
    variables = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(root / "cache")}
    return Project(made.root, environment=variables)


def test_model_and_dataset_of_the_hub_are_downloaded_recorded_and_trained(hub_files, tmp_path):
    """Settings that do not suit the model are refused before its weights come
    (stages/test_download_source.py)."""
    model, data = HubRepo(hub_files["model"]), HubRepo(hub_files["dataset"], kind="dataset")
    with start_hub({"acme/tiny": model, "acme/qa": data}) as endpoint:
        project = hub_project(tmp_path, endpoint)
        project.edit({"data": {"seq_len": 128}})  # as many as the model has positions
        project.run("train", "--until", "download_source")
    # What was downloaded is all that training needs.
    Project(project.root).run("results/runs/demo/finetune/summary.json")
    recorded = {
        path.parts[-3]: json.loads(path.read_text())["commit"]
        for path in project.root.glob("results/hub/*/*/source.json")
    }
    assert recorded == {"model": model.find("main"), "dataset": data.find("main")}
    assert project.json("finetune", "summary.json")["num_steps"] == 6


@pytest.mark.parametrize(
    ("train", "gated", "message"),
    [
        ("train.jsonl", True, ["acme/tiny", "licence"]),
        ("none.jsonl", False, ["none.jsonl", "acme/qa"]),
    ],
    ids=["gated model", "missing file"],
)
def test_download_that_is_refused_is_one_message(hub_files, tmp_path, train, gated, message):
    model, data = HubRepo(hub_files["model"]), HubRepo(hub_files["dataset"], kind="dataset")
    model.gated = gated
    with start_hub({"acme/tiny": model, "acme/qa": data}) as endpoint:
        project = hub_project(tmp_path, endpoint)
        project.edit({"data": {"train": train}})
        done = project.snakemake("train")
    assert done.status == 1
    assert "Traceback" not in done.output
    assert set(executed(done.output)) == {"download_source"}
    assert "model.safetensors" not in model.downloads()  # which may be large
    end = done.output.splitlines()[-6:]
    assert [all(part in line for part in message) for line in end].count(True) == 1, done.output
