"""The specification of a job, the same for all its agents and its coordinator."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scalai.converters.deepspeed.config import BLOCK, find_config, json_config, step_samples
from scalai.converters.megatron.arguments import is_megatron, scan, stated_batch
from scalai.core.dataset.table import DatasetTable
from scalai.core.degrees.batches import BatchRamp
from scalai.core.errors import ScalaiError
from scalai.core.job.spacing import FIRST_STEPS, Spacing
from scalai.core.jsonable import Json
from scalai.launch.config.constants import constant
from scalai.launch.config.elastic_config import AUTO, ElasticConfig, parse_config, read_text
from scalai.launch.config.options import Options
from scalai.launch.config.script_facts import ScriptFacts, read_script
from scalai.runtime.connections import ANY_PORT


def own_batch(
    script_args: Sequence[str], stated: int | None, deepspeed: Mapping[str, Json] | None = None,
    facts: Mapping[str, Json] | None = None,
) -> DatasetTable:  # fmt: skip
    """Return a table with the job's own global batch alone; empty if it is unknown or invalid.

    Args:
        script_args: Arguments of the script; Megatron-LM's flags state the batch.
        stated: Batch of ``[model]``, for other scripts.
        deepspeed: The DeepSpeed configuration; None: none.
        facts: Facts reported by the first workers.
    """
    batch: int | BatchRamp | None
    try:
        if is_megatron(script_args):
            batch = stated_batch(scan(script_args))
        else:
            told = (facts or {}).get("global_batch_size")
            of_deepspeed = None if deepspeed is None else step_samples(deepspeed)
            batch = stated or of_deepspeed or (told if type(told) is int else None)
        return DatasetTable.of_batch(batch)
    except ScalaiError:
        return DatasetTable()


COMPARED = (
    "script",
    "script_args",
    "is_module",
    "job",
    "min_nodes",
    "max_nodes",
    "max_restarts",
    "coordinator_lease",
    "elastic_text",
    "deepspeed",
)
"""Settings common to all agents of a job; names, folders and log files may differ by host."""


FAILURES = 3
"""Failures of workers allowed within an hour of training, for a job with a varying number of hosts
and without ``--max-restarts``."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job by its command line and elastic configuration.

    ``options``, ``elastic_text`` and ``deepspeed`` are the user's; all else follows from them,
    equally on every process. ``elastic_text`` is TOML, or JSON from a DeepSpeed configuration;
    ``deepspeed`` is the configuration named by the script's arguments, or None.
    """

    options: Options
    elastic_text: str | None
    config: ElasticConfig
    deepspeed: Mapping[str, Json] | None = None

    @classmethod
    def read(cls, options: Options) -> "JobSpec":
        """Read the files named by a command line."""
        named = given = find_config(options.script_args)
        text, name = None, "flags"
        if options.elastic is not None:
            text, name = read_text(options.elastic), options.elastic
            given = json_config(text, name)
        if given is not None and given.block is not None:
            text, name = json.dumps(given.block), given.name
        found = named or given
        return cls._of(options, text, name, found.content if found else None)

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> "JobSpec":
        """Read the output of ``to_json``, without any file."""
        options = Options.from_json(data["options"])
        name = options.elastic or BLOCK
        return cls._of(options, data["elastic_text"], name, data["deepspeed"])

    @classmethod
    def _of(
        cls,
        options: Options,
        text: str | None,
        name: str,
        deepspeed: Mapping[str, Json] | None,
    ) -> "JobSpec":
        config = parse_config(text, name, options.overrides)
        return cls(options, text, config, deepspeed)

    def to_json(self) -> Json:
        return {
            "options": self.options.to_json(),
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
    def failures(self) -> int:
        """Failures allowed: ``--max-restarts`` as in torchrun, else a few if hosts may come
        and go."""
        if self.options.max_restarts is not None:
            return self.options.max_restarts
        return FAILURES if self.is_loss_free else 0

    @property
    def is_loss_free(self) -> bool:
        """Whether the loss of a host is an ordinary change, without counting as a restart."""
        return self.options.max_restarts is None and self.min_hosts < self.max_hosts

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
    def spacing(self) -> Spacing:
        """Initial spacing of snapshots, in steps."""
        if not self.is_elastic:
            return Spacing()
        store, lead_s = self.config.store, 2.0 * self.config.resize.silent_s
        every, is_auto = store.snapshot_every, store.snapshot_every == AUTO
        steps = FIRST_STEPS if isinstance(every, str) else every
        return Spacing(steps, is_auto, constant("store.mtbf_hours_per_worker"), lead_s)

    @property
    def replicas(self) -> int:
        """Number of other hosts with copies of a host's state."""
        return self.config.store.replicas if self.is_elastic and self.max_hosts > 1 else 0

    @property
    def are_replicas_asked(self) -> bool:
        """Whether the user set the number of replicas; too little room for them is then an
        error."""
        return "store.replicas" in self.config.origin

    @property
    def durable_dir(self) -> Path | None:
        folder = self.config.store.durable_dir
        return Path(folder) if folder else None

    @property
    def ports(self) -> range:
        """Ports for listeners of this host without a named one."""
        given = self.options.port_range
        return ANY_PORT if given is None else range(given[0], given[1] + 1)

    @property
    def report_dir(self) -> Path | None:
        return Path(self.options.report_dir) if self.options.report_dir else None

    @property
    def is_fresh(self) -> bool:
        """Whether the job begins anew despite a stored state."""
        return self.options.is_fresh

    @property
    def is_elastic(self) -> bool:
        """Whether the frameworks are hooked and the state is carried."""
        return self.elastic_text is not None

    @property
    def script(self) -> ScriptFacts:
        """Facts about the model from the script's flags and the configuration, before the first
        start."""
        if not self.is_elastic:
            return ScriptFacts(self.config.model, self.config.policy())
        return read_script(self.options, self.config, self.deepspeed)

    def hook_settings(self, world_size: int) -> Json:
        """Return the configuration of the frameworks' hooks on ``world_size`` ranks."""
        deepspeed = self.config.deepspeed
        return {
            "zero_stage": deepspeed.stage_on(world_size),
            "zero_stages": dict(deepspeed.zero_stage),
            "data_order": deepspeed.data_order,
            "cuts": deepspeed.cuts,
        }

    def dataset(self, facts: Mapping[str, Json]) -> DatasetTable:
        """Return the job's statement of its data sets, for readers of its remains.

        Args:
            facts: Facts reported by its first workers.
        """
        stated = self.config.model.global_batch_size
        own = own_batch(self.options.script_args, stated, self.deepspeed, facts)
        return self.config.dataset.over(own)

    def difference(self, other: "JobSpec") -> str | None:
        """Return the difference of another agent's job from this one; None: the same."""
        for name in COMPARED:
            of_spec = name in ("elastic_text", "deepspeed")
            mine, its = (getattr(of if of_spec else of.options, name) for of in (self, other))
            if mine != its:
                return f"{name.replace('_', ' ')} is {its!r}, the job's is {mine!r}"
        return None
