"""What is known of the frameworks of a job before it starts. Their side of the house is asked in a
process of its own, because nothing of it is imported here."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.config.script_facts import read_script

ANSWER_S = 60.0


def frameworks(folder: Path | None = None) -> Mapping[str, Json]:
    """Return of each framework what ``scalai.patches.versions`` tells: ``version``, ``is_hooked``,
    ``note``.

    Args:
        folder: Where the script lies: a framework beside it is found first.

    Raises:
        RefusedError: The process fails, or does not answer.
    """
    where = [str(folder)] if folder is not None else []
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "scalai.patches.versions", *where],
            capture_output=True, text=True, check=False, timeout=ANSWER_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RefusedError(
            f"which frameworks are installed is not known after {ANSWER_S:.0f} s: look at the "
            f"disk that {sys.executable} lies on."
        ) from error
    if answer.returncode:
        raise RefusedError(answer.stderr.strip().splitlines()[-1])
    return dict(json.loads(answer.stdout))


def refuse_untried(spec: JobSpec) -> None:
    """Raise ``RefusedError`` where the job's framework is of a version that its workers would
    refuse."""
    options = spec.options
    name = _framework(spec)
    if name is None or options.script is None:
        return
    folder = Path(os.getcwd()) if options.is_module else Path(options.script).resolve().parent
    found = frameworks(folder).get(name)
    if found is not None and found["version"] is not None and not found["is_hooked"]:
        raise RefusedError(found["note"])


def _framework(spec: JobSpec) -> str | None:
    """Return the framework of an elastic job, or of one that is only looked at, as far as its
    command line shows it.

    Raises:
        RefusedError: Its flags do not go with changing degrees.
    """
    if not spec.is_elastic and not spec.options.is_check:
        return None
    if read_script(spec.options, spec.config, spec.deepspeed).arguments is not None:
        return "megatron-core"
    return "deepspeed" if spec.deepspeed is not None else None
