"""The injection of each kind of fault, and obstacles to it."""

import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scalai.launch.chaos import disk_faults as damage
from scalai.launch.chaos import job_processes as processes
from scalai.launch.chaos.kinds import KINDS, SIGNALS, TRIGGERS, Fault, Kind, Target
from scalai.launch.chaos.scene import Injected, Scene
from scalai.runtime.failpoints import VARIABLE

COMMAND_S = 20.0
ENOUGH = 200
"""Delayed packets as a sign of a slow link."""
RATE = ("rate", "256kbit", "burst", "4kb", "latency", "400ms")


def run_tool(*words: str) -> str | None:
    """Run a command. Returns its output, None if it fails or does not exist."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _inside(scene: Scene, *words: str) -> str | None:
    return run_tool("nsenter", "-t", str(scene.agent()), "-n", *words)


def no_link(scene: Scene) -> str:
    """Return the reason against striking the host's link, or nothing."""
    agent = processes.namespace(scene.agent(), "net")
    if agent in ("", processes.namespace("self", "net")):
        return f"host {scene.host} shares the network of this command, which is never cut"
    if agent == processes.namespace(1, "net"):
        return f"host {scene.host} is in the network of the machine itself"
    if _device(scene) is None:
        return "needs root, and nsenter, ip, ss and tc of iproute2"
    return ""


def _device(scene: Scene) -> str | None:
    found = _inside(scene, "ip", "-j", "link")
    if found is None:
        return None
    return next((each["ifname"] for each in json.loads(found) if each["ifname"] != "lo"), None)


def drop_link(scene: Scene) -> Injected:
    """Pull the wire out: packets are lost silently."""
    device, pid = _device(scene), str(scene.agent())
    assert device is not None
    enter = ("nsenter", "-t", pid, "-n")
    scene.undo.callback(run_tool, *enter, "ip", "link", "set", device, "up")
    run_tool(*enter, "ip", "link", "set", device, "down")
    return Injected()


def no_pair(scene: Scene) -> str:
    """Return the reason against cutting a link between two hosts with the coordinator still in
    reach."""
    missing = "needs a second host with a network of its own, beside that of this command"
    return no_link(scene) or ("" if _other(scene) is not None else missing)


def _other(scene: Scene) -> int | None:
    """Return the agent of another host with a network of its own."""
    taken = {processes.namespace(pid, "net") for pid in ("self", 1, scene.agent())}
    agents = processes.agents(scene.folder)
    return next(
        (agents[h] for h in sorted(agents) if processes.namespace(agents[h], "net") not in taken),
        None,
    )


def _address(pid: int) -> tuple[str, str]:
    """Return the device of a host's link and its address."""
    found = run_tool("nsenter", "-t", str(pid), "-n", "ip", "-j", "-4", "addr") or "[]"
    device = next(each for each in json.loads(found) if each["ifname"] != "lo")
    return device["ifname"], device["addr_info"][0]["local"]


def cut_pair(scene: Scene) -> Injected:
    """Redirect two hosts' packets for each other to an unused Ethernet address."""
    one, other = scene.agent(), _other(scene)
    assert other is not None
    for near, far in ((one, other), (other, one)):
        (device, _), (_, address) = _address(near), _address(far)
        words = ("nsenter", "-t", str(near), "-n", "ip", "neigh")
        scene.undo.callback(run_tool, *words, "del", address, "dev", device)
        run_tool(*words, "replace", address, "lladdr", "02:00:00:00:00:99", "nud", "permanent",
            "dev", device)  # fmt: skip
    return Injected()


def reset_link(scene: Scene) -> Injected:
    """Reset every TCP connection of the host."""
    found = _inside(scene, "ss", "-K", "-t", "-n") or ""
    count = sum(line.startswith("ESTAB") for line in found.splitlines())
    return Injected(lambda: f"{count} connections were reset" if count else "")


def slow_link(scene: Scene) -> Injected:
    """Limit the host's sending rate by a token bucket."""
    device = _device(scene)
    assert device is not None
    enter = ("nsenter", "-t", str(scene.agent()), "-n")
    scene.undo.callback(run_tool, *enter, "tc", "qdisc", "del", "dev", device, "root")
    run_tool(*enter, "tc", "qdisc", "add", "dev", device, "root", "tbf", *RATE)

    def seen() -> str:
        found = json.loads(
            run_tool(*enter, "tc", "-j", "-s", "qdisc", "show", "dev", device) or "[]"
        )
        held = sum(each.get("overlimits", 0) for each in found if each.get("kind") == "tbf")
        return f"{held} packets were kept waiting" if held >= ENOUGH else ""

    return Injected(seen)


