"""The workflow on Kubernetes: Snakemake's plugin, an API that admits what Kubernetes would, an S3
server, and a fresh folder for every pod.

Pods are processes here (`kubernetes_cluster`): no container, no image, no GPU. All else is real:
the profile, the command that the plugin gives to a pod, the sources that travel, S3's protocol
(moto), and the stages.
"""

import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest
import yaml
from moto.server import ThreadedMotoServer
from safetensors.numpy import load

from tests.support.hub_server import HubRepo, start_hub
from tests.support.kubernetes_cluster import Cluster, Pod, command, refusal, running_cluster
from tests.support.workflow_project import (
    LONG,
    REPOSITORY,
    SETTINGS,
    Project,
    copy_of_repository,
    kill_all,
    make_project,
)
from workflow.lib.artifacts.layout import base_dir
from workflow.lib.settings.config import load_config, merge

# Ten pods, each of which starts Snakemake twice: several minutes.
on_request = pytest.mark.skipif(
    "TEST_WHOLE_KUBERNETES" not in os.environ,
    reason="takes minutes: set TEST_WHOLE_KUBERNETES=1",
)

PROFILE = REPOSITORY / "workflow" / "profiles" / "kubernetes"
SECRETS = {"HF_TOKEN": "canary-of-the-hub", "KEY": "canary-key", "SECRET": "canary-secret"}
BUCKET, PREFIX = "bucket", "some/where"
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Store:
    """An S3 server with one bucket."""

    url: str
    client: Any

    def listing(self) -> list[str]:
        """Return what lies below the prefix."""
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{PREFIX}/")["Contents"]
        return [entry["Key"].removeprefix(f"{PREFIX}/") for entry in found]

    def read(self, key: str) -> bytes:
        """Return an artifact."""
        body: bytes = self.client.get_object(Bucket=BUCKET, Key=f"{PREFIX}/{key}")["Body"].read()
        return body

    def put(self, key: str, content: bytes) -> None:
        """Upload a file."""
        self.client.put_object(Bucket=BUCKET, Key=f"{PREFIX}/{key}", Body=content)


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    client = boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1",
        aws_access_key_id=SECRETS["KEY"], aws_secret_access_key=SECRETS["SECRET"],
    )  # fmt: skip
    client.create_bucket(Bucket=BUCKET)
    yield Store(url, client)
    server.stop()


class Clone(Project):
    """A clone in which Snakemake is started: its `--directory` would be that of the pods too."""

    def command(self, *arguments: str) -> list[str]:
        """Return the command line of a user in the clone."""
        words = super().command(*arguments)
        place = words.index("--directory")
        return words[:place] + words[place + 2 :]


def make_clone(root: Path, store: Store, endpoint: str) -> Clone:
    """Return a clone with settings; its data lie in the store, its model on the hub."""
    clone = copy_of_repository(root / "clone")
    environment = {
        "HF_ENDPOINT": endpoint,
        "HF_TOKEN": SECRETS["HF_TOKEN"],
        "SNAKEMAKE_STORAGE_S3FOLDERS_ENDPOINT_URL": store.url,
        "SNAKEMAKE_STORAGE_S3FOLDERS_ACCESS_KEY": SECRETS["KEY"],
        "SNAKEMAKE_STORAGE_S3FOLDERS_SECRET_KEY": SECRETS["SECRET"],
        "PYTHONPATH": str(clone / "workflow" / "storage"),
    }
    project = Clone(clone, clone, environment)
    project.write_settings(merge(SETTINGS, {"model": {"source": "owner/tiny"}, "train": LONG}))
    for arguments in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *arguments], cwd=clone, check=True)
    return project


def options(cluster: Cluster) -> list[str]:
    """Return the profile as it is, what a user has to add, and shorter waits."""
    return [
        *("--profile", str(PROFILE), "--default-storage-prefix", f"s3://{BUCKET}/{PREFIX}"),
        *("--container-image", "registry.example/image:1", "--envvars", "HF_TOKEN", "HF_ENDPOINT"),
        *("--seconds-between-status-checks", "1", "--latency-wait", "2"),
    ]


