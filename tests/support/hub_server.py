"""A stand-in for the Hugging Face hub on the loopback interface, for tests without network.

    model = HubRepo({"config.json": b"{}"})
    with start_hub({"owner/name": model}) as endpoint:   # set HF_ENDPOINT to it
        ...

It answers what huggingface_hub asks: repository and revision to commit, the tree, HEAD and GET of
files (`X-Repo-Commit`, and the `X-Linked-*` headers of LFS files), and the error codes of the real
hub. Faults are attributes
of the repository that may be changed while the server runs.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Files = Mapping[str, bytes]
WRITE_TOKEN = "hf_that_may_write"


class HubRepo:
    """A repository: commits, branches, and the faults that its server shows.

    Files whose names end in one of `lfs` are LFS files, which the hub lists with their SHA-256."""

    def __init__(
        self, files: Files, *, kind: str = "model", lfs: tuple[str, ...] = (".safetensors",)
    ) -> None:
        self.kind = kind
        self.lfs = lfs
        self.commits = {}
        self.branches = {}
        self.licence = None  # as its card names it
        self.gated = False  # files are refused, as to an account that did not accept the licence
        self.private = False
        self.bad_token = False  # every request is refused, as with an expired token
        self.served = {}  # bytes sent in place of the announced ones
        self.listed_size = {}  # size announced in place of the true one
        self.down = set()  # the connection is closed without an answer
        self.stored = {}  # large files that were sent, by their SHA-256
        self.refused = set()  # SHA-256 of large files that are cut off when they are sent
        self.sent = []  # SHA-256 of large files that came whole, in order
        self.requests = []  # method, path, headers
        self.commit(files)

    def commit(self, files: Files, *, branch: str = "main") -> str:
        """Put `files` on `branch` as a new commit, and return its id."""
        tree = {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}
        parent = self.branches.get(branch)
        commit = hashlib.sha1(json.dumps([parent, tree], sort_keys=True).encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.branches[branch] = commit
        return commit

    def find(self, revision: str) -> str | None:
        commit = self.branches.get(revision, revision)
        return commit if commit in self.commits else None

    def downloads(self) -> list[str]:
        """Return the paths of the files that were sent, in order."""
        return [
            path.split("/", 6)[-1]
            for method, path, _ in self.requests
            if method == "GET" and "/resolve/" in path
        ]

    def tree(self, commit: str) -> list[dict[str, Any]]:
        return [self._entry(path, content) for path, content in self.commits[commit].items()]

    def _entry(self, path: str, content: bytes) -> dict[str, Any]:
        size = self.listed_size.get(path, len(content))
        entry = {"type": "file", "path": path, "size": size, "oid": git_blob_id(content)}
        if path.endswith(self.lfs):
            entry["lfs"] = {
                "oid": hashlib.sha256(content).hexdigest(),
                "size": size,
                "pointerSize": 134,
            }
        return entry


def git_blob_id(content: bytes) -> str:
    """Return git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repos: dict[str, HubRepo]

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output quiet."""

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def do_PUT(self) -> None:
        """Take a large file, or break off."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        *name, oid = urlsplit(self.path).path.strip("/").split("/")
        repo = self.repos["/".join(name[:2])]
        if oid in repo.refused or hashlib.sha256(body).hexdigest() != oid:
            return self._error(400, "", "the upload broke off")
        repo.stored[oid] = body
        repo.sent.append(oid)
        return self._send(200, {}, b"")

    def do_POST(self) -> None:
        """Make a repository, or take an upload; any card passes the check before it."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if parts[2:] == ["info", "lfs", "objects", "batch"]:
            return self._large(parts, json.loads(body)["objects"])
        if parts == ["api", "validate-yaml"]:
            return self._json({"errors": [], "warnings": []})
        return self._take(parts, body)

    def _large(self, parts: list[str], objects: list[dict[str, Any]]) -> None:
        """Tell where each large file is to be sent, by git LFS's batch API; of one that is there
        nothing."""
        name = "/".join(parts[:2]).removesuffix(".git")
        for item in objects:
            if item["oid"] not in self.repos[name].stored:
                address = f"http://{self.headers['Host']}/{name}/large/{item['oid']}"
                item["actions"] = {"upload": {"href": address}}
        self._json({"transfer": "basic", "objects": objects})

    def _take(self, parts: list[str], body: bytes) -> None:
        """Answer the requests of an upload; small files come within the commit."""
        if self.headers.get("Authorization") != f"Bearer {WRITE_TOKEN}":
            return self._error(401, "", "Invalid credentials in Authorization header")
        if parts[-1] == "create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in self.repos:
                known = {"url": f"http://{self.headers['Host']}/{name}"}
                kind = {"Content-Type": "application/json"}
                return self._send(409, kind, json.dumps(known).encode())
            made = HubRepo({})
            made.private = asked.get("private") or asked.get("visibility") == "private"
            self.repos[name] = made
            return self._json({"url": f"http://{self.headers['Host']}/{name}"})
        repo = self.repos["/".join(parts[2:4])]
        if parts[4] == "preupload":
            files = [
                {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None}
                for path in (file["path"] for file in json.loads(body)["files"])
                for mode in ["lfs" if path.endswith(repo.lfs) else "regular"]
            ]
            return self._json({"files": files})
        lines = [json.loads(line) for line in body.splitlines()]
        sent = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"])
            for line in lines
            if line["key"] == "file"
        }
        large = [line["value"] for line in lines if line["key"] == "lfsFile"]
        sent |= {file["path"]: repo.stored[file["oid"]] for file in large}
        commit = repo.commit({**repo.commits[repo.branches["main"]], **sent})
        address = f"http://{self.headers['Host']}/{'/'.join(parts[2:4])}/commit/{commit}"
        return self._json({"commitUrl": address, "commitOid": commit, "success": True})

    def _route(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        is_api = parts[0] == "api"
        if is_api:
            kind, parts = parts[1].removesuffix("s"), parts[2:]
        else:
            kind = "dataset" if parts[0] == "datasets" else "model"
            parts = parts[kind == "dataset" :]
        repo = self.repos.get("/".join(parts[:2]))
        if repo is None or repo.kind != kind:
            return self._error(404, "RepoNotFound")
        repo.requests.append((self.command, "/".join(["", kind, *parts]), dict(self.headers)))
        if repo.bad_token:
            return self._error(401, "", "Invalid credentials in Authorization header")
        action, revision, *rest = [*parts[2:], "revision", "main"] if len(parts) == 2 else parts[2:]
        commit = repo.find(revision)
        if commit is None:
            return self._error(404, "RevisionNotFound")
        if action == "revision":
            said = {"id": "/".join(parts[:2]), "sha": commit, "siblings": []}
            return self._json(said | {"cardData": {"license": repo.licence}})
        if action == "tree":
            return self._json(repo.tree(commit))
        return self._file(repo, commit, "/".join(rest))

    def _file(self, repo: HubRepo, commit: str, path: str) -> None:
        if repo.gated:
            return self._error(403, "GatedRepo")
        if path not in repo.commits[commit]:
            return self._error(404, "EntryNotFound")
        if self.command == "GET" and path in repo.down:
            self.close_connection = True
            return None
        content = repo.commits[commit][path]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{git_blob_id(content)}"'}
        if path.endswith(repo.lfs):
            headers["X-Linked-Etag"] = f'"{hashlib.sha256(content).hexdigest()}"'
            headers["X-Linked-Size"] = str(len(content))
        body = repo.served.get(path, content)
        return self._send(200, headers, body)

    def _json(self, value: object) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _error(self, status: int, code: str, message: str = "") -> None:
        self._send(status, {"X-Error-Code": code, "X-Error-Message": message or code}, b"")

    def _send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def start_hub(repos: dict[str, HubRepo]) -> Iterator[str]:
    """Serve `repos` (by id `owner/name`) on a free port of 127.0.0.1; yield the endpoint's URL."""
    handler = type("Handler", (_Handler,), {"repos": repos})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