Inject = Callable[[Scene], Injected]
Obstacle = Callable[[Scene], str]
CLOCK_S = {"clock-forward": 86_400, "clock-back": None}
COORDINATOR_SIGNALS = {
    "stop-coordinator": signal.SIGSTOP, "term-coordinator": signal.SIGTERM,
    "int-coordinator": signal.SIGINT, "kill-coordinator": signal.SIGKILL,
}  # fmt: skip
NOTICE_S = "60"
OUTLIVED_STEPS = 5
ENDS_S = 30.0
"""Seconds for a killed process to end."""


@dataclass(frozen=True, slots=True)
class Injector:
    """``inject`` a kind; ``obstacle`` returns the reason against it here, or nothing."""

    inject: Inject
    obstacle: Obstacle = lambda scene: ""


def injector_of(fault: Fault) -> Injector:
    """Return the injector of a fault."""
    if fault.at.station:
        return Injector(_arm, _no_failpoint)
    return TABLE[fault.kind.name]


# ------------------------------------------------------------------ one process


def _signal(scene: Scene) -> Injected:
    """Send a worker or an agent the kind's signal; a stopped one continues at the end."""
    kind = scene.fault.kind
    pid = scene.worker() if kind.target is Target.WORKER else scene.agent()
    number = signal.Signals[SIGNALS[kind.name]]
    if number is signal.SIGSTOP:
        scene.undo.callback(processes.send, pid, signal.SIGCONT)
    processes.send(pid, number)
    return Injected()


def _no_usr1(scene: Scene) -> str:
    given = processes.flag(scene.agent(), "--preemption") or "signal"
    if "signal" not in [each.strip() for each in given.split(",")]:
        return f"the agent of host {scene.host} listens to --preemption {given}, not to signals"
    return ""


def _failpoint(scene: Scene) -> Path | None:
    given = processes.environment(scene.agent()).get(VARIABLE)
    return None if given is None else Path(given)


def _no_failpoint(scene: Scene) -> str:
    if _failpoint(scene) is None:
        return f"start the agents with {VARIABLE}=FILE in their environment"
    return ""


def _arm(scene: Scene) -> Injected:
    """Have a process be struck where it gets to a station, and the job go by there."""
    fault, path = scene.fault, _failpoint(scene)
    assert path is not None
    reached = Path(f"{path}.reached")
    reached.unlink(missing_ok=True)
    is_worker = fault.kind.target is Target.WORKER
    trigger = TRIGGERS[fault.at.station]
    # Of the next round there is always a rank 0.
    name = ("0" if trigger else str(scene.rank())) if is_worker else scene.host
    aside = path.with_name(f"{path.name}.chaos")
    aside.write_text(f"{fault.at.station}:{name}:{SIGNALS[fault.kind.name]}")
    aside.rename(path)
    scene.undo.callback(path.unlink, missing_ok=True)
    if SIGNALS[fault.kind.name] == "SIGSTOP":
        scene.undo.callback(_let_go_on, scene)

    def lead_there() -> None:
        if trigger == "kill-worker":
            processes.send(_another_worker(scene), signal.SIGKILL)
        else:
            processes.send(scene.agent(), signal.SIGTERM)

    if trigger:
        lead_there()

    def struck_at() -> float | None:
        return reached.stat().st_ctime if reached.exists() else None

    return Injected(
        lambda: f"station {fault.at.station}" if reached.exists() else "",
        struck_at,
        lead_there if trigger == "kill-worker" else None,
    )


def _another_worker(scene: Scene) -> int:
    """Return a worker that is neither the one that is struck behind it, rank 0, nor of its host,
    where there is one: at some stations are only those that outlive it."""
    first = next(iter((scene.watch.status or {}).get("workers", {})), scene.host)
    spared = first if scene.fault.kind.target is Target.WORKER else scene.host
    for host in sorted(processes.agents(scene.folder)):
        found = processes.workers(scene.folder, host)
        if host != spared and found:
            return found[0]
    return scene.worker()


def _let_go_on(scene: Scene) -> None:
    for host in processes.agents(scene.folder):
        for pid in processes.family(scene.folder, host):
            processes.send(pid, signal.SIGCONT)


