"""A real Slurm on this machine: munged, slurmctld, and one slurmd a host, each in a network
namespace of its own with a /dev/shm of its own (``NetworkHosts``)."""

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Self

from support.network_namespaces import NetworkHosts

CONTROLLER = "ctl"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
DEADLINE_S = 150.0
DOWN_S = 10
"""``SlurmdTimeout``: seconds until a dead node is DOWN."""

_CONFIGURATION = """\
ClusterName=scalai
SlurmctldHost={controller}({address})
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
SlurmdParameters=config_overrides
SlurmdTimeout={down_s}
ReturnToService=2
KillWait=30
MailProg=/bin/true
{more}
"""


def obstacle() -> str | None:
    """Return why there can be no cluster here, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)} here (Debian: slurm-wlm, munge)"
    return NetworkHosts.obstacle()


class SlurmCluster:
    """Nodes ``n1``, ``n2``, ... of two CPUs each. Use it as a context; at its end all is gone.

    Args:
        folder: For configuration, state and logs.
        nodes: How many.
        more: More lines of ``slurm.conf``.
    """

    def __init__(self, folder: Path, nodes: int = 3, more: Sequence[str] = ()) -> None:
        self.folder = folder
        self.nodes = [f"n{at}" for at in range(1, nodes + 1)]
        self._hosts = NetworkHosts((CONTROLLER, *self.nodes))
        self._more = more
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._log: IO[bytes] | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.callback(self._end)
            self._configure()
            stack.enter_context(self._hosts)
            self._start_munge()
            self._start(CONTROLLER, "slurmctld", "-D")
            for name in self.nodes:
                self._start(name, "slurmd", "-D", "-N", name)
            self.wait_until(
                lambda: {self.node_state(n) for n in self.nodes} == {"IDLE"}, "all nodes are up"
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _configure(self) -> None:
        addresses = self._hosts.addresses
        (self.folder / "munge").mkdir(parents=True)
        for name in ("state", *(f"spool.{node}" for node in self.nodes)):
            (self.folder / name).mkdir()
        nodes = [
            f"NodeName={name} NodeAddr={addresses[name]} CPUs=2 RealMemory=4000 Gres=gpu:8"
            for name in self.nodes
        ]
        text = _CONFIGURATION.format(
            controller=CONTROLLER, address=addresses[CONTROLLER], folder=self.folder,
            down_s=DOWN_S, more="\n".join(
                [*self._more, *nodes, "PartitionName=all Nodes=ALL Default=YES OverSubscribe=NO"]
            ),
        )  # fmt: skip
        (self.folder / "slurm.conf").write_text(text)
        for at in range(8):
            # As /dev/null: to Slurm a GPU is a device.
            os.mknod(self.folder / f"gpu{at}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")
        # No plugin here uses it; without a line slurmd looks for mounts that a namespace lacks.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        names = [f"{address} {name}" for name, address in addresses.items()]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))

    def _start_munge(self) -> None:
        home = self.folder / "munge"
        (home / "key").write_bytes(os.urandom(128))
        (home / "key").chmod(0o400)
        files = [
            f"--{name}={home / name}" for name in ("socket", "pid-file", "log-file", "seed-file")
        ]
        command = ["munged", "--foreground", "--force", f"--key-file={home / 'key'}", *files]
        self._daemons["munged"] = self._spawn(command)
        self.wait_until((home / "socket").exists, "munged listens")

    def _start(self, name: str, *command: str) -> None:
        self._daemons[name] = self._spawn(self._on(name, command))

    def _spawn(self, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        with (self.folder / "daemons.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)

    def _on(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the command on a host that knows the others by name."""
        own_names = (
            f'mount --bind {self.folder / "hosts"} /etc/hosts && hostname {name} && exec "$@"'
        )
        return self._hosts.on(name, ["unshare", "--uts", "sh", "-c", own_names, "sh", *command])

    def _end(self) -> None:
        for daemon in self._daemons.values():
            daemon.kill()
        for name in (CONTROLLER, *self.nodes):
            self._hosts.kill(name)
        for daemon in self._daemons.values():
            daemon.wait(30)

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of every command about the cluster."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        return {**inherited, "SLURM_CONF": str(self.folder / "slurm.conf")}

    # ------------------------------------------------------------------ what to do

    def run(self, *command: str, more: Mapping[str, str] | None = None, check: bool = True) -> str:
        """Run a command on the controller's host. Returns what it prints."""
        done = subprocess.run(
            self._on(CONTROLLER, command), capture_output=True, text=True, check=False,
            timeout=60, env={**self.environment, **(more or {})},
        )  # fmt: skip
        said = f"{command}: {done.returncode} {done.stdout}{done.stderr}"
        assert not (check and done.returncode), said
        return done.stdout

    @contextlib.contextmanager
    def beside(self, *command: str) -> Iterator[None]:
        """A command runs on the controller's host meanwhile, and writes into a log."""
        with (self.folder / "beside.log").open("wb") as log:
            process = subprocess.Popen(
                self._on(CONTROLLER, command), stdout=log, stderr=log, env=self.environment
            )
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)

    def submit(self, script: Path, *flags: str, more: Mapping[str, str] | None = None) -> str:
        """Submit a batch script. Returns the job's id."""
        return self.run("sbatch", "--parsable", *flags, str(script), more=more).strip()

    def kill_node(self, name: str) -> None:
        """A node dies: slurmd, its step daemons and all that they have started, at once."""
        self._hosts.send(name, signal.SIGKILL)
        self._daemons.pop(name).wait(30)

    # ------------------------------------------------------------------ what is there

    def field(self, kind: str, name: str, field: str) -> str:
        """Return one field of what ``scontrol show KIND NAME`` prints of it; empty: none."""
        printed = self.run("scontrol", "--oneliner", "show", kind, name, check=False)
        found = [w.partition("=")[2] for w in printed.split() if w.startswith(f"{field}=")]
        return found[0] if found else ""

    def node_state(self, name: str) -> str:
        return self.field("node", name, "State")

    def job_state(self, job: str) -> str:
        return self.field("job", job, "JobState")

    def wait_until(
        self, is_so: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S
    ) -> None:
        """Return once ``is_so()``. Raises with the logs after the deadline."""
        end = time.monotonic() + deadline_s
        while not is_so():
            assert time.monotonic() < end, f"still not: {what}\n{self.logs()}"
            time.sleep(0.3)

    def logs(self) -> str:
        """Return the ends of all logs: what a failing test prints."""
        texts = []
        for path in sorted(self.folder.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()
            texts.append(f"--- {path.name}\n" + "\n".join(lines[-60:]))
        return "\n".join(texts)
