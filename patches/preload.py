"""Imports of a fork server before it forks workers: the modules of the first round's workers.

It does nothing else: no CUDA, no store, no thread. A failed import is left to the worker, and the
user sees the error there. The process ends with its agent.
"""

import contextlib
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scalai.runtime.processes import die_with_parent, without_collections

LOOK_S = 0.1
"""Seconds between looks for the next order."""


def preload(path: Path) -> None:
    # They import torch, which takes seconds: this process is tied to its agent before.
    from scalai.patches import worker_start
    from scalai.patches.signals import leave_signals_to_the_agent

    leave_signals_to_the_agent()
    # DeepSpeed asks for devices when it is imported. A fork cannot use CUDA that its parent began,
    # and torch begins it to answer, unless it asks the driver's library.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for order in orders(path):
        # The order matters: a framework may lie beside the script and be installed as well.
        others = [entry for entry in sys.path if entry not in order["sys_path"]]
        sys.path[:] = [*order["sys_path"], *others]
        worker_start.install()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in order["modules"]:
                if name not in sys.modules:
                    with contextlib.suppress(ImportError):
                        importlib.import_module(name)


def orders(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the agent's orders, each as it is written, up to the last one."""
    seen = None
    while True:
        try:
            found = path.stat()
            if (mark := (found.st_ino, found.st_mtime_ns)) != seen:
                seen, order = mark, json.loads(path.read_text())
                yield order
                if order["is_last"]:
                    return
        except FileNotFoundError:
            os._exit(0)  # the job has ended meanwhile, and its agent's directory is gone
        time.sleep(LOOK_S)


if "SCALAI_PRELOAD" in os.environ:
    die_with_parent(int(os.environ["SCALAI_AGENT_PID"]))
    # A collection in a fork would also copy the pages that it looks at.
    with without_collections():
        preload(Path(os.environ["SCALAI_PRELOAD"]))