def _outlived(scene: Scene, pid: int, number: signal.Signals) -> Injected:
    """Send a process a signal that it is to outlive, and see that it does while the job trains."""
    since = scene.watch.step or 0
    processes.send(pid, number)

    def seen() -> str:
        if processes.state(pid) in "ZX" or (scene.watch.step or 0) < since + OUTLIVED_STEPS:
            return ""
        return f"process {pid} lives on, {OUTLIVED_STEPS} steps later"

    return Injected(seen)


def _signal_in_vain(scene: Scene) -> Injected:
    return _outlived(scene, scene.worker(), signal.Signals[SIGNALS[scene.fault.kind.name]])


# ------------------------------------------------------------------ hosts


def _kill_agents(scene: Scene) -> Injected:
    for host in sorted(processes.agents(scene.folder)):
        processes.send(scene.agent(host), signal.SIGKILL)
    return Injected()


def _kill_hosts(scene: Scene) -> Injected:
    """Kill all processes of hosts at once, and take their memory away."""
    damage.kill_hosts(scene, scene.fault.hosts)
    return Injected()


def _stop_host(scene: Scene) -> Injected:
    found = processes.family(scene.folder, scene.host)
    scene.agent()
    for pid in found:
        scene.undo.callback(processes.send, pid, signal.SIGCONT)
    for pid in found:
        processes.send(pid, signal.SIGSTOP)
    return Injected()


def _duplicate(scene: Scene) -> Injected:
    log = scene.out / f"duplicate-{scene.host}.log"
    return _refused(scene, scene.commands[scene.host], log, "is in use by", "second one")


def _refused(
    scene: Scene, command: processes.AgentCommand, log: Path, reason: str, what: str
) -> Injected:
    """Start a command beside the job, and await its refusal."""
    log.unlink(missing_ok=True)
    second = command.start(output=log)
    scene.undo.callback(second.wait, ENDS_S)
    scene.undo.callback(second.kill)

    def seen() -> str:
        refused = second.poll() not in (None, 0) and reason in log.read_text()
        return f"the {what} is refused: exit code {second.returncode}" if refused else ""

    return Injected(seen)


def _no_second_run(scene: Scene) -> str:
    if processes.flag(scene.agent(), "--coordinator-lease") not in (None, "none"):
        return "the job has a --coordinator-lease, by which a second one joins it"
    return damage.no_owner(scene)


def _second_run(scene: Scene) -> Injected:
    """Start the job's command as another machine would: with a store and a coordinator of its
    own."""
    log, store = scene.out / "second-run.log", scene.folder.parent.with_name(".scalai-chaos-second")
    command = scene.commands[scene.host].with_flag("--store-dir", str(store))
    if processes.flag(scene.agent(), "--coordinator") is not None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            command = command.with_flag("--coordinator", f"127.0.0.1:{free.getsockname()[1]}")
    scene.undo.callback(shutil.rmtree, store, ignore_errors=True)
    return _refused(scene, command, log, "is in use by run", "second run")


def _notice_file(scene: Scene) -> Path | None:
    given = processes.flag(scene.agent(), "--preemption") or ""
    files = [each.strip()[5:] for each in given.split(",") if each.strip().startswith("file:")]
    return Path(files[0]) if files else None


def _notice(scene: Scene) -> Injected:
    path = _notice_file(scene)
    assert path is not None
    scene.undo.callback(path.unlink, missing_ok=True)
    path.write_text(NOTICE_S)
    return Injected()


def _no_notice(scene: Scene) -> str:
    if _notice_file(scene) is None:
        return f"start the agent of host {scene.host} with --preemption file:PATH"
    return ""


def _health_file(scene: Scene) -> Path | None:
    words = (processes.flag(scene.agent(), "--health-check") or "").split()
    return Path(words[2]) if words[:2] == ["test", "-e"] and len(words) == 3 else None


def _fail_health(scene: Scene) -> Injected:
    path = _health_file(scene)
    assert path is not None
    aside = path.with_name(f".{path.name}.chaos")
    worker = scene.worker()
    path.rename(aside)
    scene.undo.callback(aside.rename, path)
    processes.send(worker, signal.SIGKILL)
    return Injected()


def _no_health(scene: Scene) -> str:
    path = _health_file(scene)
    if path is None or not path.exists():
        return f"start the agent of host {scene.host} with --health-check 'test -e PATH'"
    return ""


