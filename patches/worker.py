"""Entry point of a worker: ``python -m scalai.patches.worker [-m] SCRIPT ARGUMENTS``, or ``main``
in a warm fork.

It ties the worker's life to its agent's, hooks the script's frameworks, and runs the script as
``__main__``, as torchrun's workers run it. Nothing is hooked without an agent's word.
"""

import atexit
import json
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from scalai.core.errors import RefusedError, ScalaiError, StoreError, UsageError
from scalai.core.exit_codes import WORKER_OUT_OF_MEMORY, WORKER_RUN_AGAIN, WORKER_WRONG_RESULT
from scalai.core.job.endings import RUN_AGAIN, WRONG_RESULT
from scalai.core.messages.worker_messages import RankRefused
from scalai.runtime.agent_folder import tell_agent
from scalai.runtime.processes import die_with_parent, end_with, without_collections


def main(arguments: Sequence[str]) -> None:
    """Run a script (``path``) or a module (``-m name``) with its arguments as this worker's job."""
    die_with_the_agent()
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None and "torch" in sys.modules:
        # A fork inherits the thread count that torch took when the fork server imported it.
        sys.modules["torch"].set_num_threads(int(threads))
    is_elastic = os.environ.get("SCALAI_ELASTIC") == "1"
    if is_elastic:
        # Not at the top: it imports torch, which takes seconds and a plain script may not need. Not
        # behind the path either, where something beside the script could take its place.
        with without_collections():
            from scalai.patches import worker_start
    is_module = arguments[0] == "-m"
    target, rest = (arguments[1], arguments[2:]) if is_module else (arguments[0], arguments[1:])
    sys.argv = [target, *rest]
    sys.path.insert(0, os.getcwd() if is_module else str(Path(target).resolve().parent))
    if is_elastic:
        worker_start.prepare()
    try:
        if is_elastic:
            # After the path is set: the framework may lie beside the script.
            worker_start.install()
        try:
            if is_module:
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(target, run_name="__main__")
        except SystemExit as ending:
            if not ending.code and (job := _session()) is not None:
                job.check_end()
            raise
        if (job := _session()) is not None:
            job.finish()
    except (RefusedError, UsageError) as error:
        if not is_elastic or isinstance(error, StoreError):
            _leave_word(error)
            raise
        _be_refused(error)
    except SystemExit as ending:
        if ending.code:
            why = _of_rerun_machine(ending.code)
            left = f"the script left with {ending.code!r}{why}"
            _wait_to_be_rescued(left)
            if why or not isinstance(ending.code, int):
                _leave_word(left)
        raise
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported for this
            _wait_to_be_rescued(error)
            _leave_word(error)
            raise
        _wait_to_be_rescued(error)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(WORKER_OUT_OF_MEMORY)
    except Exception as error:
        _wait_to_be_rescued(error)
        _leave_word(error)
        raise


def _of_rerun_machine(code: object) -> str:
    """Return what the exit codes 16 and 17 of Megatron-LM's rerun state machine mean for this rank,
    for the end of a reason; empty: the code is another's."""
    module = sys.modules.get("megatron.core.rerun_state_machine")
    machine = getattr(module, "_GLOBAL_RERUN_STATE_MACHINE", None)
    if machine is None or code not in (WORKER_RUN_AGAIN, WORKER_WRONG_RESULT):
        return ""
    if code == WORKER_RUN_AGAIN:
        return f": {RUN_AGAIN}"
    # All ranks end with 17, also where the second result was computed elsewhere, or was the same.
    is_own = machine.rerun_requested and machine.state.name == "RERUNNING_IN_PLACE"
    return f": {WRONG_RESULT}" if is_own else ""


def _leave_word(error: Exception | str) -> None:
    """Leave the script's error for torch's agent, as torch's ``record`` does."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not os.path.exists(path):
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}".rstrip(": ")
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": text, "timestamp": int(time.time())}))


def _wait_to_be_rescued(failure: Exception | str) -> None:
    """Wait, after the script's failure, for the agent to end this process: its memory may hold the
    last state. Returns if nothing of it would be written."""
    job = _session()
    if job is None or not job.can_be_rescued:
        return
    if isinstance(failure, Exception):
        traceback.print_exception(failure)
        sys.stderr.flush()
        failure = f"{type(failure).__name__}: {failure}"
    job.wait_to_be_rescued(failure)


def _session() -> Any:
    """Return the script's session; None: it has none, and torch need not be imported."""
    session = sys.modules.get("scalai.runtime.session")
    return None if session is None else session.current()


def _be_refused(error: ScalaiError) -> NoReturn:
    """Tell the agent the reason of the refusal, and end this process. The agent says it once for
    all ranks."""
    with suppress(ScalaiError):  # it ends all the same
        tell_agent(lambda rank, round: RankRefused(rank, round, str(error)))
    print(error, file=sys.stderr, flush=True)  # nobody else has said it
    os._exit(error.exit_code)


def die_with_the_agent() -> None:
    """End this process with its agent: training on as an orphan would corrupt the job.

    The kernel's parent-death signal covers a direct child of the agent; one from the fork server
    has another parent, so a thread waits on the agent's process too.
    """
    agent = os.environ.get("SCALAI_AGENT_PID")
    if agent is None:
        return
    die_with_parent(os.getppid())
    end_with(int(agent))


def leave() -> NoReturn:
    """End this process with 0, as the interpreter does, without taking its memory apart.

    With a framework loaded this saves more than half a second of standing training. A forked worker
    leaves this way too (by multiprocessing).
    """
    threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter calls first
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SystemExit as ending:
        if ending.code:
            raise
    leave()
