"""What the command line of ``scalai-run`` says, as values: an agent reads it
(``launch/config/flags.py``), and its coordinator is told."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace

from scalai.core.errors import MessageError, UsageError
from scalai.core.jsonable import Json
from scalai.runtime.codec import convert

DEFAULT_MASTER_PORT = 29500


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of one agent.

    Fields named like a torchrun flag mean what torchrun means, unless docs/cli.md says
    otherwise. None: not given.
    """

    script: str | None
    script_args: tuple[str, ...]
    min_nodes: int
    max_nodes: int
    nproc_per_node: str
    """A number, ``auto``, ``cpu`` or ``gpu``."""
    job: str
    coordinator: str | None
    """``host:port`` of the coordinator; None: this agent starts its own on a free port."""
    is_standalone: bool
    """Whether the job has this one agent, which joins no job that runs already."""
    max_restarts: int | None
    """Failures that the job survives; resizes are none."""
    role: str
    is_module: bool
    log_dir: str | None
    redirects: str
    tee: str
    shown_ranks: tuple[int, ...]
    """Local ranks whose output the console shows; empty: all."""
    local_addr: str | None
    signals_to_handle: str
    elastic: str | None = None
    """Path of the elastic configuration; None: the framework is not hooked."""
    coordinator_lease: str | None = None
    """Where it stands which coordinator the job has: ``file:/FOLDER``, ``etcd:URL`` or
    ``kubernetes:``; None: in the durable directory, if there is one; ``none``: nowhere, and only
    the host that ``coordinator`` names starts one."""
    host_id: str | None = None
    port_range: tuple[int, int] | None = None
    """First and last port for listeners of this host; None: the kernel's choice."""
    domain: str | None = None
    """What this host may fail together with, such as its rack; None: nothing."""
    drained_exit_code: int = 0
    """Exit code of a host that drains while the others go on."""
    report_dir: str | None = None
    """Folder of the reports and of ``events.jsonl``."""
    metrics_port: int | None = None
    """Port of the coordinator's metrics; 0: a free one."""
    metrics_file: str | None = None
    on_event: str | None = None
    """Command that gets each important event."""
    log_format: str = "text"
    log_level: str = "info"
    control_file: str | None = None
    """File whose changes are orders to the job."""
    is_check: bool = False
    is_json: bool = False
    """The report of ``is_check`` is JSON."""
    is_fresh: bool = False
    """Begin anew although there is a state of the job."""
    overrides: Mapping[str, object] = field(default_factory=dict)
    """Flags that overrule the elastic configuration, by dotted name (see ``load_config``)."""

    def to_json(self) -> Json:
        """Return plain values that ``json`` writes; ``from_json`` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> "Options":
        """Read what ``to_json`` wrote.

        Raises:
            UsageError: It is of another version: a field is missing, unknown or of another type.
        """
        unknown = sorted(set(data) - {known.name for known in fields(cls)})
        if unknown:
            raise UsageError(f"options {unknown} are not known here. Do the versions differ?")
        try:
            read = convert(data, cls)
        except MessageError as error:
            raise UsageError(str(error)) from error
        return replace(read, overrides={k: _live(v) for k, v in read.overrides.items()})


def _live(value: Json) -> Json:
    return tuple(value) if isinstance(value, list) else value
