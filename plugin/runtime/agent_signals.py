"""Which signals mean the agent of a host, for every process of the job on it."""

import os
import signal
from collections.abc import Sequence

VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""torchrun's variable for ``--signals-to-handle``: an agent sets it, and what it starts inherits
it."""
NOTICE = signal.SIGUSR1
"""Says that the host will be taken away: a scheduler may send it before it ends a job."""
_ALWAYS = (signal.SIGTERM, signal.SIGINT, NOTICE)
_DEFAULT = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


def parse_signals(text: str) -> tuple[signal.Signals, ...]:
    """Read ``--signals-to-handle``: names, separated by commas.

    Raises:
        ValueError: No process can handle a signal of that name.
    """
    found: Sequence[str] = [name.strip() for name in text.split(",") if name.strip()]
    for name in found:
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"{name!r} is no signal that a process can handle")
    return tuple(signal.Signals[name] for name in found)


def meant_for_the_agent() -> tuple[signal.Signals, ...]:
    """Return the signals that mean the agent: those of ``--signals-to-handle``, SIGTERM, SIGINT and
    the notice."""
    named = parse_signals(os.environ.get(VARIABLE, _DEFAULT))
    return tuple(dict.fromkeys((*_ALWAYS, *named)))
