"""Registers of each kind that can be made to fail: a folder, an etcd of its own, an API server of
Kubernetes."""

import base64
import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest

from scalai.core.errors import PeerError
from scalai.launch.coordinator.registers import (
    ANNOTATION,
    EtcdRegister,
    FolderRegister,
    KubernetesRegister,
    Register,
)
from support.at_last import at_last
from support.kubernetes_api import kubernetes_api
from support.ports import free_port

ETCD = shutil.which("etcd")


@dataclass(frozen=True)
class Kept:
    """A register; how another process opens it, and how it fails.

    ``stop``: it answers nobody until ``go``. ``tear``: the newest entry is torn, or gone.
    """

    open: Callable[[], Register]
    stop: Callable[[], object]
    go: Callable[[], object]
    tear: Callable[[str | None], object]


@contextmanager
def _folder(place: Path) -> Iterator[Kept]:
    root, away = place / "lease", place / "away"

    def stop() -> None:
        root.rename(away)
        root.write_text("no folder")

    def go() -> None:
        root.unlink()
        away.rename(root)

    def tear(text: str | None) -> None:
        (path,) = (path for path in (root / "j").iterdir() if path.name[0] != ".")
        path.unlink() if text is None else path.write_text(text)

    yield Kept(lambda: FolderRegister(root, "j"), stop, go, tear)


@contextmanager
def _etcd(place: Path) -> Iterator[Kept]:
    if ETCD is None:
        pytest.skip("no etcd here (Debian: apt-get install etcd-server)")
    client, peer = (f"http://127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2))
    command = [
        ETCD, "--data-dir", str(place / "etcd"), "--listen-client-urls", client,
        "--advertise-client-urls", client, "--listen-peer-urls", peer,
        "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
    ]  # fmt: skip
    with (place / "etcd.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    found = EtcdRegister(client, "j")

    def tear(text: str | None) -> None:
        newest = found.newest()
        assert newest is not None
        asked = {"key": f"/scalai/j/term-{newest.term:012d}"}
        if text is not None:
            asked["value"] = text
        coded = {name: base64.b64encode(each.encode()).decode() for name, each in asked.items()}
        call = "deleterange" if text is None else "put"
        with urlopen(f"{client}/v3/kv/{call}", json.dumps(coded).encode(), 60) as answer:
            assert answer.status == 200

    try:
        at_last(found.newest, PeerError)
        yield Kept(
            lambda: EtcdRegister(client, "j"),
            lambda: process.send_signal(signal.SIGSTOP),
            lambda: process.send_signal(signal.SIGCONT),
            tear,
        )
    finally:
        process.kill()
        process.wait(10)


@contextmanager
def _kubernetes(place: Path) -> Iterator[Kept]:
    with kubernetes_api(place) as api:

        def tear(text: str | None) -> None:
            (name,) = api.leases
            if text is None:
                del api.leases[name]
            else:
                api.leases[name]["metadata"]["annotations"][ANNOTATION] = text
                api.keep(name, api.leases[name])

        yield Kept(
            lambda: KubernetesRegister(api.seen_by_a_pod(), "j"),
            api.may_answer.clear, api.may_answer.set, tear,
        )  # fmt: skip


KINDS = {"file": _folder, "etcd": _etcd, "kubernetes": _kubernetes}
"""Each kind of a register, kept in a folder."""
