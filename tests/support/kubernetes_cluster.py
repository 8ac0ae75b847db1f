"""A Kubernetes whose nodes are this machine: the API that Snakemake's plugin calls, and a process
for every pod.

with running_cluster(tmp_path) as cluster:      # KUBECONFIG=cluster.kubeconfig
    ...

A job is admitted if Kubernetes' own schema knows every field of it and extended resources have
limits, as the API server demands. Its container's command is then run in a new, empty folder, with
the secrets that it names as its variables and nothing else of the environment, and its claims as
links into the folder. What is not there: containers, images, limits.
"""

import base64
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate  # type: ignore[import-untyped]
import yaml

VERSION = "1.32"  # the API of the pinned client
REPOSITORY = Path(__file__).resolve().parents[2]
Manifest = dict[str, Any]


@dataclass
class Pod:
    """A job's only pod: its container's process and where that runs."""

    job: Manifest
    folder: Path
    process: subprocess.Popen[bytes] | None
    lost: bool = False
    """Taken away with its node: the job has failed, and nothing is left to ask for a log."""

    @property
    def container(self) -> Manifest:
        """The container of Snakemake's job."""
        (container,) = self.job["spec"]["template"]["spec"]["containers"]
        assert isinstance(container, dict)
        return container

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs, or is only on record."""
        return None if self.process is None else self.process.poll()

    @property
    def log(self) -> str:
        """What the container wrote."""
        return (self.folder / "log.txt").read_text(errors="replace")


@dataclass
class Cluster:
    """The state of the cluster; `pods` by the name of their job, those of deleted jobs included."""

    folder: Path
    runs_pods: bool = True
    pods: dict[str, Pod] = field(default_factory=dict)
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    deleted: set[str] = field(default_factory=set)

    @property
    def kubeconfig(self) -> Path:
        """The file that a client reads."""
        return self.folder / "kubeconfig"

    def claim(self, name: str) -> Path:
        """Return the folder of a persistent volume claim."""
        return self.folder / "claims" / name

    def of_rule(self, rule: str) -> list[Pod]:
        """Return the pods of a rule, in order."""
        return [pod for pod in self.pods.values() if f"--allowed-rules {rule} " in command(pod)]

    def create(self, job: Manifest) -> str | None:
        """Admit a job and start its pod; return why it is refused."""
        why = refusal(job)
        if why is not None:
            self.refused.append(why)
            return why
        name = job["metadata"]["name"]
        folder = self.folder / "pods" / name
        pod = Pod(job, folder, None)
        if self.runs_pods:
            pod.process = self._start(pod)
        self.pods[name] = pod
        return None

    def _start(self, pod: Pod) -> subprocess.Popen[bytes]:
        workdir = pod.folder / "workdir"
        workdir.mkdir(parents=True)
        volumes = {v["name"]: v for v in pod.job["spec"]["template"]["spec"]["volumes"]}
        for mount in pod.container["volumeMounts"]:
            claim = volumes[mount["name"]].get("persistentVolumeClaim")
            if claim:
                target = self.claim(claim["claimName"])
                target.mkdir(parents=True, exist_ok=True)
                link = workdir / Path(mount["mountPath"]).relative_to("/workdir")
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(target)
        variables = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.defpath]),
            "HOME": str(pod.folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY / "workflow" / "storage"),  # as the image sets it
        } | {entry["name"]: self._secret(entry) for entry in pod.container["env"]}
        with (pod.folder / "log.txt").open("wb") as log:
            return subprocess.Popen(
                [*pod.container["command"], *pod.container["args"]],
                cwd=workdir, env=variables, stdout=log, stderr=log, process_group=0,
            )  # fmt: skip

    def _secret(self, entry: Manifest) -> str:
        ref = entry["valueFrom"]["secretKeyRef"]
        return base64.b64decode(self.secrets[ref["name"]][ref["key"]]).decode()

    def take_node(self, pod: Pod) -> None:
        """Kill a pod with all that runs in it, and forget it, as when its node is taken away."""
        pod.lost = True
        kill(pod)


def command(pod: Pod) -> str:
    """Return the command line of a pod."""
    return " ".join(pod.container["args"])


def kill(pod: Pod) -> None:
    """SIGKILL a pod's processes."""
    if pod.process is not None and pod.process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(pod.process.pid, signal.SIGKILL)
        pod.process.wait()


