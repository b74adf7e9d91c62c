"""Removed flags, values and variables, each refused by name with the way out; removed keys of the
elastic configuration, each with the constant in its place."""

import argparse
import json
import os
from collections.abc import Mapping

from scalai.core.errors import UsageError
from scalai.core.job.deadlines import STALL_S
from scalai.core.job.spacing import MTBF_HOURS
from scalai.core.planner.weighing import RESIDENCE_S

REMOVED = {
    "--tls": "Leave it out: the job's token seals every connection, with forward secrecy. For "
    "certificates run the hosts' network over WireGuard or a service mesh",
    "--coordinator-lease vote": "Agents do not vote. Leave it out where all hosts reach "
    "--durable-dir, or name file:/FOLDER, etcd:URL or kubernetes:; with none of these the loss of "
    "the coordinator's machine ends the job",
    "--durable-keep": "Leave it out: the two newest generations stay in --durable-dir",
    "--replica-slowdown": "Leave it out: replicas slow a step by 1 % at most. Make generations "
    "less often (--snapshot-every) where replicas come too late",
    "--remote-timeout": "Leave it out: a read from a URL fails after 60 s",
    "--cache-dir": "Leave it out: blocks of remote sources lie in memory, 32 MiB an open file",
    "--cache-mb": "Leave it out: blocks of remote sources take 32 MiB an open file",
    "--record-tokens": "Write record_tokens under [dataset] in the file of --elastic",
    "--rampup-batch-size": "Write rampup_batch_size under [dataset] in the file of --elastic; "
    "Megatron-LM's own flag goes behind the script",
    "SCALAI_ALLOW_UNKNOWN_VERSION": "Set SCALAI_ALLOW_UNTESTED=1",
    "SCALAI_TLS": "Unset it: the job's token seals every connection, with forward secrecy",
    "SCALAI_LEDGER": "Unset it: samples in another order are always refused. Give the job the "
    "data sets, seed and batch of its beginning, or convert its state by scalai reshard and begin "
    "another job from that checkpoint",
    "resize.build_ahead": "Write standby",
}
"""By name (a flag, a flag with its value, ``section.key``, a variable): the way out, without a full
stop."""

CONSTANTS: Mapping[str, tuple[float, str]] = {
    "store.mtbf_hours_per_worker": (
        MTBF_HOURS,
        "hours of one worker between two failures, until the job's own failures say more",
    ),
    "store.async_snapshots": (True, "a snapshot beside the training stops it for the least time"),
    "store.durable_keep": (2, "the generation before the newest stays, should that be damaged"),
    "store.replica_slowdown": (0.01, "replicas come in time at 1 % of a step in all but the "
                               "shortest spacings"),
    "resize.stall_s": (STALL_S, "seconds; jobs of long steps wait for ten of their usual steps"),
    "resize.quarantine_s": (60.0, "seconds, and twice as many after each further loss"),
    "resize.build_timeout_s": (300.0, "seconds; then the change is made without a standby"),
    "preemption.interval_s": (2.0, "seconds; providers give notice of 30 s or more"),
    "probe.health_timeout_s": (60.0, "seconds, as long as the slowest diagnosis of one GPU"),
    "planner.residence_s": (RESIDENCE_S, "seconds between two changes of a usual job"),
    "planner.trial_steps": (0, "no degrees are tried: measured steps correct the prediction"),
    "planner.figures": (0, "none: the planner knows the devices of `scalai plan --help`"),
}  # fmt: skip
"""Removed keys of the elastic configuration: the value in their place, and its reason. A file with
such a key is read without it."""
TEST_VARIABLE = "SCALAI_TEST_CONSTANTS"
"""Environment variable of the product's own tests: a JSON object that overrules ``CONSTANTS`` in
whole jobs. Nothing else sets it."""


def constant(key: str) -> float:
    """The constant in place of a removed key; ``key``: ``section.key``."""
    value, _ = CONSTANTS[key]
    return float(json.loads(os.environ.get(TEST_VARIABLE, "{}")).get(key, value))


def ignored(key: str, found: object) -> str:
    """The warning about a removed key of a file: what was found, and the constant."""
    value, reason = CONSTANTS[key]
    section, _, name = key.partition(".")
    return f"[{section}] {name} = {found!r} is ignored; it is always {value:g} ({reason})"


def refusal(name: str, said: str | None = None) -> UsageError:
    """The error for a removed name; ``said``: its form where it was found."""
    return UsageError(f"{said or name} is not known any more. {REMOVED[name]}.")


def add_removed_flags(parser: argparse.ArgumentParser) -> None:
    """Let a parser refuse each removed flag. Call it last: a flag of the parser's own wins."""
    for flag in (name for name in REMOVED if name.startswith("--") and " " not in name):
        try:
            parser.add_argument(
                *dict.fromkeys((flag, "--" + flag[2:].replace("-", "_"))),
                action=_Refuse, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS,
            )  # fmt: skip
        except argparse.ArgumentError:
            continue  # in this parser the name means something else


def refuse_values(flags: argparse.Namespace) -> None:
    """Raise ``UsageError`` where a flag has a removed value."""
    for name in REMOVED:
        flag, _, value = name.partition(" ")
        if value and getattr(flags, flag[2:].replace("-", "_")) == value:
            raise refusal(name)


def refuse_variables() -> None:
    """Raise ``UsageError`` where a removed environment variable is set."""
    for name in REMOVED:
        if os.environ.get(name):
            raise refusal(name)


class _Refuse(argparse.Action):
    def __call__(
        self, parser: object, namespace: object, values: object, option: str | None = None
    ) -> None:
        raise refusal(self.option_strings[0])
