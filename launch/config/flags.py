"""The flags of ``scalai-run``: those of torchrun, read by torchrun's own parser, and ours beside
them.

docs/cli.md lists the differences from torchrun. What was read is ``Options``, which needs no
torch.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import secrets
import shlex
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.run import get_args_parser

from scalai.core.errors import RefusedError, UsageError
from scalai.launch.config import slurm
from scalai.launch.config.elastic_config import AUTO, PLANNERS, parse_source
from scalai.launch.config.endpoint import HIGHEST_PORT, join_endpoint
from scalai.launch.config.options import DEFAULT_MASTER_PORT, Options
from scalai.launch.config.parser import Parser
from scalai.launch.config.removed import add_removed_flags, refuse_values, refuse_variables
from scalai.runtime.processes import parse_signals
from scalai.store.places import check_host, check_job

DEFAULT_JOB = "default"
FEWEST_PORTS = 5
_TORCH_NO_JOB = "none"
_TORCH_RENDEZVOUS = ("static", "c10d")


def parse_options(argv: Sequence[str]) -> Options:
    """Read the command line, without the program's name.

    ``--elastic CONFIG`` may stand before the script or among its own arguments, where it is taken
    out.

    Raises:
        UsageError: A slip, or a flag that cannot be used here, with what to use instead.
        SystemExit: ``--help``.
    """
    refuse_variables()
    flags = build_parser().parse_args(list(argv))
    script_args, elastic_in_script = _take_elastic(flags.training_script_args)
    if flags.elastic is not None and elastic_in_script is not None:
        raise UsageError(
            f"--elastic is given twice ({flags.elastic} before the script, {elastic_in_script} "
            "behind it); keep one."
        )
    refuse_values(flags)
    _check(flags)
    job = check_job(DEFAULT_JOB if flags.rdzv_id == _TORCH_NO_JOB else flags.rdzv_id)
    if flags.host_id is not None:
        check_host(flags.host_id)
    min_nodes, max_nodes = _node_range(flags.nnodes)
    plain = {f.name for f in fields(Options)} & set(vars(flags)) - {"elastic"}
    return Options(
        **{name: getattr(flags, name) for name in plain},
        script=flags.training_script,
        script_args=script_args,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        job=job,
        coordinator=_coordinator(flags),
        is_standalone=flags.standalone,
        is_module=flags.module,
        elastic=flags.elastic if elastic_in_script is None else elastic_in_script,
        is_check=flags.check_elastic,
        shown_ranks=_shown_ranks(flags),
        overrides=_overrides(flags),
    )


def with_own_name(argv: Sequence[str]) -> list[str]:
    """Return the command line; a standalone job without a name gets one that no other has."""
    flags = build_parser().parse_args(list(argv))
    if not flags.standalone or flags.rdzv_id != _TORCH_NO_JOB:
        return list(argv)
    return ["--rdzv-id", f"standalone-{secrets.token_hex(4)}", *argv]


def _torchruns_parser() -> Parser:
    """Return torchrun's parser, under our name; it asks for no script."""
    parser = Parser(
        prog="scalai-run",
        usage="scalai-run [flags] script [its arguments]",
        description="torchrun for jobs whose resources change while they run",
        parents=[get_args_parser()],
        add_help=False,  # torchrun's has one
    )
    for action in parser._actions:  # argparse has no public way to make a positional optional
        if action.dest == "training_script":
            # --check-elastic needs no script; parse_options asks for one otherwise.
            action.nargs, action.required = "?", False
        elif action.dest == "max_restarts" and "PET_MAX_RESTARTS" not in os.environ:
            action.default = None  # torchrun's 0 cannot be told from a 0 that was given
        elif action.dest == "master_port" and "PET_MASTER_PORT" not in os.environ:
            action.default = None  # torchrun's 29500 (before torch 2.12) neither
    return parser


def build_parser() -> Parser:
    """Return torchrun's parser with our flags added; every flag may be written with - or _."""
    parser = _torchruns_parser()
    version = f"scalai {importlib.metadata.version('scalai')}"
    parser.add_argument("--version", action="version", version=version)
    group = parser.add_argument_group("elastic training")

    def add(flag: str, *more: str, **settings: object) -> None:
        spellings = dict.fromkeys(
            s for f in (flag, *more) for s in (f, "--" + f[2:].replace("-", "_"))
        )
        group.add_argument(*spellings, **settings)  # type: ignore[arg-type]  # argparse's overloads

    parser._get_option_tuples = _unless_ambiguous(  # type: ignore[assignment, method-assign]
        parser._get_option_tuples
    )
    _add_job(add)
    _add_state(add)
    _add_changes(add)
    _add_machines(add)
    add_removed_flags(parser)
    return parser


