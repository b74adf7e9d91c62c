"""Pods of a Job of Kubernetes on this machine, by its manifest: a network, PID, mount and host name
namespace each, a read-only root, a user without privileges, the volumes and the environment; an API
server for them; and a controller that replaces them by the documented rules.

The image is this checkout and its environment. The pods' network is a switch; a replaced pod has
another address. Not acted out: resources, quotas, probes, delays between replacements.
"""

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from support.job_controller import DISRUPTION, JobState, fate_of
from support.kubernetes_api import Api, kubernetes_api
from support.manifests import Objects, bytes_of, job_of
from support.network_namespaces import NetworkHosts

ROOT = Path(__file__).parents[2]
WORKDIR = "/opt/scalai"
"""Of the image: the checkout."""
CLONE_NEWNET = 0x40000000
MOST_PODS = 12
DEADLINE_S = 150.0
API = "api"
OF_THE_IMAGE = {
    "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
    "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1",
}  # fmt: skip


@dataclass
class Pod:
    """A pod and its only container.

    Attributes:
        name: Its name, another one after each replacement.
        index: Its completion index.
        host: Its network namespace.
        process: The program that waits for its namespaces.
        conditions: Its conditions that are true.
        killed_at: When the kubelet kills it; None: nobody deletes it.
        code: Its exit code; None: it runs.
        is_killed: Its process 1 was killed; unshare does not tell.
    """

    name: str
    index: int
    host: str
    process: "subprocess.Popen[bytes]"
    log: Path
    environment: Mapping[str, str]
    conditions: frozenset[str] = frozenset()
    killed_at: float | None = None
    code: int | None = None
    is_killed: bool = False

    def first_process(self) -> psutil.Process | None:
        """The container's process 1, seen from outside."""
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.process.pid).children()
            return found[0] if found else None
        return None

    def send(self, number: signal.Signals) -> None:
        first = self.first_process()
        if first is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                first.send_signal(number)
                self.is_killed |= number == signal.SIGKILL


