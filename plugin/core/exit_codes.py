"""All exit codes: of the commands, and of workers. docs/quickstart.md has the same table."""

FAILED = 1
"""The job, or what a command was to do, has failed; its state stays in the stores."""
WRONG_USAGE = 2
REFUSED = 3
"""Input that cannot be used, with the way out."""
DIFFERS = 4
"""What was compared is not equal."""
RESUMABLE = 75
"""Stopped, or never begun: the same command goes on from there. ``EX_TEMPFAIL`` of sysexits.h."""
INTERRUPTED = 130
READER_GONE = 141
"""As of a program ended by SIGPIPE."""
BY_SIGNAL = 128
"""And the number of the signal that ended an agent at once."""

WORKER_OUT_OF_MEMORY = 12
"""A worker without device memory; the number of ``ENOMEM``."""
WORKER_RUN_AGAIN = 16
"""Megatron-LM's rerun state machine asks to run a step again, perhaps on another device."""
WORKER_WRONG_RESULT = 17
"""The same has found a wrong result. All ranks end with it."""
