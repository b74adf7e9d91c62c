"""``scalai-run``: in place of torchrun, with the same flags. Starts this host's agent and stays
until it ends."""

import logging
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.run import determine_local_world_size

from scalai.core.errors import ScalaiError
from scalai.launch.agent import Agent
from scalai.launch.check_elastic import check_elastic
from scalai.launch.hostfile import expand_hostfile
from scalai.launch.job import JobSpec
from scalai.launch.logs import configure
from scalai.launch.options import build_parser
from scalai.launch.places import find_coordinator
from scalai.launch.probe import DeviceProbe
from scalai.launch.torch_elastic import WorkerSet, self_check

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> None:
    """Entry point. Exits 0: done or drained; 1: failed; 2: wrong usage; 3: refused; 75: stopped,
    resumable."""
    try:
        spec = JobSpec.read(_with_hostfile(sys.argv[1:] if argv is None else argv))
        if spec.options.is_check:
            slots = determine_local_world_size(spec.options.nproc_per_node)
            print(check_elastic(spec.options, spec.config, slots, spec.deepspeed))
            code = 0
        else:
            code = run_agent(spec)
    except ScalaiError as error:
        print(f"scalai-run: {error}", file=sys.stderr)
        code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of torch's log tailing and of our servers must not keep a finished agent alive.
    os._exit(code)


def _with_hostfile(argv: list[str]) -> list[str]:
    """Return the command line with what its host file says; take its slots for the devices."""
    expanded, own = expand_hostfile(argv, build_parser().parse_args(argv))
    for slots in own.values():
        if slots != tuple(range(len(slots))):
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
    return expanded


def run_agent(spec: JobSpec) -> int:
    """Run this host's agent until the job has ended or the host is drained. Returns the exit
    code."""
    options = spec.options
    host = options.host_id or socket.gethostname()
    configure(host)
    self_check()
    slots = determine_local_world_size(options.nproc_per_node)
    if slots > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun
    for line in spec.config.describe().splitlines() if spec.is_elastic else ():
        log.info("event=config %s", line)
    place = find_coordinator(spec)
    logs = DefaultLogsSpecs(
        log_dir=options.log_dir,
        redirects=Std.from_str(options.redirects),
        tee=Std.from_str(options.tee),
    )
    interface = options.local_addr or _own_address(place.address)
    agent = Agent(
        spec, host, slots, place, interface, lambda: WorkerSet(spec.job, options.role, logs)
    )
    _handle_signals(agent)
    _start_probe(spec, agent, slots)
    ended: list[int] = []
    # torch's process contexts set signal handlers when they are started from the main thread; ours
    # stay this way.
    thread = threading.Thread(target=lambda: ended.append(agent.run()), name="agent")
    thread.start()
    while thread.is_alive():
        thread.join(0.5)  # short, so that signals are handled
    return ended[0] if ended else 1


def _handle_signals(agent: Agent) -> None:
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            log.info(
                "event=signal %s: draining; a second signal stops now", signal.Signals(number).name
            )
            agent.leave()
        else:
            agent.stop_now(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)


def _start_probe(spec: JobSpec, agent: Agent, most: int) -> None:
    """Ask for the number of working devices now and then, in a thread of its own; never more than
    ``most`` count."""
    kind = spec.config.probe.kind
    if kind == "none" or (kind == "nvidia-smi" and not torch.cuda.is_available()):
        return  # without CUDA the workers use no device that the driver could tell of
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    probe = DeviceProbe(spec.config.probe, visible.split(",") if visible else None)

    def ask() -> None:
        problem: str | None = None
        while True:
            slots = probe.read()
            if slots is not None:
                agent.set_slots(min(slots, most))
            elif probe.problem != problem:
                problem = probe.problem
                log.warning("event=probe no answer: %s", problem)
            time.sleep(spec.config.probe.interval_s)

    threading.Thread(target=ask, name="probe", daemon=True).start()


def _own_address(coordinator: tuple[str, int]) -> str:
    """Return the address of this host that the coordinator's network reaches."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(coordinator)
        return str(probe.getsockname()[0])


if __name__ == "__main__":
    main()