def start(project: Project, cluster: Cluster, *targets: str) -> subprocess.Popen[str]:
    """Start Snakemake as a user of the cluster does."""
    config = {"KUBECONFIG": str(cluster.kubeconfig)}
    user = Clone(project.root, project.repository, project.environment | config)
    return user.start(*options(cluster), *targets)


def wait_for_checkpoint(cluster: Cluster, process: subprocess.Popen[str]) -> Pod:
    """Return the pod that trains, once its first checkpoint is on the claim."""
    deadline = time.monotonic() + TIMEOUT_S
    while not list(cluster.claim("fsdp-qlora").glob("checkpoints/*/step-????????/index.json")):
        assert time.monotonic() < deadline, "no checkpoint"
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    (pod,) = cluster.of_rule("finetune")
    return pod


@dataclass(frozen=True)
class OnPods:
    """A finished workflow, its cluster and store; the pod that trained first was lost with its
    node.
    """

    project: Project
    cluster: Cluster
    store: Store
    output: str


@pytest.fixture(scope="module")
def on_pods(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnPods]:
    root = tmp_path_factory.mktemp("kubernetes")
    made = make_project(root / "made").root
    for path in (made / "data").iterdir():
        store.put(f"data/{path.name}", path.read_bytes())
    hub = HubRepo({path.name: path.read_bytes() for path in (made / "model").iterdir()})
    with start_hub({"owner/tiny": hub}) as endpoint, running_cluster(root / "cluster") as cluster:
        project = make_clone(root, store, endpoint)
        process = start(project, cluster, "all")
        try:
            cluster.take_node(wait_for_checkpoint(cluster, process))
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except BaseException:
            if process.poll() is None:
                kill_all(process)
            raise
        logs = "\n".join(pod.log for pod in cluster.pods.values() if pod.status)
        assert process.returncode == 0, output + logs
        yield OnPods(project, cluster, store, output)


@on_request
def test_every_stage_runs_in_a_pod_of_its_own_and_its_artifacts_are_in_the_store(
    on_pods: OnPods,
) -> None:
    counts = {
        rule: len(on_pods.cluster.of_rule(rule))
        for rule in (
            "download_source",
            "describe_model",
            "tokenize_dataset",
            "preflight_run",
            "quantize_base",
            "consolidate",
            "evaluate_run",
            "write_card",
            "render_report",
        )
    }
    assert set(counts.values()) == {1}
    assert not (on_pods.project.root / "results").exists()
    assert "results/report/report.html" in on_pods.store.listing()


@on_request
def test_results_equal_those_of_a_run_on_one_machine(
    on_pods: OnPods, finished_project: Project
) -> None:
    adapter = "results/runs/demo/consolidate/adapter/adapter_model.safetensors"
    here, there = (finished_project.root / adapter).read_bytes(), on_pods.store.read(adapter)
    tensors, others = load(here), load(there)
    assert tensors.keys() == others.keys()
    assert all((tensors[name] == others[name]).all() for name in tensors)
    tuned = json.loads(on_pods.store.read("results/runs/demo/evaluate_run/tuned.json"))
    assert tuned["heldout"] == finished_project.json("evaluate_run", "tuned.json")["heldout"]


@on_request
def test_training_whose_node_is_taken_away_goes_on_from_the_claim(on_pods: OnPods) -> None:
    summary = json.loads(on_pods.store.read("results/runs/demo/finetune/summary.json"))
    assert len(on_pods.cluster.of_rule("finetune")) == 2
    assert len(summary["resumed_from_steps"]) == 1
    assert summary["resumed_from_steps"][0] >= 1


@on_request
def test_every_job_is_one_that_kubernetes_admits(on_pods: OnPods) -> None:
    assert on_pods.cluster.refused == []
    assert len(on_pods.cluster.pods) == 10


@on_request
def test_secrets_are_in_a_secret_of_the_cluster_and_nowhere_else(on_pods: OnPods) -> None:
    manifests = json.dumps([pod.job for pod in on_pods.cluster.pods.values()])
    logs = "".join(pod.log for pod in on_pods.cluster.pods.values())
    stored = b"".join(map(on_pods.store.read, on_pods.store.listing())).decode(errors="replace")
    for text in (manifests, logs, on_pods.output, stored):
        assert [secret for secret in SECRETS.values() if secret in text] == []
    assert on_pods.cluster.secrets == {}, "the secret of the run is deleted at its end"


