"""``scalai autoscale``: gives devices to running jobs, and takes them, as a policy says.

It is hands on what runs the jobs, and no scheduler: it starts nothing and ends nothing. All that it
knows is in the jobs' coordinators. Where it dies, nothing happens to a job, and the next one goes
on.
"""

import argparse
import contextlib
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalai.core.errors import RefusedError, UsageError
from scalai.core.exit_codes import FAILED
from scalai.core.jsonable import Json
from scalai.launch.commands.autoscale_hands import GIVE_UP_S, hand_of
from scalai.launch.commands.autoscale_jobs import GRACE_S, LOOK_S
from scalai.launch.commands.autoscaler import EVERY_S, LIVE, Autoscaler
from scalai.launch.commands.status import seconds
from scalai.launch.config.endpoint import split_endpoint
from scalai.launch.coordinator.leases import CLAIM_S, Lease, await_holder
from scalai.launch.coordinator.registers import LeaseEntry, open_register
from scalai.launch.logs import configure
from scalai.launch.program import show

OWNER = "autoscale"
"""Name of the lease."""

log = logging.getLogger("scalai.autoscale")


def add_parser(commands: Any) -> None:
    """Add the command."""
    about = (
        "Give devices to running jobs, and take them, as a policy says; it starts and ends none. "
        "Decides at each event and each minute, and says each decision in a line."
    )
    parser = commands.add_parser(
        "autoscale", help="give devices to many running jobs by a policy", description=about
    )
    add = parser.add_argument
    add("--jobs", type=Path, required=True, metavar="DIR", help="folder with a file a job, .toml")
    add(
        "--devices", required=True, metavar="N|HxN|FILE",
        help="devices: N on one host, N on each of H hosts, or a file that says so, read again and "
        "again",
    )  # fmt: skip
    add(
        "--policy", choices=LIVE, default="goodput",
        help="who gets how many (default: goodput)",
    )  # fmt: skip
    engine = parser.add_mutually_exclusive_group()
    engine.add_argument(
        "--kubernetes", action="store_const", const="kubernetes", dest="engine",
        help="give whole hosts: set the pods of each Indexed Job",
    )  # fmt: skip
    engine.add_argument(
        "--slurm", action="store_const", const="slurm", dest="engine",
        help="give whole hosts: set the throttle of each array, and drain tasks",
    )  # fmt: skip
    add("--every", type=seconds, default=EVERY_S, metavar="S",
        help=f"seconds between decisions without an event ({EVERY_S:g})")  # fmt: skip
    add(
        "--lease", metavar="PLACE",
        help="where one autoscaler owns the jobs, as --coordinator-lease (default: the folder)",
    )  # fmt: skip
    add("--metrics-port", metavar="[HOST:]PORT", help="Prometheus metrics (host: 127.0.0.1)")
    add("--metrics-file", type=Path, metavar="FILE.prom", help="the same as a file")
    add("--once", action="store_true", help="one decision, and return when it is carried out")
    add("--dry-run", action="store_true", help="decide, and change nothing")
    add("--json", action="store_true", help="one JSON object a decision")
    parser.set_defaults(run=_run, engine="")


def _run(args: argparse.Namespace) -> int:
    configure("autoscale")
    if not args.jobs.is_dir():
        raise UsageError(f"--jobs {args.jobs}: there is no such folder.")

    def tell(line: str, found: Json) -> None:
        if args.json:
            print(json.dumps(found), flush=True)
        else:
            show(f"{time.strftime('%H:%M:%S')} {line}")

    end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end.set())
    owner = None if args.dry_run else _own(args.lease or f"file:{args.jobs.resolve()}")
    with contextlib.ExitStack() as stack:
        if owner is not None:
            stack.callback(owner.end, is_over=True)
        how: dict[str, Any] = {}
        if args.metrics_port or args.metrics_file:
            metrics = _Metrics(args.metrics_port, args.metrics_file)
            stack.callback(metrics.close)
            how["meter"] = metrics.note
        scaler = Autoscaler(
            args.jobs, args.devices, args.policy,
            lambda per_host: hand_of(args.engine, per_host), tell,
            every_s=args.every, is_dry=args.dry_run,
            may_act=lambda: owner is None or owner.is_fresh(), **how,
        )  # fmt: skip
        stack.callback(scaler.close)
        return _loop(scaler, owner, end, is_once=args.once)


