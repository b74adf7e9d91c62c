"""A job's place in Slurm, by the variables that Slurm sets in an allocation and in its steps."""

import os
import re
from collections.abc import Mapping

from scalai.core.errors import UsageError

WORD = "slurm"
"""In place of an address: the first host of the allocation."""
FIRST_PORT, PORTS = 29400, 1000
"""A job's port follows from its id: two jobs may share a host."""


def endpoint(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return ``HOST:PORT`` for ``slurm``: the first host of this allocation, which is an array
    task's own; any other address unchanged.

    Raises:
        UsageError: This is no allocation of Slurm.
    """
    if text != WORD:
        return text
    nodes, job = environment.get("SLURM_JOB_NODELIST", ""), environment.get("SLURM_JOB_ID", "")
    if not nodes or not job.isdecimal():
        raise UsageError(
            "--coordinator slurm: SLURM_JOB_NODELIST and SLURM_JOB_ID are not set, as Slurm sets "
            "them in an allocation. Run it by sbatch, srun or salloc, or name HOST:PORT."
        )
    return f"{first_host(nodes)}:{FIRST_PORT + int(job) % PORTS}"


def first_host(nodes: str) -> str:
    """Return the first host of a node list, such as ``gpu[03-07,12],login1``."""
    # A comma outside of brackets ends it; in brackets, a comma or a dash ends the first number.
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else nodes)


def host_name(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return this host's name in Slurm; None: this is no task of Slurm.

    Further tasks of a step on one node have their number there behind it: each is a host.
    """
    node, task = environment.get("SLURMD_NODENAME"), environment.get("SLURM_LOCALID", "0")
    return f"{node}-{task}" if node and task != "0" else node or None


def job_name(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the job by the name that means this one alone: the id of an array's last task is also
    that of the array. None: this is no job of Slurm."""
    array, task = (environment.get(f"SLURM_ARRAY_{word}_ID") for word in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID") or None
