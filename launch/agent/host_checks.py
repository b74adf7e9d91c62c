"""Fitness of this host for workers: its devices, its health check, the kernel's OOM kills."""

import logging
import re
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from scalai.core.job.endings import OUT_OF_HOST_MEMORY
from scalai.launch.command_runner import LINE, CommandRunner, NoAnswerError, last_line
from scalai.launch.config.elastic_config import ProbeConfig

NAME_S = 10.0
"""Seconds for the driver to name a device, before a job starts."""
FREE_S = 1.0
"""Seconds for the driver to tell the free memory of devices before its last answer counts."""
OLD_S = 60.0
"""Seconds for which an answer counts: other workers may have taken the memory since."""
HELD_S, HELD_LOOK_S = 30.0, 1.0
"""Most seconds of waiting for the memory of killed workers, and between two looks."""
SLACK_MIB = 512
"""Memory of a device that other processes may begin to use meanwhile."""

log = logging.getLogger(__name__)


# ------------------------------------------------------------------ devices

_NAMED = re.compile(r"^[ \t]*\d+[ \t]*,[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)


def _query(commands: CommandRunner, fields: Sequence[str]) -> tuple[int, str]:
    """Return the answer of ``nvidia-smi`` on each device: CSV without a header or units.

    Raises:
        NoAnswerError: As ``run``.
    """
    asked = f"--query-gpu={','.join(fields)}"
    return commands.run(["nvidia-smi", asked, "--format=csv,noheader,nounits"])


def driver_device(commands: CommandRunner | None = None) -> str:
    """Return the driver's name of this host's first device. Blocks for 15 s at most.

    Raises:
        NoAnswerError: It names none.
    """
    code, output = _query(commands or CommandRunner(NAME_S), ["index", "name"])
    named = _NAMED.search(output)  # behind warnings of the linker
    if code or named is None:
        text = output.strip()[-LINE:]
        raise NoAnswerError(f"nvidia-smi names no device (exit code {code}): {text!r}")
    return named[1]


class DeviceMemory:
    """Waits until the driver has taken back the device memory of killed workers: children of theirs
    or a slow driver may hold it for a while, and the next model would not fit.

    Make it before the first worker: more than what is used then is theirs.

    Args:
        visible: Indices or UUIDs of the job's devices (CUDA_VISIBLE_DEVICES); None: all.
        commands: Runs ``nvidia-smi``; None: with a deadline.
    """

    def __init__(
        self, visible: Sequence[str] | None = None, commands: CommandRunner | None = None
    ) -> None:
        self._visible, self._commands = visible, commands or CommandRunner(NAME_S)
        self._before = self._used()
        self._asking, self._free, self._heard_at = CommandRunner(NAME_S), list[int](), 0.0
        self._is_answered = threading.Event()
        self._is_answered.set()

    def wait(self, is_over: Callable[[], bool], held_s: float = HELD_S) -> None:
        """Return once the devices are as empty as before the workers, after ``held_s`` seconds at
        most, or ``is_over``. What is held then is another's, and counts no more."""
        began, has_said = time.monotonic(), False
        while self._before and not is_over():
            used = self._used()
            held = {
                uuid: size - self._before.get(uuid, size)
                for uuid, size in used.items()
                if size - self._before.get(uuid, size) > SLACK_MIB
            }
            since_s = time.monotonic() - began
            if not held:
                return
            text = ", ".join(f"{uuid} {size} MiB" for uuid, size in held.items())
            if since_s > held_s:
                log.warning("event=device_memory held=%r: the next workers start beside it", text)
                self._before = used
                return
            if not has_said:
                has_said = True
                log.info(
                    "event=device_memory held=%r: waiting for it, %.0f s at most", text, held_s
                )
            time.sleep(HELD_LOOK_S)

    def free(self, submit: Callable[[Callable[[], None]], object]) -> list[int]:
        """Return the free memory of each device, in bytes, by the driver's last answer; empty: it
        has given none for ``OLD_S``. Blocks for ``FREE_S`` at most; a later answer counts at the
        next call.

        Args:
            submit: Runs the question, for up to 15 s, in another thread.
        """
        if self._is_answered.is_set():
            self._is_answered.clear()
            submit(self._ask_free)
        is_told = self._is_answered.wait(FREE_S)
        if time.monotonic() - self._heard_at > OLD_S:
            self._free = []
        if not is_told:
            log.warning(
                "event=device_memory: nvidia-smi is silent, so what it said last counts: %s",
                ", ".join(f"{size >> 20} MiB free" for size in self._free) or "nothing",
            )
        return self._free

    def _ask_free(self) -> None:
        try:
            found = self._read("memory.free", self._asking)
            if found:
                self._free = [size << 20 for size in found.values()]
                self._heard_at = time.monotonic()
        finally:
            self._is_answered.set()

    def _used(self) -> dict[str, int]:
        """Return the used memory of each device in MiB; empty: the driver does not say it."""
        return self._read("memory.used", self._commands)

    def _read(self, field: str, commands: CommandRunner) -> dict[str, int]:
        try:
            _, output = _query(commands, ("index", "uuid", field))
        except NoAnswerError:
            return {}
        lines = [[value.strip() for value in line.split(",")] for line in output.splitlines()]
        return {
            uuid: int(size)
            for index, uuid, size in (line for line in lines if len(line) == 3)
            if size.isdecimal()
            and (self._visible is None or any(_names(n, index, uuid) for n in self._visible))
        }


_FIELDS = ("index", "uuid", "temperature.gpu", "remapped_rows.failure", "gpu_recovery_action")
_FEWER_FIELDS = _FIELDS[:3]
"""Fields of drivers without row remapping or recovery action."""


class DeviceProbe:
    """Asks for the number of working devices of this host.

    A device does not count if it fell off the bus, gives no readings, has run out of spare rows or
    waits for a reset. Past uncorrected errors are ignored: their count stays after the driver has
    replaced the row.
    """

    def __init__(
        self,
        config: ProbeConfig,
        visible: Sequence[str] | None = None,
        commands: CommandRunner | None = None,
    ) -> None:
        """Set the question.

        Args:
            visible: Indices or UUIDs of the job's devices (CUDA_VISIBLE_DEVICES), for
                ``nvidia-smi`` only; None: all.
            commands: Runs commands; None: with the usual deadlines.
        """
        self._config = config
        self._visible = visible
        self._seen: set[str] = set()
        self._commands = commands or CommandRunner()
        self.problem: str | None = None
        """Reason for the last ``read``'s None; None: it gave a number."""
        self.narrowed: str | None = None
        """Workers' CUDA_VISIBLE_DEVICES after a device failed: UUIDs of the working ones; None:
        unchanged."""

    def read(self) -> int | None:
        """Return the number of working devices; None: no answer (see ``problem``).

        No answer is not zero devices: callers should leave the job as it is. Blocks for up to 35 s.
        """
        self.problem = None
        try:
            match self._config.kind:
                case "none":
                    raise NoAnswerError("no probe is configured ([probe] kind = none)")
                case "command":
                    return self._ask_command(self._config.command or "")
                case "file":
                    return self._ask_file(Path(self._config.file or ""))
                case _:
                    return self._ask_driver()
        except NoAnswerError as error:
            self.problem = str(error)
            return None

    def _ask_command(self, command: str) -> int:
        code, output = self._commands.run(["/bin/sh", "-c", command])
        if code:
            raise NoAnswerError(f"probe {command!r} ended with {code}: {output.strip()[-LINE:]}")
        return _number(output, f"probe {command!r}")

    def _ask_file(self, path: Path) -> int:
        try:
            return _number(path.read_text(), f"probe file {path}")
        except (OSError, UnicodeDecodeError) as error:
            raise NoAnswerError(f"probe file {path}: {error}") from error

    def _ask_driver(self) -> int:
        code, output = _query(self._commands, _FIELDS)
        if code and "not a valid field" in output.lower():
            code, output = _query(self._commands, _FEWER_FIELDS)
        devices = visible_devices(output, self._visible)
        working = [uuid for uuid, works in devices.items() if works]
        if not working and not self._seen:
            # A driver without devices under a job on CPUs: nothing was lost.
            raise NoAnswerError(f"nvidia-smi sees no working device: {output.strip()[-LINE:]}")
        self._seen.update(devices)
        if len(working) < len(self._seen) or self.narrowed is not None:
            self.narrowed = ",".join(working)
        return len(working)


def visible_devices(output: str, visible: Sequence[str] | None = None) -> dict[str, bool]:
    """Return whether each device works, by UUID, in the order of ``visible``, else of the answer.

    Args:
        output: nvidia-smi's answer: CSV, ``index, uuid, temperature, ...``. Other lines, such as
            messages about lost devices, are skipped.
        visible: Devices as in CUDA_VISIBLE_DEVICES; None: all.
    """
    lines = [[value.strip() for value in line.split(",")] for line in output.splitlines()]
    listed = {
        uuid: (index, _is_working(readings))
        for index, uuid, *readings in (line for line in lines if len(line) >= len(_FEWER_FIELDS))
        if uuid.startswith("GPU-")
    }
    if visible is None:
        return {uuid: works for uuid, (_, works) in listed.items()}
    return {
        uuid: works
        for name in visible
        for uuid, (index, works) in listed.items()
        if _names(name, index, uuid)
    }


def _is_working(readings: Sequence[str]) -> bool:
    temperature, *health = readings
    has_failed_rows = bool(health) and health[0].lower() == "yes"
    action = health[1].lower() if len(health) > 1 else "none"
    # "[N/A]": the device or the driver lacks it.
    waits = action != "none" and not action.startswith("[") and not action.startswith("drain p2p")
    return temperature.isdecimal() and not has_failed_rows and not waits


def _names(name: str, index: str, uuid: str) -> bool:
    """Whether an entry of CUDA_VISIBLE_DEVICES means this device: its index or its UUID's start."""
    return name == index or (name.startswith("GPU-") and uuid.startswith(name))


def _number(text: str, where: str) -> int:
    match = re.fullmatch(r"\s*(\d+)\s*", text)
    if match is None:
        raise NoAnswerError(f"{where} says {text.strip()[:80]!r}, which is not a number of devices")
    return int(match[1])


# ------------------------------------------------------------------ the health check


class HealthCheck:
    """Runs the health check of a host, a user's command, at the job's request.

    Args:
        command: Words of a shell, run without one; None: no check, the host is healthy.
        variables: Additions to the agent's environment for the command.
    """

    def __init__(
        self, command: str | None, variables: Mapping[str, str], commands: CommandRunner
    ) -> None:
        self._words, self._variables = shlex.split(command or ""), variables
        self._commands = commands

    def fault(self, reason: str) -> str | None:
        """Return the fault of this host; None: healthy, or no command. Blocks for the command's
        time plus 5 s at most; one thread at a time."""
        if not self._words:
            return None
        try:
            return self._run(reason)
        except Exception as error:  # our own slip: else the job waits forever for an answer
            log.exception("event=error in a health check")
            return f"the check itself failed: {error!r}"

    def _run(self, reason: str) -> str | None:
        began, fault, line = time.monotonic(), None, ""
        try:
            variables = {**self._variables, "SCALAI_REASON": reason}
            code, output = self._commands.run(self._words, variables)
            line = last_line(output)
            if code:
                how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
                fault = ": ".join(filter(None, (f"{self._words[0]} {how}", line)))
        except NoAnswerError as error:
            fault = line = str(error)
        log.log(
            logging.INFO if fault is None else logging.WARNING,
            "event=health_check is_healthy=%s took_s=%.1f reason=%r output=%r",
            fault is None, time.monotonic() - began, reason, line,
        )  # fmt: skip
        return fault


# ------------------------------------------------------------------ kills for want of memory

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def oom_kills(cgroups: Path = CGROUPS, proc: Path = PROC) -> dict[str, int]:
    """Return the number of out-of-memory kills so far, by counter: this process's cgroup (version
    2, else 1), and the whole machine. Unreadable ones are left out."""
    own = _text(proc / "self/cgroup")
    path = re.search(r"^0::/?(.*)$", own, re.MULTILINE)
    old = re.search(r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:/?(.*)$", own, re.MULTILINE)
    texts = {
        "cgroup": _text(cgroups / (path[1] if path else "") / "memory.events")
        or _text(cgroups / "memory" / (old[1] if old else "") / "memory.oom_control"),
        "machine": _text(proc / "vmstat"),
    }
    counts = {
        where: re.search(r"^oom_kill (\d+)$", text, re.MULTILINE) for where, text in texts.items()
    }
    return {where: int(found[1]) for where, found in counts.items() if found}


def describe_rise(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Describe kills in between; empty: there were none."""
    for where in ("cgroup", "machine"):
        rise = after.get(where, 0) - before.get(where, 0)
        if where in before and rise > 0:
            whose = "this cgroup's" if where == "cgroup" else "the machine's"
            return f"{OUT_OF_HOST_MEMORY}: {whose} count of oom_kill rose by {rise}"
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
