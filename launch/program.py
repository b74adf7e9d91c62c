"""The end of a command: repairable errors are one line, with their exit code."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scalai.core.errors import RefusedError, ScalaiError, UsageError, is_memory_short
from scalai.core.exit_codes import FAILED, INTERRUPTED, READER_GONE


def escaped(text: str, kept: str = "") -> str:
    """Return a file's text safe for a terminal: without control characters except ``kept``.

    They could move its cursor, name its window, or hide the rest.
    """
    return "".join(
        c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text
    )


def show(*lines: str, end: str = "\n") -> None:
    """Print untrusted lines."""
    print("\n".join(map(escaped, lines)), end=end)


def exit_code_of(program: str, run: Callable[[], int]) -> int:
    """Run a command. Returns its exit code, or prints the error and returns its code.

    Raises:
        Exception: A fault of ours: its traceback is needed.
    """
    try:
        code = run()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has enough: ``scalai inspect ... | head``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except ScalaiError as error:
        text, code = str(error), error.exit_code
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "scalai":
            raise
        text = f"{error.name} is not installed for {sys.executable}. Install it there"
        text += "; scalai brings no torch of its own." if error.name == "torch" else "."
        code = RefusedError.exit_code
    except (MemoryError, OSError) as error:
        text, code = _system_text(error), FAILED
    except KeyboardInterrupt:
        text, code = "interrupted", INTERRUPTED
    print(f"{program}: {escaped(text, kept=chr(10))}", file=sys.stderr)
    return code


def _system_text(error: MemoryError | OSError) -> str:
    if is_memory_short(error):
        return (
            "memory ran out in this process. Let it have more (`ulimit -d -v`, the limit of "
            "this container), or run it on another machine."
        )
    assert isinstance(error, OSError)
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{error.strerror or error}"


@contextmanager
def named(flag: str, folder: str | Path | None) -> Iterator[None]:
    """Raise ``RefusedError``, which names the flag, where the system refuses its folder."""
    try:
        yield
    except OSError as error:
        raise RefusedError(
            f"{flag} {folder} cannot be used ({error.strerror or error}). Name another one."
        ) from error


def worker_count(nproc_per_node: str) -> int:
    """Return the number of workers of ``--nproc-per-node`` on this host.

    Raises:
        UsageError: It is no number and none of torchrun's words.
    """
    from torch.distributed.run import determine_local_world_size

    try:
        count = int(determine_local_world_size(nproc_per_node))
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"--nproc-per-node {nproc_per_node}: expected a number, auto, cpu or gpu ({error})."
        ) from error
    if count < 1:
        raise UsageError(f"--nproc-per-node {nproc_per_node}: expected 1 or more.")
    return count
