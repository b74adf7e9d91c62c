"""The coordinator as a process of its own: ``python -m scalai.launch.coordinator_process FOLDER
HOST:PORT < JOB``."""

import json
import logging
import os
import signal
import sys
from pathlib import Path

from scalai.launch.card import CARD, TOKEN_VARIABLE, write_card
from scalai.launch.coordinator import Coordinator
from scalai.launch.job import JobSpec
from scalai.launch.logs import configure

log = logging.getLogger("scalai.coordinator")


def serve(
    spec: JobSpec, folder: Path, host: str, port: int, token: bytes, alone_s: float = 60.0
) -> int:
    """Be the coordinator of a job until it ends, or nobody has been there for ``alone_s``. Returns
    the job's exit code."""
    # Whoever stops an agent by a signal to its group must not end the job's coordinator with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    coordinator = Coordinator(spec, (host, port), token, log.info, alone_s)
    address = coordinator.address
    assert not isinstance(address, str)
    write_card(folder, (host, address[1]), token)
    log.info(
        "event=coordinator job=%s address=%s:%d: this host is the one that must not die",
        spec.job, host, address[1],
    )  # fmt: skip
    try:
        return coordinator.run()
    finally:
        (folder / CARD).unlink(missing_ok=True)


def main() -> int:
    configure("coordinator")
    folder, endpoint = Path(sys.argv[1]), sys.argv[2]
    host, _, port = endpoint.rpartition(":")
    spec = JobSpec.from_json(json.loads(sys.stdin.read()))
    token = os.environ.pop(TOKEN_VARIABLE).encode()
    return serve(spec, folder, host, int(port), token)


if __name__ == "__main__":
    sys.exit(main())
