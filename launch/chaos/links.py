"""Faults of a host's link, where the host is a network namespace of its own on this machine. The
machine's own network is never touched."""

import json
import subprocess

from scalai.launch.chaos import processes
from scalai.launch.chaos.scene import Injected, Scene

COMMAND_S = 20.0
ENOUGH = 200
"""So many packets have waited, and a slow link has been seen to be one."""
RATE = ("rate", "256kbit", "burst", "4kb", "latency", "400ms")


def run(*words: str) -> str | None:
    """Run a command. Returns what it prints, None where it fails or is not there."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _inside(scene: Scene, *words: str) -> str | None:
    return run("nsenter", "-t", str(scene.agent()), "-n", *words)


def no_link(scene: Scene) -> str:
    """Say why the host has no link that could be struck."""
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


def drop(scene: Scene) -> Injected:
    """Pull the wire out: what is sent is lost without a word."""
    device, pid = _device(scene), str(scene.agent())
    assert device is not None
    enter = ("nsenter", "-t", pid, "-n")
    scene.undo.callback(run, *enter, "ip", "link", "set", device, "up")
    run(*enter, "ip", "link", "set", device, "down")
    return Injected()


def no_pair(scene: Scene) -> str:
    """Say why no link between two hosts could be cut that leaves the coordinator heard."""
    missing = "needs a second host with a network of its own, beside that of this command"
    return no_link(scene) or ("" if _other(scene) is not None else missing)


def _other(scene: Scene) -> int | None:
    """Return the agent of another host that has a network of its own."""
    taken = {processes.namespace(pid, "net") for pid in ("self", 1, scene.agent())}
    agents = processes.agents(scene.folder)
    return next(
        (agents[h] for h in sorted(agents) if processes.namespace(agents[h], "net") not in taken),
        None,
    )


def _address(pid: int) -> tuple[str, str]:
    """Return the device of a host's link and its address."""
    found = run("nsenter", "-t", str(pid), "-n", "ip", "-j", "-4", "addr") or "[]"
    device = next(each for each in json.loads(found) if each["ifname"] != "lo")
    return device["ifname"], device["addr_info"][0]["local"]


def cut_pair(scene: Scene) -> Injected:
    """Have two hosts send each other to an address of Ethernet that nobody has."""
    one, other = scene.agent(), _other(scene)
    assert other is not None
    for near, far in ((one, other), (other, one)):
        (device, _), (_, address) = _address(near), _address(far)
        words = ("nsenter", "-t", str(near), "-n", "ip", "neigh")
        scene.undo.callback(run, *words, "del", address, "dev", device)
        run(*words, "replace", address, "lladdr", "02:00:00:00:00:99", "nud", "permanent",
            "dev", device)  # fmt: skip
    return Injected()


def reset(scene: Scene) -> Injected:
    """Reset every TCP connection of the host."""
    found = _inside(scene, "ss", "-K", "-t", "-n") or ""
    count = sum(line.startswith("ESTAB") for line in found.splitlines())
    return Injected(lambda: f"{count} connections were reset" if count else "")


def slow(scene: Scene) -> Injected:
    """Let little pass, by a token bucket on what the host sends."""
    device = _device(scene)
    assert device is not None
    enter = ("nsenter", "-t", str(scene.agent()), "-n")
    scene.undo.callback(run, *enter, "tc", "qdisc", "del", "dev", device, "root")
    run(*enter, "tc", "qdisc", "add", "dev", device, "root", "tbf", *RATE)

    def seen() -> str:
        found = json.loads(run(*enter, "tc", "-j", "-s", "qdisc", "show", "dev", device) or "[]")
        held = sum(each.get("overlimits", 0) for each in found if each.get("kind") == "tbf")
        return f"{held} packets were kept waiting" if held >= ENOUGH else ""

    return Injected(seen)