class Cluster:
    """The Job of some manifests, on this machine. Use it as a context: at its end nothing is left.

    ``look`` is the turn of controller and kubelets; waits call it.

    Args:
        folder: For logs, volumes, and what the pods write.
        objects: The manifests.
        script: The script and its arguments, in place of the manifest's; empty: those.
        files: Content of ConfigMaps in place of the manifests'.
        flags: Values of flags in place of the manifest's.
        grace_s: Grace period in place of the manifest's.
    """

    def __init__(
        self,
        folder: Path,
        objects: Objects,
        script: Sequence[str] = (),
        *,
        files: Mapping[str, str] | None = None,
        flags: Mapping[str, str] | None = None,
        grace_s: float | None = None,
    ) -> None:
        self.folder, self.objects = folder, objects
        self.job = job_of(objects)
        self.name = self.job["metadata"]["name"]
        self.spec = self.job["spec"]["template"]["spec"]
        (self.container,) = self.spec["containers"]
        self._script, self._files, self._flags = script, files or {}, flags or {}
        self.grace_s = grace_s or float(self.spec["terminationGracePeriodSeconds"])
        self.state = JobState(self.job)
        self.pods: list[Pod] = []
        self.durable = folder / "durable"
        self._hosts = NetworkHosts([API, *(f"p{at}" for at in range(1, MOST_PODS + 1))])
        self._names = folder / "hosts"
        self._stack = contextlib.ExitStack()
        self._api: Api | None = None

    @property
    def api(self) -> Api:
        assert self._api is not None
        return self._api

    def __enter__(self) -> Self:
        with self._stack:
            self._stack.enter_context(self._hosts)
            self._stack.callback(self._end)
            listener = _listening(self._hosts.space(API), self._hosts.addresses[API])
            self._api = self._stack.enter_context(kubernetes_api(self.folder / "api", listener))
            for path in (self.api.account, *self.api.account.iterdir()):
                path.chmod(0o755 if path.is_dir() else 0o644)
            self.api.jobs[self.name] = self.job
            self._make_durable()
            self._write_names()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def _end(self) -> None:
        for pod in self.pods:
            pod.process.kill()  # its namespaces' process 1 dies with it
        for pod in self.pods:
            pod.process.wait(30)

    # ------------------------------------------------------------------ controller and kubelets

    def look(self) -> None:
        """Note the ends of pods, and delete and create others."""
        for pod in self.living():
            code = pod.process.poll()
            if code is not None:
                pod.code = 128 + signal.SIGKILL if pod.is_killed else code
                fate = fate_of(self.job, self.container["name"], pod.code, pod.conditions)
                self.state.end(pod.index, fate)
            elif pod.killed_at is not None and time.monotonic() > pod.killed_at:
                pod.send(signal.SIGKILL)
        wanted = self.state.wanted()
        living = {pod.index: pod for pod in self.living()}
        for index in sorted(living.keys() - wanted, reverse=True):
            self.delete(living[index])
        for index in wanted:
            if index not in living:
                self._create(index)
        self._write_names()

    def living(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.code is None]

    def pod(self, index: int) -> Pod:
        """The living pod of an index."""
        (found,) = (pod for pod in self.living() if pod.index == index)
        return found

    def delete(self, pod: Pod) -> None:
        """Somebody deletes a pod: SIGTERM, and SIGKILL after the grace period."""
        if pod.killed_at is None:
            pod.killed_at = time.monotonic() + self.grace_s
            pod.send(signal.SIGTERM)

    def evict(self, pod: Pod) -> None:
        """As ``kubectl drain``, a preemption, or a node that shuts down."""
        pod.conditions |= {DISRUPTION}
        self.delete(pod)

    def lose(self, pod: Pod) -> None:
        """Its node dies, and nobody hears of it. The node's pods are removed later."""
        self._hosts.set_link(pod.host, up=False)
        pod.conditions |= {DISRUPTION}
        pod.send(signal.SIGKILL)

    # ------------------------------------------------------------------ what a test sees

    def wait_until(self, is_so: Any, what: str, deadline_s: float = DEADLINE_S) -> None:
        """Return once ``is_so()``. Raises an AssertionError with the logs' ends."""
        end = time.monotonic() + deadline_s
        while True:
            self.look()
            if is_so():
                return
            assert time.monotonic() < end, f"still not: {what}\n{self.logs()}"
            time.sleep(0.1)

    def wait_for_end(self, pod: Pod, deadline_s: float = DEADLINE_S) -> int:
        self.wait_until(lambda: pod.code is not None, f"pod {pod.name} ends", deadline_s)
        assert pod.code is not None
        return pod.code

    def execute(
        self, pod: Pod, *command: str, deadline_s: float = DEADLINE_S
    ) -> "subprocess.CompletedProcess[str]":
        """As ``kubectl exec POD -- COMMAND``."""
        first = pod.first_process()
        assert first is not None, f"pod {pod.name} has ended"
        return subprocess.run(
            ["nsenter", "--target", str(first.pid), "--all", "--root", "env", "-i", "-C",
             WORKDIR, *(f"{name}={value}" for name, value in pod.environment.items()),
             *self._as_user(), *command],
            capture_output=True, text=True, timeout=deadline_s, check=False,
        )  # fmt: skip

    def text(self, pod: Pod | None = None) -> str:
        """Logs of a pod, or of all."""
        return "\n".join(each.log.read_text() for each in self.pods if pod in (None, each))

    def logs(self) -> str:
        ends = ("\n".join(self.text(pod).splitlines()[-50:]) for pod in self.pods)
        return "\n".join(
            f"--- {pod.name} code={pod.code}\n{end}"
            for pod, end in zip(self.pods, ends, strict=True)
        )

    # ------------------------------------------------------------------ a pod's making

    def _create(self, index: int) -> None:
        assert len(self.pods) < MOST_PODS, f"too many pods\n{self.logs()}"
        number = len(self.pods) + 1
        name, host = f"{self.name}-{index}-{number:05x}", f"p{number}"
        log = self.folder / f"{name}.log"
        environment = self._environment(name, host, index)
        words = [*self.container["command"], *self._arguments(environment)]
        setup = "\n".join(self._setup(name, index, environment, words))
        command = [
            "ip", "netns", "exec", self._hosts.space(host), "unshare", "--mount", "--uts", "--ipc",
            "--pid", "--fork", "--kill-child", "sh", "-c", setup,
        ]  # fmt: skip
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self.pods.append(Pod(name, index, host, process, log, environment))

    def _arguments(self, environment: Mapping[str, str]) -> list[str]:
        """The manifest's arguments, with the script and flags of the test."""
        given: list[str] = self.container["args"]
        own = given[: _script_at(given)]
        for at, word in enumerate(own):
            flag = word.partition("=")[0]
            own[at] = f"{flag}={self._flags[flag]}" if flag in self._flags else word
        for name, value in environment.items():
            own = [word.replace(f"$({name})", value) for word in own]
        return [*own, *(self._script or given[_script_at(given) :])]

    def _environment(self, name: str, host: str, index: int) -> dict[str, str]:
        of_pod = {"metadata.name": name, "status.podIP": self._hosts.addresses[host]}
        api = self._hosts.addresses[API], self.api.url.rpartition(":")[2]
        found = {
            **OF_THE_IMAGE, "HOSTNAME": f"{self.name}-{index}",
            "JOB_COMPLETION_INDEX": str(index),
            "KUBERNETES_SERVICE_HOST": api[0], "KUBERNETES_SERVICE_PORT": api[1],
        }  # fmt: skip
        for each in self.container["env"]:
            source = each.get("valueFrom", {})
            if "fieldRef" in source:
                found[each["name"]] = of_pod[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                key = source["secretKeyRef"]
                found[each["name"]] = f"{key['name']}/{key['key']} of this test"
            else:
                found[each["name"]] = each["value"]
        return found

    def _as_user(self) -> list[str]:
        of_pod, own = self.spec["securityContext"], self.container["securityContext"]
        assert of_pod["runAsNonRoot"] and of_pod["runAsUser"] and own["readOnlyRootFilesystem"]
        assert own["capabilities"] == {"drop": ["ALL"]} and not own["allowPrivilegeEscalation"]
        return [
            "setpriv", f"--reuid={of_pod['runAsUser']}", f"--regid={of_pod['runAsGroup']}",
            f"--groups={of_pod['fsGroup']}", "--no-new-privs", "--bounding-set=-all",
            "--inh-caps=-all",
        ]  # fmt: skip

    def _setup(
        self, name: str, index: int, environment: Mapping[str, str], words: Sequence[str]
    ) -> Iterator[str]:
        """Lines of a shell that makes the container's root, and becomes its process 1."""
        root = self.folder / f"{name}.root"
        root.mkdir()
        yield "set -e"
        yield "mount --make-rprivate /"
        yield f"hostname {self.name}-{index}"
        yield f"mount -t tmpfs -o mode=755 root {root}"
        yield f"cd {root}"
        yield "mkdir -p proc dev tmp root var opt"
        yield "mount -t proc proc proc"
        for path in dict.fromkeys(("/usr", str(ROOT), sys.prefix, sys.base_prefix)):
            yield f"mkdir -p .{path} && mount --bind {path} .{path}"
            yield f"mount -o remount,bind,ro .{path}"
        yield f"mkdir -p .{WORKDIR} && mount --bind {ROOT} .{WORKDIR}"
        yield f"mount -o remount,bind,ro .{WORKDIR}"
        yield "mkdir etc && touch etc/hosts etc/passwd"
        yield "cp /etc/ld.so.cache /etc/nsswitch.conf etc"
        for link in ("bin", "sbin", "lib", "lib64"):
            yield f"ln -s usr/{link} {link}"
        for device in ("null", "zero", "full", "random", "urandom"):
            yield f"touch dev/{device} && mount --bind /dev/{device} dev/{device}"
        yield "ln -s /proc/self/fd dev/fd"
        yield f"mount --bind {self._names} ./etc/hosts"
        yield f"mount --bind {self._users()} ./etc/passwd"
        sources = {each["name"]: each for each in self.spec["volumes"]}
        for at in self.container["volumeMounts"]:
            yield f"mkdir -p .{at['mountPath']}"
            yield self._volume(sources[at["name"]], f".{at['mountPath']}")
        secrets = "./var/run/secrets/kubernetes.io/serviceaccount"
        yield f"mkdir -p {secrets} && mount --bind {self.api.account} {secrets}"
        yield f"mount -o remount,bind,ro {secrets}"
        yield "mount -o remount,ro ."
        variables = (f"{key}={value}" for key, value in environment.items())
        chain = ["chroot", ".", "env", "-i", "-C", WORKDIR, *variables, *self._as_user(), *words]
        yield f"exec {shlex.join(chain)}"

    def _volume(self, source: Mapping[str, Any], target: str) -> str:
        group = self.spec["securityContext"]["fsGroup"]
        if "emptyDir" in source:
            limit = source["emptyDir"].get("sizeLimit")
            options = f"mode=2777,gid={group}" + (f",size={bytes_of(limit)}" if limit else "")
            return f"mount -t tmpfs -o {options} {source['name']} {target}"
        if "persistentVolumeClaim" in source:
            claim = source["persistentVolumeClaim"]["claimName"]
            assert ("PersistentVolumeClaim", claim) in self.objects
            return f"mount --bind {self.durable} {target}"
        name = source["configMap"]["name"]
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
        for file, text in self.objects["ConfigMap", name]["data"].items():
            (folder / file).write_text(self._files.get(file, text))
        return f"mount --bind {folder} {target} && mount -o remount,bind,ro {target}"

    def _make_durable(self) -> None:
        """As the kubelet makes a volume for a group."""
        self.durable.mkdir()
        os.chown(self.durable, 0, self.spec["securityContext"]["fsGroup"])
        self.durable.chmod(0o2775)

    def _users(self) -> Path:
        """The image's users."""
        path = self.folder / "passwd"
        user = self.spec["securityContext"]["runAsUser"]
        path.write_text(f"root:x:0:0:root:/root:/bin/sh\nscalai:x:{user}:{user}::/tmp:/bin/sh\n")
        return path

    def _write_names(self) -> None:
        """Names of the headless Service: of the pods that there are, ready or not."""
        service = self.objects["Service", self.spec["subdomain"]]["spec"]
        assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"]
        lines = ["127.0.0.1 localhost"]
        for pod in self.living():
            host = f"{self.name}-{pod.index}"
            address = self._hosts.addresses[pod.host]
            lines.append(f"{address} {host}.{self.spec['subdomain']} {host}")
        text = "\n".join(lines) + "\n"
        if not self._names.exists() or self._names.read_text() != text:
            self._names.write_text(text)  # the same file, which is mounted


def _script_at(arguments: Sequence[str]) -> int:
    """Place of the script behind the flags of ``scalai-run``."""
    return next(at for at, word in enumerate(arguments) if not word.startswith("-"))


def _listening(space: str, address: str) -> socket.socket:
    """A listening socket in a network namespace."""
    found: list[socket.socket] = []

    def listen() -> None:
        with open(f"/run/netns/{space}") as file:
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.setns(file.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        found.append(socket.create_server((address, 0)))

    thread = threading.Thread(target=listen)  # a namespace is a thread's own
    thread.start()
    thread.join(10.0)
    return found[0]


def obstacle() -> str | None:
    """Return why there can be no pods here, or None."""
    missing = [name for name in ("setpriv", "nsenter", "chroot") if shutil.which(name) is None]
    if missing:
        return f"needs {missing[0]}"
    return NetworkHosts.obstacle()