@pytest.fixture(scope="module")
def gpu_pod(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Pod:
    """The pod of a stage on a GPU, which waits for a node until the user interrupts; the model is a
    folder of the store.
    """
    root = tmp_path_factory.mktemp("gpus")
    for path in (make_project(root / "made").root / "model").iterdir():
        store.put(f"model/{path.name}", path.read_bytes())
    project = make_clone(root, store, "http://127.0.0.1:9")
    project.edit({"model": {"source": "./model"}, "hardware": {"gpus": 2}})
    target = base_dir(load_config(project.settings)[1]["demo"])
    with running_cluster(root / "cluster", runs_pods=False) as cluster:
        process = start(project, cluster, "--", target)
        deadline = time.monotonic() + TIMEOUT_S
        while not cluster.pods and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=TIMEOUT_S)
        assert list(cluster.pods), output + str(cluster.refused)
        (pod,) = cluster.pods.values()
        assert "--allowed-rules quantize_base " in command(pod)
        return pod


def test_stage_asks_for_its_gpu_with_the_limit_that_kubernetes_demands(gpu_pod: Pod) -> None:
    resources = gpu_pod.container["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == "1"


def test_stage_has_two_cores_for_its_gpu(gpu_pod: Pod) -> None:
    """Cores are limits there, and the plugin requests 5% less. With one core, what makes the next
    batch would take turns with what launches kernels.
    """
    resources = gpu_pod.container["resources"]
    assert (resources["requests"]["cpu"], resources["limits"]["cpu"]) == ("1900m", "2000m")


def test_stage_on_a_gpu_tolerates_the_taint_of_gpu_nodes_and_mounts_the_claim(gpu_pod: Pod) -> None:
    spec = gpu_pod.job["spec"]["template"]["spec"]
    taint = {"key": "nvidia.com/gpu", "value": "present", "operator": "Equal"}
    assert spec["tolerations"] == [taint | {"effect": "NoSchedule"}]
    assert {"name": "fsdp-qlora", "mountPath": "/workdir/results"} in gpu_pod.container[
        "volumeMounts"
    ]


def test_run_on_several_nodes_is_refused_before_any_pod(store: Store, tmp_path: Path) -> None:
    for path in (make_project(tmp_path / "made").root / "model").iterdir():
        store.put(f"model/{path.name}", path.read_bytes())
    project = make_clone(tmp_path, store, "http://127.0.0.1:9")
    project.edit({"model": {"source": "./model"}, "hardware": {"gpus": 2, "nodes": 2}})
    target = base_dir(load_config(project.settings)[1]["demo"])
    with running_cluster(tmp_path / "cluster", runs_pods=False) as cluster:
        process = start(project, cluster, "--", target)
        output, _ = process.communicate(timeout=TIMEOUT_S)
        assert not cluster.pods
    assert process.returncode == 1
    assert "hardware.nodes = 2 (run demo): a job on Kubernetes is one pod" in output


def test_validation_refuses_what_kubernetes_refuses(gpu_pod: Pod) -> None:
    """Guards the tests above: the schema is not one that takes everything."""
    unknown, unlimited = (json.loads(json.dumps(gpu_pod.job)) for _ in range(2))
    unknown["spec"]["template"]["spec"]["toleration"] = []
    (container,) = unlimited["spec"]["template"]["spec"]["containers"]
    del container["resources"]["limits"]
    assert "toleration" in (refusal(unknown) or "")
    assert "Limit must be set" in (refusal(unlimited) or "")


def test_profile_limits_every_rule_that_may_ask_for_gpus() -> None:
    settings = yaml.safe_load((PROFILE / "config.yaml").read_text())["set-resources"]
    rules = "\n".join(path.read_text() for path in (REPOSITORY / "workflow/rules").glob("*.smk"))
    asking = {
        block.split(":", 1)[0] for block in f"\n{rules}".split("\nrule ")[1:] if "gpu=" in block
    }
    assert asking
    assert all(settings[rule]["scale"] == 0 for rule in asking)
