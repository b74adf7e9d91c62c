"""Removed flags, values, keys and environment variables, each refused by name with the way out."""

import argparse
import os

from scalai.core.errors import UsageError

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