def _clock_words(kind: Kind) -> tuple[str, ...]:
    offset = CLOCK_S[kind.name]
    if offset is None:
        offset = 1 - int(time.clock_gettime(time.CLOCK_MONOTONIC))
    return "unshare", "--time", "--fork", "--kill-child", "--monotonic", str(offset)


def _shift_clock(scene: Scene) -> Injected:
    """The machine's own clocks stay: the agent comes back in a time namespace."""
    pid = scene.agent()
    scene.before[scene.host] = _clock_words(scene.fault.kind)
    own = processes.namespace("self", "time")
    processes.send(pid, signal.SIGKILL)

    def seen() -> str:
        new = processes.agents(scene.folder).get(scene.host)
        other = "" if new is None else processes.namespace(new, "time")
        return "it came back with another clock" if other not in ("", own) else ""

    return Injected(seen)


def _no_clock(scene: Scene) -> str:
    if not hasattr(time, "CLOCK_MONOTONIC") or not Path("/proc/self/ns/time").exists():
        return "the kernel has no time namespaces"
    tried = run_tool("unshare", "--time", "--fork", "--monotonic", "1", "true")
    return "" if tried is not None else "this user may make no time namespace"


# ------------------------------------------------------------------ the coordinator


def _signal_coordinator(scene: Scene) -> Injected:
    pid = processes.coordinator(scene.folder)
    if pid is None:
        raise ProcessLookupError("the coordinator does not run here")
    number = COORDINATOR_SIGNALS[scene.fault.kind.name]
    if number in (signal.SIGTERM, signal.SIGINT):
        return _outlived(scene, pid, number)
    if number is signal.SIGSTOP:
        scene.undo.callback(processes.send, pid, signal.SIGCONT)
    processes.send(pid, number)
    return Injected()


def _no_coordinator(scene: Scene) -> str:
    return "" if processes.coordinator(scene.folder) is not None else "it does not run here"


_FAILPOINT = {name: Injector(_arm, _no_failpoint) for name, kind in KINDS.items() if kind.station}
_BY_SIGNAL = {name: Injector(_signal) for name in SIGNALS if name not in _FAILPOINT}
TABLE: dict[str, Injector] = {
    **_BY_SIGNAL,
    **_FAILPOINT,
    "term-worker": Injector(_signal_in_vain),
    "int-worker": Injector(_signal_in_vain),
    "usr1-agent": Injector(_signal, _no_usr1),
    "kill-agents": Injector(_kill_agents),
    "kill-host": Injector(_kill_hosts),
    "kill-hosts": Injector(_kill_hosts),
    "kill-more-hosts": Injector(_kill_hosts, damage.no_disk_state),
    "stop-host": Injector(_stop_host),
    "duplicate-host": Injector(_duplicate),
    "notice": Injector(_notice, _no_notice),
    "fail-health": Injector(_fail_health, _no_health),
    "full-memory": Injector(damage.fill_memory, damage.no_small_memory),
    "corrupt-store": Injector(damage.corrupt_store, damage.no_workers_here),
    "truncate-store": Injector(damage.truncate_store, damage.no_workers_here),
    "full-disk": Injector(damage.fill_disk, damage.no_small_disk),
    "refuse-disk": Injector(damage.refuse_disk, damage.no_disk),
    "torn-lease": Injector(damage.tear_lease, damage.no_owner),
    "second-run": Injector(_second_run, _no_second_run),
    "damage-disk": Injector(damage.damage_disk, damage.no_older_disk_state),
    "clock-forward": Injector(_shift_clock, _no_clock),
    "clock-back": Injector(_shift_clock, _no_clock),
    "drop-link": Injector(drop_link, no_link),
    "cut-pair": Injector(cut_pair, no_pair),
    "reset-link": Injector(reset_link, no_link),
    "slow-link": Injector(slow_link, no_link),
    **dict.fromkeys(COORDINATOR_SIGNALS, Injector(_signal_coordinator, _no_coordinator)),
}
"""Every kind, and how it is injected. A test compares it with the kinds that there are."""


def describe() -> str:
    """Return what ``--list`` prints: each kind, what it is, what the job does, what it may cost."""
    return "\n".join(
        f"{kind.name:18}{kind.about}; {kind.effect.value}; steps lost: {kind.loss.value}"
        for kind in KINDS.values()
    )