def _unless_ambiguous(
    matches: Callable[[str], list[Any]],
) -> Callable[[str], list[Any]]:
    """Let an abbreviation of several flags be none: argparse looks at the script's own flags, too,
    and a script may have ``--log`` or ``--metrics``."""

    def found(text: str) -> list[Any]:
        known = matches(text)
        return known[:1] if len({id(each[0]) for each in known}) == 1 else []

    return found


def _add_job(add: Callable[..., None]) -> None:
    """Which job, and which host of it."""
    add("--elastic", metavar="CONFIG", 
        help="elastic configuration: TOML, or a DeepSpeed configuration with a block "
        '"scalai"; makes the job elastic')  # fmt: skip
    # SUPPRESS: an alias that is not given must not undo the default of the flag it stands for.
    add("--coordinator", dest="rdzv_endpoint", metavar="HOST:PORT|slurm", default=argparse.SUPPRESS,
        help="where the coordinator is; the same as --rdzv-endpoint. slurm: on the first "
        "host of Slurm's allocation")  # fmt: skip
    add("--coordinator-lease", metavar="file:/FOLDER|etcd:URL|kubernetes:|none",
        help="register of the job's coordinator, within reach of all hosts; after "
        "the loss of its host "
        "another host takes over (default: the job's folder in --durable-dir); none: nobody "
        "takes over")  # fmt: skip
    add("--job", dest="rdzv_id", metavar="NAME", default=argparse.SUPPRESS,
        help="name of the job; the same as --rdzv-id")  # fmt: skip
    add("--hostfile", metavar="FILE",
        help="DeepSpeed's host file: the hosts, and the workers of this one")  # fmt: skip
    add("--include", metavar="HOST[:SLOT,...]@...", help="hosts and slots of the host file to use")
    add(
        "--exclude",
        metavar="HOST[:SLOT,...]@...",
        help="hosts and slots of the host file to leave out",
    )
    add("--host-id", metavar="NAME",
        help="name of this host in the job (default: its host name; in Slurm the "
        "node's)")  # fmt: skip
    add("--port-range", type=_ports, metavar="LOW-HIGH",
        help="ports for what listens on this host: a coordinator without a named port, the data "
        "plane, the workers' stores (default: the kernel's choice); 5 or more, and one more for "
        "each further agent of one address")  # fmt: skip


def _add_state(add: Callable[..., None]) -> None:
    """Where the job's state lies, and what it outlives."""
    add("--store-dir", metavar="DIR", help="folder of the Tensor Store (default: in /dev/shm)")
    add(
        "--store-budget-gb",
        type=float,
        metavar="GB",
        help="most memory of the store, present use included",
    )
    add("--durable-dir", metavar="DIR",
        help="folder on a disk for states that outlive all hosts: the last host's "
        "at its drain, and "
        "newer ones on the way; only this user may write to it")  # fmt: skip
    add("--durable-every", dest="durable_every_s", type=float, metavar="S",
        help="seconds between two generations in --durable-dir (default: 1800); 0: only the last "
        "host's")  # fmt: skip
    add("--snapshot-every", type=_every, metavar="STEPS|auto",
        help="steps between two generations; auto (the default): the interval of "
        "least lost time; 0: "
        "only at the start and at changes")  # fmt: skip
    add("--replicas", type=int, metavar="N",
        help="other hosts with a copy of this host's own shards (default: 1); as many hosts may be "
        "lost with their memory")  # fmt: skip
    add("--domain", metavar="NAME",
        help="failure domain of this host, such as rack=7: its replicas go to other "
        "domains")  # fmt: skip


