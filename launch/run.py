"""``scalai-run``: in place of torchrun, with the same flags. Starts this host's agent and stays
until it ends.
"""

import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from scalai.core.errors import AnswerError, EndedError, RefusedError
from scalai.core.exit_codes import BY_SIGNAL, RESUMABLE
from scalai.core.planner.devices import device_named
from scalai.launch import host_signals
from scalai.launch.agent.caretaker import say_ahead, stay
from scalai.launch.agent.host_checks import DeviceProbe, driver_device
from scalai.launch.agent.network import address_towards, interface_environment
from scalai.launch.agent.notices import questions_of, watch
from scalai.launch.agent.participant import Participant, open_agent
from scalai.launch.agent.torch_elastic import WorkerSet, self_check
from scalai.launch.agent.worker_group import THREADS, THREADS_BY_DEFAULT
from scalai.launch.before_start import check_folders, check_job, check_words
from scalai.launch.command_runner import NoAnswerError
from scalai.launch.commands.check_elastic import check_elastic
from scalai.launch.config import slurm
from scalai.launch.config.constants import constant
from scalai.launch.config.endpoint import take_token
from scalai.launch.config.flags import build_parser, parse_options, with_own_name
from scalai.launch.config.frameworks import refuse_untried
from scalai.launch.config.hostfile import expand_hostfile
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.discovery import Place, find_coordinator
from scalai.launch.logs import configure
from scalai.launch.program import exit_code_of, named, worker_count
from scalai.launch.slow_files import drain
from scalai.runtime.processes import NOTICE
from scalai.store.places import check_host

POLL_S = 0.5
STOP_S = 30.0
"""Longest end of the workers after a second signal."""
ENDING_S = 60.0
"""Longest end of an ended job's coordinator."""

NO_SNAPSHOTS = (
    "event=no_snapshots snapshots are off (snapshot_every = 0): where no other host holds what a "
    "lost host held, its loss costs all steps since the last change. Set --snapshot-every auto"
)

log = logging.getLogger("scalai.launch.run")  # also when run by ``python -m``


def main(argv: list[str] | None = None) -> None:
    """Entry point. Exits 0: done or drained; 1: failed; 2: wrong usage; 3: refused; 75: stopped,
    resumable.
    """
    given = sys.argv[1:] if argv is None else argv
    code = exit_code_of("scalai-run", lambda: _run(given))
    drain()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of torch's log tailing and of our servers must not keep a finished agent alive.
    os._exit(code)


def _run(argv: list[str]) -> int:
    spec = JobSpec.read(parse_options(_with_hostfile(with_own_name(argv))))
    refuse_untried(spec)
    if not spec.options.is_check:
        return run_agent(spec)
    spec = with_device(spec)
    slots = worker_count(spec.options.nproc_per_node)
    report = check_elastic(spec.options, spec.config, slots, spec.deepspeed)
    print(json.dumps(report.to_json()) if spec.options.is_json else report)
    return 0


def say_configuration(spec: JobSpec) -> None:
    """Log the job's configuration, and a warning without snapshots."""
    lines = spec.config.describe().splitlines()
    given = [" ".join(line.split()) for line in lines if not line.endswith("(default)")]
    log.info("event=config %s", "; ".join(given) or "all settings are the defaults")
    for line in lines:
        log.debug("event=config %s", line)
    for line in spec.config.ignored:
        log.warning("event=config %s", line)
    if not spec.spacing.every:
        log.warning(NO_SNAPSHOTS)


def with_device(spec: JobSpec) -> JobSpec:
    """Return the job with the driver's device, if none is named and degrees may be computed.

    Blocks for 15 s at most; logs the answer, or the reason for none.
    """
    planner = spec.config.planner
    if not spec.is_elastic or planner.kind == "keep" or planner.gpu is not None:
        return spec
    try:
        named = driver_device()
    except NoAnswerError as error:
        log.info("event=device no answer: %s; [planner] gpu names one", error)
        return spec
    log.info("event=device name=%r%s", named, _unknown(named))
    options = spec.options
    return JobSpec.read(replace(options, overrides={**options.overrides, "planner.gpu": named}))


def _unknown(device: str) -> str:
    try:
        device_named(device)
    except RefusedError as error:
        return f": {error}"
    return ""


def _with_hostfile(argv: list[str]) -> list[str]:
    """Apply the host file to the command line, and its slots as devices."""
    expanded, own = expand_hostfile(argv, build_parser().parse_args(argv))
    for slots in own.values():
        if slots != tuple(range(len(slots))):
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
    return expanded


