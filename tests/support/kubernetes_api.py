"""A small API server of Kubernetes over TLS, for tests: Leases of one namespace, with versions and
conflicts, and Jobs of changing size; tokens that end; and the service account of a pod that asks
it."""

import json
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from scalai.launch.coordinator import api_servers
from scalai.launch.coordinator.api_servers import MERGE_PATCH, KubernetesApi
from support.certificates import Authority
from support.kueue import QUEUES, Kueue
from support.manifests import BASE, built, job_of

NAMESPACE = "train"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
JOBS = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/"
DRY = "?dryRun=All"
MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


@contextmanager
def seen_from_a_pod(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["Api"]:
    """An API server with the Job of the manifests, asked from a pod."""
    with kubernetes_api(folder) as found:
        url = urlsplit(found.url)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", str(url.hostname))
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(url.port))
        monkeypatch.setattr(api_servers, "ACCOUNT", found.account)
        found.jobs["gpt"] = job_of(built(BASE))
        yield found


@dataclass
class Api:
    """What the server has, and how it answers."""

    account: Path
    url: str = ""
    leases: dict[str, dict[str, Any]] = field(default_factory=dict)
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    version: int = 0
    token: str = "token-1"
    status: int | None = None
    """What it answers to everything."""
    may_answer: threading.Event = field(default_factory=threading.Event)
    asked: list[tuple[str, str]] = field(default_factory=list)
    kueue: Kueue | None = None
    forbidden: str | None = None
    """Begin of addresses to which the account has no right."""
    conflicts: int = 0

    def renew_token(self) -> None:
        """The token ends, and another one is in its file, as the kubelet has it."""
        self.token += "'"
        (self.account / "token").write_text(self.token)

    def seen_by_a_pod(self) -> KubernetesApi:
        return KubernetesApi(self.url, self.account, "--kubernetes")

    def keep(self, name: str, lease: dict[str, Any]) -> dict[str, Any]:
        """Keep a Lease as its newest version."""
        self.version += 1
        lease = json.loads(json.dumps(lease))
        lease["metadata"] |= {"resourceVersion": str(self.version), "namespace": NAMESPACE}
        self.leases[name] = lease
        return lease

    def answer(self, method: str, path: str, lease: dict[str, Any] | None) -> tuple[int, Any]:
        """Return status and content, as the API server does."""
        if self.forbidden is not None and path.startswith(self.forbidden):
            return 403, _status(403, "Forbidden")
        if path.startswith(JOBS):
            return self._answer_about_job(method, path.removeprefix(JOBS), lease)
        if path.startswith(QUEUES) and self.kueue is not None and method == "GET":
            return self.kueue.answer(path) or (404, _status(404, "NotFound"))
        name = path.removeprefix(LEASES).removeprefix("/")
        if not path.startswith(LEASES):
            return 404, _status(404, "NotFound")
        if lease is not None and (problem := _problem(lease)):
            return 422, _status(422, problem)
        if method == "POST" and lease is not None and not name:
            name = lease["metadata"]["name"]
            if name in self.leases:
                return 409, _status(409, "AlreadyExists")
            return 201, self.keep(name, lease)
        if name not in self.leases:
            return 404, _status(404, "NotFound")
        if method == "PUT" and lease is not None:
            version = lease["metadata"].get("resourceVersion")
            if version is None:
                return 422, _status(422, "metadata.resourceVersion: must be specified")
            if version != self.leases[name]["metadata"]["resourceVersion"]:
                self.conflicts += 1
                return 409, _status(409, "the object has been modified")
            return 200, self.keep(name, lease)
        return (200, self.leases[name]) if method == "GET" else (405, _status(405, method))

    def _answer_about_job(
        self, method: str, name: str, change: dict[str, Any] | None
    ) -> tuple[int, Any]:
        """A Job is read, or the size of an Indexed one changes: of both fields together."""
        name, is_dry = name.removesuffix(DRY), name.endswith(DRY)
        if name not in self.jobs:
            return 404, _status(404, f'jobs.batch "{name}" not found')
        job = self.jobs[name]
        if method == "GET":
            return 200, job
        if method != "PATCH" or change is None or change.keys() != {"spec"}:
            return 405, _status(405, method)
        spec = job["spec"] | change["spec"]
        changed = {key for key in spec if spec[key] != job["spec"].get(key)}
        if changed - {"parallelism", "completions"}:
            return 422, _status(422, "field is immutable")
        is_alike = spec["completions"] == spec["parallelism"]
        if "completions" in changed and not (is_alike and spec["completionMode"] == "Indexed"):
            return 422, _status(422, "spec.completions: field is immutable")
        if is_dry:
            return 200, job | {"spec": spec}
        job["spec"] = spec
        if self.kueue is not None:
            self.kueue.reconcile(name, job)
        return 200, job


def _problem(lease: dict[str, Any]) -> str:
    """Return why the API server would not take this."""
    spec = lease["spec"]
    if (lease["apiVersion"], lease["kind"]) != ("coordination.k8s.io/v1", "Lease"):
        return "it is no Lease"
    if not NAME.fullmatch(lease["metadata"]["name"]):
        return "metadata.name: a lowercase RFC 1123 subdomain"
    if not spec["holderIdentity"] or not MICRO_TIME.fullmatch(spec["renewTime"]):
        return "spec.holderIdentity, spec.renewTime"
    if type(spec["leaseTransitions"]) is not int or spec["leaseTransitions"] < 0:
        return "spec.leaseTransitions"
    if not all(isinstance(text, str) for text in lease["metadata"]["annotations"].values()):
        return "metadata.annotations"
    return ""


def _status(code: int, message: str) -> dict[str, Any]:
    return {"kind": "Status", "status": "Failure", "code": code, "message": message}


@contextmanager
def kubernetes_api(folder: Path, listener: socket.socket | None = None) -> Iterator[Api]:
    """Give a server that ends with the context. ``listener``: where it is asked."""
    account, mutex = folder / "account", threading.Lock()
    account.mkdir(parents=True)
    authority = Authority(folder)
    (account / "ca.crt").write_bytes(authority.path.read_bytes())
    (account / "namespace").write_text(NAMESPACE)
    api = Api(account)
    (account / "token").write_text(api.token)
    api.may_answer.set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            size = int(self.headers.get("Content-Length", 0))
            text = self.rfile.read(size)
            api.may_answer.wait(60.0)
            with mutex:
                api.asked.append((self.command, self.path))
                if api.status is not None:
                    status, found = api.status, _status(api.status, "a failure")
                elif self.headers.get("Authorization") != f"Bearer {api.token}":
                    status, found = 401, _status(401, "Unauthorized")
                else:
                    lease = json.loads(text) if text else None
                    is_patch = self.headers.get("Content-Type") == MERGE_PATCH
                    if is_patch != (self.command == "PATCH"):
                        status, found = 415, _status(415, "the type of the content")
                    else:
                        status, found = api.answer(self.command, self.path, lease)
            content = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_PUT = do_PATCH = do_GET

        def log_message(self, format: str, *arguments: object) -> None: ...

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Clients go when they have waited for long enough."""

    listener = listener or socket.create_server(("127.0.0.1", 0))
    address, port = listener.getsockname()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.files("api", address))
    with Quiet((address, port), Handler, bind_and_activate=False) as server:
        server.socket.close()
        server.socket = context.wrap_socket(listener, server_side=True)
        api.url = f"https://{address}:{port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield api
        finally:
            api.may_answer.set()
            server.shutdown()
            thread.join(10.0)
