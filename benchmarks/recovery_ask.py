"""Asks the next coordinator of a job for a change, as soon as there is one, and prints when it has
taken that: ``python recovery_ask.py LEASES JOB TERM NPROC``, on a host of the job, with its token
in the environment. Seconds of the monotonic clock, which all processes of a machine share."""

import os
import sys
import time
from pathlib import Path

from scalai.core.errors import ScalaiError
from scalai.launch.config.endpoint import TOKEN_VARIABLE
from scalai.launch.coordinator.person_calls import Scale, Status
from scalai.launch.coordinator.registers import FolderRegister
from scalai.runtime.calls import Channel
from scalai.runtime.handshake import job_key

WAIT_S = 300.0


def main() -> None:
    root, job, term, nproc = sys.argv[1:]
    register = FolderRegister(Path(root), job)
    token = job_key(os.environ[TOKEN_VARIABLE], job).encode()
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            newest = register.newest()
            if newest is not None and newest.term >= int(term):
                channel = Channel(newest.address, token, connect_s=1.0)
                if channel.call(Status()).value()["phase"] == "running":
                    channel.call(Scale(int(nproc), None, None, dry_run=False))
                    print(time.monotonic())
                    return
                channel.close()
        except ScalaiError:
            pass
        time.sleep(0.05)
    raise SystemExit("no coordinator takes a change")


if __name__ == "__main__":
    main()