def _add_changes(add: Callable[..., None]) -> None:
    """When resources change, and to what."""
    add("--settle-s", type=float, metavar="S",
        help="seconds of waiting after a host joins, to make several joins one change")  # fmt: skip
    add("--drain-timeout", "--drain-timeout-s", dest="drain_timeout", type=float, metavar="S",
        help="most seconds between SIGTERM and exit")  # fmt: skip
    add("--drained-exit-code", type=_exit_code, default=0, metavar="N",
        help="exit code of a host that drains while the others go on (default: 0)")  # fmt: skip
    add("--silent-s", type=float, metavar="S",
        help="seconds of an agent's silence before its host counts as lost "
        "(default: 15, at least 3)")  # fmt: skip
    add("--allowed-sizes", type=_sizes, metavar="N,N,...",
        help="world sizes that may be used, such as 2,4,8-12")  # fmt: skip
    add("--min-model-parallel", type=int, metavar="N", help="smallest TP*PP that fits in memory")
    add("--planner", choices=PLANNERS,
        help="choice of degrees without a request: keep: the present ones; cost: "
        "the fastest by the "
        "model of time; auto (the default): cost, after the job has measured two "
        "layouts")  # fmt: skip
    add("--probe", type=_probe, metavar="nvidia-smi|command:CMD|file:PATH|none",
        help="source of the number of working devices of this host")  # fmt: skip
    add("--preemption", type=_notice_sources, metavar="SOURCE,...",
        help="sources of notice before this host is taken away: signal (SIGUSR1; the default), "
        "slurm (drain of this node, end of this job), file:PATH, aws, gcp, azure; or "
        "none")  # fmt: skip
    add("--health-check", metavar="CMD",
        help="command (no shell) with exit code 0 if this host may run workers; run "
        "before the first "
        "worker and after a failure on this host")  # fmt: skip
    add(
        "--report-dir",
        metavar="DIR",
        help="folder for events.jsonl and the JSON report of each resize",
    )
    add("--fresh", dest="is_fresh", action="store_true",
        help="begin anew and give up the job's state; on every host")  # fmt: skip
    add("--check-elastic", action="store_true",
        help="print the axes free to change and the degrees for every world, and exit")  # fmt: skip
    add("--json", dest="is_json", action="store_true", help="with --check-elastic: one JSON object")


def _add_machines(add: Callable[..., None]) -> None:
    """What machines read of the job, and one way to steer it; all at the coordinator."""
    add("--metrics-port", type=_port, metavar="PORT",
        help="serve Prometheus metrics at the coordinator's address, without a token; 0: a free "
        "port, in the log")  # fmt: skip
    add(
        "--metrics-file",
        metavar="FILE.prom",
        help="write the metrics there each 10 s, for node_exporter's textfile collector",
    )
    add(
        "--on-event",
        type=_command,
        metavar="CMD",
        help="command (no shell) for each important event, as JSON on its standard input",
    )
    add("--log-format", choices=("text", "json"), default="text",
        help="form of Scalai's own log lines (default: text)")  # fmt: skip
    add("--log-level", choices=("debug", "info", "warning"), default="info",
        help="lowest level of these lines (default: info); debug: parts of a change")  # fmt: skip
    add("--control-file", metavar="FILE",
        help="file with an order to the job: scale, drain HOST or snapshot; who may write it "
        "controls the job")  # fmt: skip


CONFIG_KEYS = {
    "store_dir": "store.dir",
    "store_budget_gb": "store.budget_gb",
    "durable_dir": "store.durable_dir",
    "durable_every_s": "store.durable_every_s",
    "snapshot_every": "store.snapshot_every",
    "replicas": "store.replicas",
    "preemption": "preemption.sources",
    "settle_s": "resize.settle_s",
    "drain_timeout": "resize.drain_timeout_s",
    "silent_s": "resize.silent_s",
    "health_check": "probe.health_check",
    "planner": "planner.kind",
    "allowed_sizes": "resize.allowed_sizes",
    "min_model_parallel": "resize.min_model_parallel",
}


def _overrides(flags: argparse.Namespace) -> dict[str, object]:
    given = {
        dotted: getattr(flags, name)
        for name, dotted in CONFIG_KEYS.items()
        if getattr(flags, name) is not None
    }
    return {**given, **(flags.probe or {})}