def run_agent(spec: JobSpec) -> int:
    """Run this host's agent until the job has ended or the host is drained. Returns the exit
    code.
    """
    options = spec.options
    check_words(spec)
    host = check_host(options.host_id or slurm.host_name() or socket.gethostname())
    configure(host, options.log_format, options.log_level)
    self_check()
    slots = worker_count(options.nproc_per_node)
    preemption = spec.config.preemption
    questions = questions_of(
        preemption.parsed(), constant("preemption.interval_s"), spec.config.resize.drain_timeout_s
    )
    if slots > 1:
        if THREADS not in os.environ:
            os.environ.update({THREADS: "1", THREADS_BY_DEFAULT: "1"})  # as torchrun
    check_folders(spec)
    with named("--log-dir", options.log_dir):
        logs = DefaultLogsSpecs(
            log_dir=options.log_dir,
            redirects=Std.from_str(options.redirects),
            tee=Std.from_str(options.tee),
            local_ranks_filter=set(options.shown_ranks) or None,
        )
    spec = with_device(spec)
    warning = check_job(spec, slots)
    if warning is not None:
        log.warning("%s", warning)
    host_signals.name(options.signals_to_handle)
    host_signals.end_at_the_first()
    try:
        place, agent = _joined(spec, host, slots, lambda: WorkerSet(spec.job, options.role, logs))
    except host_signals.StoppedError as signalled:
        log.info(
            "event=exit host=%s code=%d reason='%s before this host had joined: the same command "
            "begins anew'", host, RESUMABLE, signalled,
        )  # fmt: skip
        return RESUMABLE
    if spec.is_elastic:
        say_configuration(spec)
    if options.is_standalone:
        log.info("event=standalone: --job %s goes on with the state of this job", spec.job)
    if place.started is not None:
        say_ahead(spec)
    heard = host_signals.HeardSignals()
    heard.listen()
    _start_probe(spec, agent, slots)
    watch(questions, agent.noticed, agent.notice_withdrawn)
    ended: list[int] = []

    # torch's process contexts set signal handlers if started from the main thread; ours stay this
    # way.
    def work() -> None:
        try:
            ended.append(agent.run())
        finally:
            heard.wake()

    thread = threading.Thread(target=work, name="agent")
    thread.start()
    attend(thread, agent, heard, hears_notice="signal" in preemption.sources)
    if agent.started is not None and heard.count < 2:
        before = heard.count
        stay(spec, agent.started, lambda: heard.count > before)
    return ended[0] if ended else 1


def attend(
    loop: threading.Thread,
    agent: Participant,
    heard: host_signals.HeardSignals,
    *,
    hears_notice: bool = True,
) -> None:
    """Drain at the first signal, stop at the second; a notice (SIGUSR1) and SIGHUP drain and count
    as neither. SIGQUIT shows all stacks, and stops.

    Returns at the end of the agent's loop, or ``STOP_S`` after a stop. The workers end with this
    process, in any case.
    """
    is_leaving, stopped_at, shown_at = False, None, math.inf
    while loop.is_alive():
        number = heard.next(POLL_S)
        if number in host_signals.NEVER_SECOND:
            is_heeded = hears_notice or number != NOTICE
            what = "draining" if is_heeded else "not heeded, --preemption does not name signal"
            log.info("event=signal %s: %s", signal.Signals(number).name, what)
            if is_heeded:
                agent.leave()
        elif number == signal.SIGQUIT:
            if shown_at == math.inf:  # a terminal and a wrapper may both send it
                log.warning("event=signal SIGQUIT: the stacks follow, and this host stops")
                host_signals.show_own_stacks()
                agent.show_stacks()
                shown_at = time.monotonic()
        elif number is not None and is_leaving:
            agent.stop_now(BY_SIGNAL + number)
            stopped_at = stopped_at or time.monotonic()
        elif number is not None:
            is_leaving = True
            log.info(
                "event=signal %s: draining; a second signal stops now", signal.Signals(number).name
            )
            agent.leave()
        if stopped_at is None and time.monotonic() - shown_at > host_signals.SHOWN_S:
            agent.stop_now(BY_SIGNAL + signal.SIGQUIT)
            stopped_at = time.monotonic()
        if stopped_at is not None and time.monotonic() - stopped_at > STOP_S:
            log.error("event=stuck: what the agent waits for has not ended for %.0f s", STOP_S)
            return


def _joined(
    spec: JobSpec, host: str, slots: int, make_workers: Callable[[], WorkerSet]
) -> tuple[Place, Participant]:
    """Return the coordinator's place, and an agent joined to the job.

    Waits for the end of this machine's coordinator of an ended job; then a new one follows.
    """
    token, deadline = take_token(spec.job), time.monotonic() + ENDING_S
    while True:
        place = find_coordinator(spec, token)
        interface = spec.options.local_addr or address_towards(place.address)
        _name_interface(interface)
        try:
            return place, open_agent(spec, host, slots, place, interface, make_workers)
        except AnswerError as error:
            is_ending = error.kind == EndedError.__name__ and place.is_here
            if not is_ending or time.monotonic() > deadline:
                raise
            log.info("event=waiting for the coordinator of the earlier run to end")
            time.sleep(1.0)


def _start_probe(spec: JobSpec, agent: Participant, most: int) -> None:
    """Ask for the number of working devices now and then, in a thread; at most ``most`` count."""
    kind = spec.config.probe.kind
    if kind == "none" or (kind == "nvidia-smi" and not torch.cuda.is_available()):
        return  # without CUDA the workers use no device known to the driver
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    probe = DeviceProbe(spec.config.probe, visible.split(",") if visible else None)

    def ask() -> None:
        problem: str | None = None
        while True:
            try:
                slots = probe.read()
            except Exception as error:  # our own slip: nobody would hear of devices any more
                slots, probe.problem = None, repr(error)
            if slots is not None:
                if probe.narrowed is not None:
                    os.environ["CUDA_VISIBLE_DEVICES"] = probe.narrowed
                agent.set_slots(min(slots, most))
            elif probe.problem != problem:
                problem = probe.problem
                log.warning("event=probe no answer: %s", problem)
            time.sleep(spec.config.probe.interval_s)

    threading.Thread(target=ask, name="probe", daemon=True).start()


def _name_interface(address: str) -> None:
    """Let the workers meet over the interface of this address, unless the user names another."""
    variables = interface_environment(address, os.environ)
    os.environ.update(variables)
    if variables:
        names = " ".join(f"{variable}={name}" for variable, name in variables.items())
        log.info("event=interface address=%s %s", address, names)


if __name__ == "__main__":
    main()