def refusal(job: Manifest) -> str | None:
    """Return why an API server would not admit a job; None if it would."""
    try:
        kubernetes_validate.validate(
            {"apiVersion": "batch/v1", "kind": "Job", **job}, VERSION, strict=True
        )
    except kubernetes_validate.ValidationError as error:
        return f"{list(error.path)}: {error.message}"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    asked, limits = (container["resources"].get(key, {}) for key in ("requests", "limits"))
    for name in {name for name in (*asked, *limits) if "/" in name}:
        if asked.get(name) != limits.get(name):
            return f"{name}: Limit must be set for non overcommitable resources"
    return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output quiet."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query, parts = parse_qs(url.query), url.path.strip("/").split("/")
        if parts[-1] == "status":
            return self._known(parts[-2], self._job_status)
        if parts[-1] == "pods":
            name = query["labelSelector"][0].removeprefix("job-name=")
            return self._known(name, self._pod_list)
        if parts[-1] == "log":
            if query.get("previous") == [
                "True"
            ]:  # of a container that was started again: there is none
                return self._error(400, "previous terminated container not found")
            return self._known(parts[-2], lambda pod: pod.log)
        return self._error(404, "not found")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith("/secrets"):
            self.cluster.secrets[body["metadata"]["name"]] = body["data"]
            return self._send(201, body)
        why = self.cluster.create(body)
        return self._send(201, body) if why is None else self._error(422, why)

    def do_DELETE(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path).path.strip("/").split("/")
        kind, name = parts[-2:]
        if kind == "secrets":
            self.cluster.secrets.pop(name, None)
        elif name in self.cluster.pods:
            kill(self.cluster.pods[name])
            self.cluster.deleted.add(name)
        self._send(200, {"apiVersion": "v1", "kind": "Status", "status": "Success"})

    def _known(self, name: str, answer: Any) -> None:
        pod = self.cluster.pods.get(name)
        if pod is None or name in self.cluster.deleted:
            return self._error(404, f"{name} not found")
        return self._send(200, answer(pod))

    def _job_status(self, pod: Pod) -> Manifest:
        done = pod.lost or pod.status is not None
        failed = pod.lost or bool(pod.status)
        counts = {"failed": int(failed), "succeeded": int(not failed)} if done else {"active": 1}
        return {**pod.job, "status": counts}

    def _pod_list(self, pod: Pod) -> Manifest:
        state = {"running": {}} if pod.status is None else {"terminated": {"exitCode": pod.status}}
        name = pod.job["metadata"]["name"]
        status = {
            "name": "snakemake",
            "image": pod.container["image"],
            "imageID": "",
            "ready": False,
            "restartCount": 0,
            "state": state,
        }
        item = {"metadata": {"name": name}, "status": {"containerStatuses": [status]}}
        return {"apiVersion": "v1", "kind": "PodList", "items": [] if pod.lost else [item]}

    def _error(self, code: int, message: str) -> None:
        self._send(code, {"kind": "Status", "status": "Failure", "message": message, "code": code})

    def _send(self, code: int, content: Manifest | str) -> None:
        body = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def running_cluster(folder: Path, *, runs_pods: bool = True) -> Iterator[Cluster]:
    """Serve the API of a new cluster on the loopback interface; its pods end with it.

    Without `runs_pods` jobs are admitted, and wait for a node for ever.
    """
    cluster = Cluster(folder, runs_pods)
    handler = type("Handler", (_Handler,), {"cluster": cluster})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    folder.mkdir(parents=True)
    cluster.kubeconfig.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "test",
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                "clusters": [
                    {
                        "name": "test",
                        "cluster": {"server": f"http://127.0.0.1:{server.server_port}"},
                    }
                ],
                "users": [{"name": "test", "user": {}}],
            }
        )
    )
    thread.start()
    try:
        yield cluster
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        for pod in cluster.pods.values():
            kill(pod)
