"""How many modules of Scalai one change of the degrees crosses, counted while it happens.

A small GPT on megatron-core (fp32, distributed optimizer) trains on two hosts of this machine, TP2
on a rank of each, and is scaled to TP1 DP2: half of every weight goes to the other host. From the
moment at which ``scale`` is asked for until every rank has made a step of the new round, all
processes of the job (coordinator, agents, workers, forks) note which functions are called
(``crossing_hook.py``). A module counts where a function of it is called; that it is imported does
not count, nor does what stands in for CUDA. Figures, each within the one before:

* ``crossed``: any function is called, for whatever reason: also clocks, logs, hooks, reports.
* ``way``: a function receives or returns what drives the change (an event or action of the two
  laws, a command, report or call of the protocol) or the state itself.
* ``state``: a function receives or returns the state itself, or a message with state in it: the
  description of tensors (a type in ``STATE`` of ``crossing_hook.py``) or their bytes (a buffer of
  16 KiB or more).
* ``handled``: the same without modules that see state in messages only, and pass it on.
* ``crossing``: the same without those that carry whatever they are given (``CARRIERS``: the wire,
  and a loop over threads): where a tensor's way is decided, and where its bytes move.

Modules that only define such values (generated methods, nothing written is called) are counted too:
``vocabulary``. ``--list`` shows every module, with its lines, the processes and the kinds of state
in it.
"""

import argparse
import json
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import crossing_hook
from report import Report
from resize import Gpt
from resize_runs import Layout, Round, Running, scale

JOB = "crossing"
HOSTS = ("a", "b")
STEPS = 3
FIGURES = ("crossed", "way", "state", "handled", "crossing")
LONG = 450
"""A file with more lines is long."""
CARRIERS = frozenset(
    f"scalai.{module}"
    for module in (
        *("core.commands", "core.fields", "core.messages", "core.reports", "core.worker_messages"),
        *("core.host.actions", "core.host.events"),
        *("runtime.calls", "runtime.codec", "runtime.framing", "runtime.at_once"),
    )
)
"""The classes of messages, what makes bytes of them, what sends the bytes, and what calls a
function with each of several items."""
STAND_INS = "scalai.patches.megatron.cpu_emulation."


@dataclass
class Crossed:
    """What was noted of one module: in which processes, and which kinds of state its functions were
    given, by themselves (``handled``) or in messages (``carried``)."""

    module: str
    processes: set[str] = field(default_factory=set)
    handled: set[str] = field(default_factory=set)
    carried: set[str] = field(default_factory=set)
    has_messages: bool = False
    is_written: bool = False

    @property
    def figures(self) -> tuple[str, ...]:
        """Return in which figures it counts."""
        has_state = bool(self.handled or self.carried)
        facts = {
            "crossed": True,
            "way": self.has_messages or has_state,
            "state": has_state,
            "handled": bool(self.handled),
            "crossing": bool(self.handled) and self.module not in CARRIERS,
        }
        return tuple(name for name, is_so in facts.items() if is_so)

    @property
    def room(self) -> str:
        """The folder that the module lies in, as the repository has it."""
        parts = self.module.split(".")[1:-1]
        inner = ("core", "store", "runtime")
        return "/".join(["plugin", *parts] if not parts or parts[0] in inner else parts)

    @property
    def lines(self) -> int:
        spec = find_spec(self.module)
        assert spec is not None and spec.origin is not None
        return len(Path(spec.origin).read_text().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="every module, on standard error")
    options = parser.parse_args()
    report = Report("crossing")
    folder = Path(tempfile.mkdtemp(prefix="scalai-crossing-"))
    try:
        change(folder, report.say)
        modules = read(folder / "notes")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name in FIGURES:
        found = [one for one in modules if name in one.figures]
        report.add(name, len(found))
        report.add(f"{name}_by_process", count(one.processes for one in found))
        report.add(f"{name}_by_room", count([one.room] for one in found))
        report.add(f"{name}_lines", sum(one.lines for one in found))
        report.add(f"{name}_long", {one.module: one.lines for one in found if one.lines > LONG})
        report.add(f"{name}_vocabulary", [one.module for one in found if not one.is_written])
    if options.list:
        for one in sorted(modules, key=lambda one: (one.room, one.module)):
            report.say(line(one))
    report.finish()


