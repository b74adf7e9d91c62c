"""What a job is: the same for all its agents, and what the coordinator decides by."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalai.converters.deepspeed.config import BLOCK, find_config, json_config
from scalai.launch.elastic_config import ElasticConfig
from scalai.launch.elastic_file import parse_config, read_text
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
    "deepspeed",
)
"""What all agents of a job must have in common; the rest (names, folders, log files) is a host's
own affair."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job as its command line and its elastic configuration state it.

    ``argv``, ``elastic_text`` and ``deepspeed`` are what a person gave; everything else follows
    from them, on every process alike. ``elastic_text`` is TOML, or JSON where it comes from a
    DeepSpeed configuration; ``deepspeed`` is that configuration, None where the script's arguments
    name none.
    """

    argv: tuple[str, ...]
    elastic_text: str | None
    options: Options
    config: ElasticConfig
    deepspeed: Mapping[str, Json] | None = None

    @classmethod
    def read(cls, argv: Sequence[str]) -> "JobSpec":
        """Read a command line of ``scalai-run`` and the files that it names."""
        options = parse_options(argv)
        named = given = find_config(options.script_args)
        text, name = None, "flags"
        if options.elastic is not None:
            text, name = read_text(options.elastic), options.elastic
            given = json_config(text, name)
        if given is not None and given.block is not None:
            text, name = json.dumps(given.block), given.name
        found = named or given
        return cls._of(tuple(argv), text, name, options, found.content if found else None)

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> "JobSpec":
        """Read what ``to_json`` wrote, without any file."""
        options = parse_options(data["argv"])
        name = options.elastic or BLOCK
        return cls._of(tuple(data["argv"]), data["elastic_text"], name, options, data["deepspeed"])

    @classmethod
    def _of(
        cls,
        argv: tuple[str, ...],
        text: str | None,
        name: str,
        options: Options,
        deepspeed: Mapping[str, Json] | None,
    ) -> "JobSpec":
        config = parse_config(text, name, options.overrides)
        return cls(argv, text, options, config, deepspeed)

    def to_json(self) -> Json:
        return {
            "argv": list(self.argv),
            "elastic_text": self.elastic_text,
            "deepspeed": self.deepspeed,
        }

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
        return read_script(self.options, self.config, self.deepspeed)

    def hook_settings(self, world_size: int) -> Json:
        """Return what the frameworks' hooks have to know of the configuration, on so many ranks."""
        deepspeed = self.config.deepspeed
        return {
            "zero_stage": deepspeed.stage_on(world_size),
            "data_order": deepspeed.data_order,
            "cuts": deepspeed.cuts,
        }

    def difference(self, other: "JobSpec") -> str | None:
        """Say in what another agent's job differs from this one, None where it is the same."""
        for name in COMPARED:
            of_spec = name in ("elastic_text", "deepspeed")
            mine, its = (getattr(of if of_spec else of.options, name) for of in (self, other))
            if mine != its:
                return f"{name.replace('_', ' ')} is {its!r}, the job's is {mine!r}"
        return None
