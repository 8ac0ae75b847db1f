"""The workflow on a real Slurm of two nodes, started here: what it asks for, two nodes that train,
preemption, a lost node."""

import json
import re
import shutil
import time
from dataclasses import dataclass

import pytest

from tests.support.slurm_cluster import TIMEOUT_S, lack, running_cluster
from tests.support.workflow_project import REPOSITORY, Project, kill_all, make_project
from workflow.lib.planning.preflight.cluster_request import LAUNCH_BYTES

pytestmark = [
    pytest.mark.skipif(lack() is not None, reason=lack() or ""),
    pytest.mark.xdist_group("slurm"),
]

PROFILE = REPOSITORY / "workflow" / "profiles" / "slurm"
# The profile as it is; besides, what a cluster without accounting needs, and shorter waits.
OPTIONS = [
    *("--profile", str(PROFILE), "--slurm-status-command", "squeue"),
    *("--slurm-init-seconds-before-status-checks", "1", "--seconds-between-status-checks", "1"),
]
STEPS = 400
LONG = {"max_steps": STEPS, "checkpoint_every_steps": 10}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("slurm") / "cluster", nodes=2) as cluster:
        yield cluster


def finish(process):
    """Wait for a Snakemake and expect success."""
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except BaseException:
        kill_all(process)
        raise
    assert process.returncode == 0, output


@dataclass(frozen=True)
class Trained:
    """A run on the cluster, and what Slurm knew of its jobs, by rule."""

    project: Project
    jobs: dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def on_two_nodes(cluster, tmp_path_factory):
    """The whole workflow; one process on each of two nodes trains. Jobs are forked from a process
    that has imported their packages; those that are disturbed are started as a user's are."""
    root = tmp_path_factory.mktemp("run") / "project"
    project = make_project(root, hardware={"nodes": 2, "cpu_processes": 1})
    finish(project.start(*OPTIONS, "all", forks_stages=True))
    jobs = {
        re.sub(r"^rule_|_wildcards_.*", "", job["comment"]): cluster.facts(job["id"])
        for job in cluster.jobs()
    }
    return Trained(project, jobs)


def test_two_nodes_train_one_run(on_two_nodes):
    summary = on_two_nodes.project.json("finetune", "summary.json")
    assert (summary["processes"], summary["num_steps"]) == (2, 6)
    assert on_two_nodes.jobs["finetune"]["NumNodes"] == "2"


def test_every_stage_is_a_job(on_two_nodes):
    assert set(on_two_nodes.jobs) == {
        "describe_model",
        "tokenize_dataset",
        "preflight_run",
        "quantize_base",
        "finetune",
        "consolidate",
        "evaluate_run",
        "render_report",
        "write_card",
    }


def test_report_is_there_after_the_last_job(on_two_nodes):
    assert (on_two_nodes.project.root / "results" / "report" / "report.html").exists()


def test_training_asks_for_what_preflight_predicts(on_two_nodes):
    """Memory of a node; and minutes, the shortest there are for a run of a few steps."""
    predicted = on_two_nodes.project.json("preflight_run", "preflight.json")
    job = on_two_nodes.jobs["finetune"]
    assert job["TimeLimit"] == "00:21:00"
    assert int(job["MinMemoryNode"].removesuffix("M")) == pytest.approx(
        (predicted["host_bytes"] + LAUNCH_BYTES) * 1.25 / 2**20, rel=0.01
    )


@dataclass(frozen=True)
class Disturbed:
    """A run whose job was preempted once and whose node was lost once."""

    project: Project
    restarts: int


def wait_for_step(project, *, after):
    """Return the newest step with a checkpoint, once it is a later one."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        paths = project.root.glob("results/checkpoints/*/step-*")
        step = max((int(path.name[5:]) for path in paths if path.name[5:].isdigit()), default=0)
        if step > after:
            return step
        assert time.monotonic() < deadline, f"no checkpoint after step {after}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def disturbed(cluster, on_two_nodes):
    """Training on one node, of the tokens and base that are there."""
    project = on_two_nodes.project.copy(on_two_nodes.project.root.parent / "disturbed")
    for folder in project.root.glob("results/checkpoints/*"):
        folder.rename(project.root / folder.name)
    project.edit({"train": LONG, "hardware": {"nodes": 1}})
    process = project.start(*OPTIONS, "results/runs/demo/finetune/summary.json")
    try:
        wait_for_step(project, after=10)
        job = cluster.wait_for_job("finetune")
        cluster.preempt(job)
        wait_for_step(project, after=wait_for_step(project, after=0))
        cluster.cut_power(job)
    except BaseException:
        kill_all(process)
        raise
    finish(process)
    return Disturbed(project, int(cluster.facts(job)["Restarts"]))


def test_preempted_run_and_run_of_a_lost_node_go_on_by_themselves(disturbed):
    assert disturbed.restarts == 2
    resumed = disturbed.project.json("finetune", "summary.json")["resumed_from_steps"]
    assert len(resumed) == 2
    assert 0 < resumed[0] < resumed[1] < STEPS


def test_disturbed_run_has_every_step_once(disturbed):
    lines = (disturbed.project.folder("finetune") / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))


def test_stage_for_a_gpu_asks_for_one_and_leases_what_slurm_gave(cluster, on_two_nodes):
    """Slurm's cards are files, and a driver that is made up knows them; the quantization itself
    runs on the CPU."""
    source = on_two_nodes.project
    project = source.copy(source.root.parent / "gpu")
    (base,) = project.root.glob("results/base/tiny-*")
    shutil.rmtree(base)
    project.edit({"hardware": {"gpus": 2, "nodes": 1}})
    driver = {"PYTHONPATH": str(REPOSITORY / "tests" / "fake_driver")}
    gpu = Project(project.root, environment=driver)
    finish(gpu.start(*OPTIONS, str(base.relative_to(project.root)), forks_stages=True))
    newest = max(cluster.jobs(), key=lambda job: int(job["id"]))
    facts = cluster.facts(newest["id"])
    assert "quantize_base" in newest["comment"]
    assert "gpu:1" in facts.get("TresPerJob", "") + facts.get("TRES", "")
    assert facts["CPUs/Task"] == "2"


def test_gpus_of_the_login_node_are_not_taken_for_those_of_the_cluster(cluster, on_two_nodes):
    project = on_two_nodes.project.copy(on_two_nodes.project.root.parent / "auto")
    project.edit({"hardware": {"gpus": "auto", "nodes": 1}})
    refused = project.snakemake(*OPTIONS, "--forcerun", "render_report", "--", "report")
    assert refused.status == 1
    assert "hardware.gpus = 'auto' (run demo)" in refused.output