def line(one: Crossed) -> str:
    """Say what was noted of a module, in one line."""
    kinds = " ".join(sorted(name.rpartition(".")[2] for name in one.handled or one.carried))
    what = one.figures[-1] + ("" if one.is_written else " (vocabulary)")
    return f"{what:20} {one.lines:4} {one.module:37} {','.join(sorted(one.processes)):24} {kinds}"


def count(groups: Iterable[Iterable[str]]) -> dict[str, int]:
    """Return how often each name occurs."""
    found: dict[str, int] = defaultdict(int)
    for names in groups:
        for name in names:
            found[name] += 1
    return dict(sorted(found.items()))


def change(folder: Path, say: Callable[[str], None]) -> None:
    """Run the job through one change; what its processes note is in ``folder/notes``."""
    notes, marks = folder / "notes", folder / "marks"
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").symlink_to(crossing_hook.__file__)
    for made in (notes, marks, *(folder / host for host in HOSTS)):
        made.mkdir()
    turn(notes, on=False)
    paths = [str(folder / "hook"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ[crossing_hook.VARIABLE] = str(notes)
    job = Gpt(hidden=128, layers=2, steps=STEPS)
    old, new = job.layouts(2)
    first, second = (Running(command(folder, job, host), folder / host) for host in HOSTS)
    with first, second:
        first.wait_for(made_steps(marks, 0, old, STEPS), "steps")
        for host in (first, second):
            host.wait_for(partial(is_warm, host), "warm fork server")
        turn(notes, on=True)
        scale(folder / "store" / JOB, new)
        first.wait_for(made_steps(marks, 1, new, 0), "steps of the new round", every_s=0.01)
        turn(notes, on=False)
        say(f"{old.degrees} -> {new.degrees}")
        (marks / "last_step").write_text(str(Round(marks, 1, new.ranks).newest_step() + 4))


def is_warm(host: Running) -> bool:
    """Whether the next workers of a host are forked, and import nothing."""
    return "event=warm" in host.log()


def command(folder: Path, job: Gpt, host: str) -> list[str]:
    """Return the agent of one host, to be run with ``python -m``."""
    launch, script = job.elastic(folder)
    hosts = ["--nnodes", str(len(HOSTS)), "--host-id", host, "--coordinator", "127.0.0.1:0"]
    flags = ["--job", JOB, *hosts, "--nproc-per-node", "1", *launch]
    flags += ["--store-dir", str(folder / "store"), "--report-dir", str(folder / "reports")]
    marks = ["--marks", str(folder / "marks")]
    return ["scalai.launch.run", *flags, str(job.script), *job.flags(), *script, *marks]


def made_steps(marks: Path, number: int, layout: Layout, steps: int) -> Callable[[], bool]:
    """Return whether every rank of a round has made more than so many steps."""
    return lambda: Round(marks, number, layout.ranks).steps() > steps


def turn(notes: Path, *, on: bool) -> None:
    """Have all processes take notes, or stop it."""
    path = notes / crossing_hook.SWITCH
    path.touch()
    with path.open("r+b") as file:  # in place: they have it mapped
        file.write(bytes([on]))


def read(notes: Path) -> list[Crossed]:
    """Return what all processes noted, by module."""
    found: dict[str, Crossed] = {}
    for path in notes.glob("*.jsonl"):
        head, *lines = map(json.loads, path.read_text().splitlines())
        process = kind_of(head)
        for entry in lines:
            one = found.setdefault(entry["module"], Crossed(entry["module"]))
            one.processes.add(process)
            one.is_written |= entry["is_written"]
            one.has_messages |= entry["kind"] == "message"
            kind, _, name = entry["kind"].partition(" ")
            if kind in ("state", "carried"):
                (one.handled if kind == "state" else one.carried).add(name)
    return [one for name, one in sorted(found.items()) if not name.startswith(STAND_INS)]


def kind_of(head: Mapping[str, Any]) -> str:
    """Say what a process of the job is."""
    words = head["argv"]
    if "scalai.launch.coordinator.process" in words:
        return "coordinator"
    if "scalai.launch.coordinator.rendezvous_store" in words:
        return "rendezvous store"
    if "scalai.launch.run" in words:
        return "agent"
    is_worker = "scalai.patches.worker" in words or head["is_fork"]
    return "worker" if is_worker else "fork server"


if __name__ == "__main__":
    main()
