"""Notes of a round in the trackers of the user's script: Weights & Biases, MLflow.

Trackers are never imported here. One that is slow or fails costs one line, and no training.
"""

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

log = logging.getLogger(__name__)

Row = Mapping[str, float]
Write = Callable[[Row, int], object]


def note_round(numbers: Row, step: int) -> None:
    """Write numbers, as ``scalai/NAME``, in the runs that this rank's script has open now. Returns
    at once.

    Args:
        numbers: Values by name.
        step: Optimizer step; W&B keeps its own count.
    """
    named = {f"scalai/{name}": value for name, value in numbers.items()}
    for name, find in (("wandb", _wandb), ("mlflow", _mlflow)):
        try:
            if (module := sys.modules.get(name)) is None or (write := find(module)) is None:
                continue
            given = name, write, named, step
            threading.Thread(target=_write, args=given, name=f"note-{name}", daemon=True).start()
        except Exception as error:  # a release without these names, or no thread
            log.debug("event=no_tracker_note name=%s %r", name, error)


def _write(name: str, write: Write, numbers: Row, step: int) -> None:
    try:
        write(numbers, step)
    except Exception as error:
        log.debug("event=no_tracker_note name=%s %r", name, error)


def _wandb(module: Any) -> Write | None:
    run = module.run
    # Without a step, and with the row left open: the script's own rows keep their numbers.
    return None if run is None else lambda numbers, _: run.log(dict(numbers), commit=False)


def _mlflow(module: Any) -> Write | None:
    run = module.active_run()  # of this thread
    if run is None:
        return None
    # A queue of MLflow's own would hold up the end of this process.
    log_metrics = partial(module.log_metrics, run_id=run.info.run_id, synchronous=True)
    return lambda numbers, step: log_metrics(dict(numbers), step=step)