def _take_elastic(script_args: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """Return the script's arguments without ``--elastic CONFIG``, and the CONFIG."""
    rest: list[str] = []
    config: str | None = None
    arguments = iter(script_args)
    for argument in arguments:
        if argument == "--elastic":
            value = next(arguments, None)
            if value is None:
                raise UsageError("--elastic needs the path of a configuration behind it.")
        elif argument.startswith("--elastic="):
            value = argument.partition("=")[2]
        else:
            rest.append(argument)
            continue
        if config is not None:
            raise UsageError(f"--elastic is given twice ({config} and {value}); keep one.")
        config = value
    return tuple(rest), config


def _check(flags: argparse.Namespace) -> None:
    if flags.training_script is None and not flags.check_elastic:
        raise UsageError("no training script is given; name one behind the flags.")
    if flags.no_python:
        raise UsageError(
            "--no-python: an elastic worker is a Python program, because the framework is hooked "
            "inside it. Name a Python script, or -m MODULE."
        )
    if flags.metrics_port is not None or flags.metrics_file is not None:
        _check_metrics()
    for name in (
        "logs_specs", "numa_binding", "duplicate_stdout_filters", "duplicate_stderr_filters",
    ):  # fmt: skip
        if getattr(flags, name, None):
            raise UsageError(f"--{name.replace('_', '-')} is not supported; leave it out.")
    if getattr(flags, "virtual_local_rank", False):
        raise UsageError("--virtual-local-rank is not supported; leave it out.")
    if flags.rdzv_backend not in _TORCH_RENDEZVOUS:
        raise UsageError(
            f"--rdzv-backend {flags.rdzv_backend}: the coordinator is the rendezvous. Leave the "
            "flag out and name the coordinator by --coordinator HOST:PORT."
        )
    try:
        parse_signals(flags.signals_to_handle)
    except ValueError as error:
        raise UsageError(f"--signals-to-handle {flags.signals_to_handle}: {error}.") from error
    for name in ("redirects", "tee"):
        try:
            Std.from_str(getattr(flags, name))
        except ValueError as error:
            raise UsageError(
                f"--{name} {getattr(flags, name)} is neither 0, 1, 2 nor 3 (none, output, error, "
                "both), nor such a number for local ranks: 0:1,1:3."
            ) from error
    if flags.max_restarts is not None and flags.max_restarts < 0:
        raise UsageError(f"--max-restarts {flags.max_restarts} is negative; use 0 or more.")


def _shown_ranks(flags: argparse.Namespace) -> tuple[int, ...]:
    """Local ranks of torchrun's ``--local-ranks-filter``; empty: all."""
    given = getattr(flags, "local_ranks_filter", None) or ""
    try:
        return tuple(sorted({int(rank) for rank in given.split(",")})) if given else ()
    except ValueError:
        raise UsageError(
            f"--local-ranks-filter {given} is no list of local ranks, such as 0,1."
        ) from None


def _check_metrics() -> None:
    if importlib.util.find_spec("prometheus_client") is None:
        raise RefusedError(
            "--metrics-port and --metrics-file need the package prometheus-client. Install it on "
            "every host: pip install 'scalai[metrics]'."
        )


def _node_range(nnodes: str) -> tuple[int, int]:
    low, _, high = nnodes.partition(":")
    try:
        least, most = int(low), int(high or low)
    except ValueError:
        raise UsageError(f"--nnodes {nnodes} is neither N nor MIN:MAX.") from None
    if not 1 <= least <= most:
        raise UsageError(f"--nnodes {nnodes}: expected 1 <= MIN <= MAX.")
    return least, most


def _coordinator(flags: argparse.Namespace) -> str | None:
    if flags.standalone:
        return None
    if flags.rdzv_endpoint:
        return slurm.endpoint(str(flags.rdzv_endpoint))
    # torchrun's static rendezvous: node 0 is at --master-addr, and here it runs the coordinator.
    # Without either flag all agents are on this machine, and find it by the job's name.
    is_named = flags.master_addr not in ("127.0.0.1", "localhost")
    if is_named or flags.master_port is not None:
        return join_endpoint(flags.master_addr, flags.master_port or DEFAULT_MASTER_PORT)
    return None


def _sizes(text: str) -> tuple[int, ...]:
    """Read ``2,4,8-12``."""
    sizes: set[int] = set()
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        if not low.isdecimal() or (high and not high.isdecimal()):
            raise argparse.ArgumentTypeError(f"{part!r} is neither a number nor LOW-HIGH")
        sizes.update(range(int(low), int(high or low) + 1))
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} names no world size of 1 or more")
    return tuple(sorted(sizes))


def _every(text: str) -> int | str:
    if text == AUTO or text.isdecimal():
        return text if text == AUTO else int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a number of steps nor {AUTO}")


def _port(text: str) -> int:
    if text.isdecimal() and int(text) < 1 << 16:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no port (0 to 65535)")


def _command(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no command: {error}") from error
    if not words:
        raise argparse.ArgumentTypeError("the command is empty")
    return text


def _exit_code(text: str) -> int:
    if text.isdecimal() and int(text) < 256:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no exit code (0 to 255)")


def _notice_sources(text: str) -> tuple[str, ...]:
    sources = () if text == "none" else tuple(part.strip() for part in text.split(","))
    try:
        for source in sources:
            parse_source(source)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return sources


def _ports(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high) <= HIGHEST_PORT):
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW-HIGH, 1 to {HIGHEST_PORT}")
    if int(high) - int(low) + 1 < FEWEST_PORTS:
        raise argparse.ArgumentTypeError(
            f"{text!r} has fewer than {FEWEST_PORTS} ports: a coordinator's, an agent's, and three "
            "for stores at a change"
        )
    return int(low), int(high)


def _probe(text: str) -> dict[str, object]:
    kind, _, value = text.partition(":")
    if kind in ("nvidia-smi", "none") and not value:
        return {"probe.kind": kind}
    if kind in ("command", "file") and value:
        return {"probe.kind": kind, f"probe.{kind}": value}
    raise argparse.ArgumentTypeError(
        f"{text!r} is none of nvidia-smi, command:CMD, file:PATH, none"
    )
