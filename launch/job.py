"""What a job is: the same for all its agents, and what the coordinator decides by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalai.launch.elastic_config import ElasticConfig, parse_config, read_text
from scalai.launch.options import Options, parse_options
from scalai.launch.script import ScriptFacts, read_script

Json = Any

COMPARED = (
    "script",
    "script_args",
    "is_module",
    "job",
    "min_nodes",
    "max_nodes",
    "max_restarts",
    "elastic_text",
)
"""What all agents of a job must have in common; the rest (names, folders, log files) is a host's
own affair."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job as its command line and its elastic configuration state it.

    ``argv`` and ``elastic_text`` are what a person gave; everything else follows from them, on
    every process alike.
    """

    argv: tuple[str, ...]
    elastic_text: str | None
    options: Options
    config: ElasticConfig

    @classmethod
    def read(cls, argv: Sequence[str]) -> "JobSpec":
        """Read a command line of ``scalai-run`` and the file that its ``--elastic`` names."""
        options = parse_options(argv)
        text = None if options.elastic is None else read_text(options.elastic)
        return cls._of(tuple(argv), text, options)

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> "JobSpec":
        """Read what ``to_json`` wrote, without any file."""
        return cls._of(tuple(data["argv"]), data["elastic_text"], parse_options(data["argv"]))

    @classmethod
    def _of(cls, argv: tuple[str, ...], text: str | None, options: Options) -> "JobSpec":
        config = parse_config(text, options.elastic or "flags", options.overrides)
        return cls(argv, text, options, config)

    def to_json(self) -> Json:
        return {"argv": list(self.argv), "elastic_text": self.elastic_text}

    @property
    def job(self) -> str:
        return self.options.job

    @property
    def min_hosts(self) -> int:
        return self.options.min_nodes

    @property
    def max_hosts(self) -> int:
        return self.options.max_nodes

    @property
    def max_restarts(self) -> int:
        return self.options.max_restarts

    @property
    def settle_s(self) -> float:
        return self.config.resize.settle_s

    @property
    def store_dir(self) -> Path | None:
        folder = self.config.store.dir
        return Path(folder) if folder else None

    @property
    def store_budget_bytes(self) -> int | None:
        budget = self.config.store.budget_gb
        return None if budget is None else int(budget * 1e9)

    @property
    def durable_dir(self) -> Path | None:
        folder = self.config.store.durable_dir
        return Path(folder) if folder else None

    @property
    def report_dir(self) -> Path | None:
        return Path(self.options.report_dir) if self.options.report_dir else None

    @property
    def is_elastic(self) -> bool:
        """Whether the frameworks are hooked and the state is carried."""
        return self.elastic_text is not None

    @property
    def script(self) -> ScriptFacts:
        """What the script's own flags and the configuration say of the model, before anything
        runs."""
        if not self.is_elastic:
            return ScriptFacts(self.config.model, self.config.policy())
        return read_script(self.options, self.config)

    def difference(self, other: "JobSpec") -> str | None:
        """Say in what another agent's job differs from this one, None where it is the same."""
        for name in COMPARED:
            mine = self.elastic_text if name == "elastic_text" else getattr(self.options, name)
            its = other.elastic_text if name == "elastic_text" else getattr(other.options, name)
            if mine != its:
                return f"{name.replace('_', ' ')} is {its!r}, the job's is {mine!r}"
        return None