def _loop(scaler: Autoscaler, owner: Lease | None, end: threading.Event, *, is_once: bool) -> int:
    began = time.monotonic()
    while not end.is_set():
        if owner is not None and owner.is_superseded:
            raise RefusedError(f"another autoscaler owns these jobs now: {owner.problem}")
        is_done = scaler.turn()
        if is_once and is_done:
            return 0
        if is_once and time.monotonic() - began > GIVE_UP_S + GRACE_S:
            log.error("event=exit not carried out within %.0f s", time.monotonic() - began)
            return FAILED
        end.wait(LOOK_S)
    return 0


def _own(place: str) -> Lease:
    """Take the ownership of the jobs, from a dead owner at once on this machine, else after
    ``CLAIM_S``. Raises ``RefusedError``: another autoscaler lives."""
    register = open_register(place, OWNER)

    def refuse(entry: LeaseEntry, unchanged_s: float) -> None:
        raise RefusedError(
            f"another autoscaler on machine {entry.machine} owns these jobs ({place}; it has shown "
            f"that it lives {unchanged_s:.0f} s ago). Stop that one, or try --dry-run."
        )

    _, newest = await_holder(register, lambda entry: None, refuse)
    term = 1 if newest is None else newest.term + 1
    lease = Lease(register, LeaseEntry(term, socket.gethostname(), 1), lambda: OWNER)
    lease.start()
    log.info("event=owner place=%s term=%d; a silent one is waited for up to %.0f s", place, term,
             CLAIM_S)  # fmt: skip
    return lease


class _Metrics:
    """Metrics of docs/cluster.md. Raises ``RefusedError`` without prometheus_client."""

    def __init__(self, port: str | None, file: Path | None) -> None:
        try:
            from prometheus_client import (
                CollectorRegistry,
                Counter,
                Gauge,
                disable_created_metrics,
            )
            from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
        except ModuleNotFoundError as error:
            raise RefusedError(
                f"prometheus_client is not installed ({error}): pip install 'scalai[metrics]'."
            ) from error
        from scalai.launch.coordinator.feeds import MetricsFile, MetricsServer

        disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no types
        registry = CollectorRegistry()
        kinds = {
            "devices": (Gauge, "Devices: all, and those with a worker.", ["state"]),
            "job_devices": (Gauge, "Devices of a job.", ["job"]),
            "job_silent": (Gauge, "Whether a job does not answer.", ["job"]),
            "decisions": (Counter, "Decisions.", []),
            "changes": (Counter, "Changes of a job's devices.", ["job", "outcome"]),
        }
        self._metrics: dict[str, Any] = {
            name: kind(f"scalai_autoscale_{name}", about, labels, registry=registry)
            for name, (kind, about, labels) in kinds.items()
        }
        self._lock = threading.Lock()
        self._open: list[Any] = []

        def text() -> bytes:
            with self._lock:
                return generate_latest(registry)

        if file is not None:
            self._open.append(MetricsFile(file, text))
        if port is not None:
            address = split_endpoint(port if ":" in port else f"127.0.0.1:{port}")
            self._open.append(MetricsServer(address, text, CONTENT_TYPE_LATEST))

    def note(self, name: str, labels: Mapping[str, str], value: float | None) -> None:
        with self._lock:
            metric = self._metrics[name]
            if value is None:
                metric.remove(*labels.values())
                return
            metric = metric.labels(**labels) if labels else metric
            if name in ("decisions", "changes"):
                metric.inc(value)
            else:
                metric.set(value)

    def close(self) -> None:
        for each in self._open:
            each.close(1.0)
