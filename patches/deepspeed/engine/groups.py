"""The hyperparameters of parameter groups, by the parameters that are in them.

Not by the groups' numbers: DeepSpeed drops groups that are empty, so on another stage of a pipeline
the same number may be another group.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json
from scalai.patches.deepspeed.engine.masters import Master, Names, vouched_parts
from scalai.patches.plain import all_plain, live


def take_groups(masters: Sequence[Master], names: Names) -> Json:
    """Return the hyperparameters of the groups of this rank, and which parameters are in which."""
    groups = {id(master.group): master.group for master in masters}
    values = {key: _values(group) for key, group in groups.items()}
    digests = {key: _digest(kept) for key, kept in values.items()}
    return {
        "values": {digests[key]: kept for key, kept in values.items()},
        "of": {name: digests[id(m.group)] for name, m in vouched_parts(masters, names)},
    }


def put_groups(saved: Mapping[str, Any], masters: Sequence[Master], names: Names) -> None:
    """Give the groups of this rank the hyperparameters that ``take_groups`` returned, of all ranks.

    Raises:
        RefusedError: Parameters that are in one group here were in groups with other values, or in
            none.
    """
    groups = {id(master.group): master.group for master in masters}
    for key, group in groups.items():
        members = [
            names[fragment.parameter]
            for master in masters
            if id(master.group) == key
            for fragment in master.fragments
        ]
        if members:
            _put(saved, group, members)


def _put(saved: Mapping[str, Any], group: dict[str, Any], members: Sequence[str]) -> None:
    found = {saved["of"].get(name): name for name in members}
    if len(found) != 1 or None in found:
        listed = [
            f"{name} in {'none' if digest is None else saved['values'].get(digest)}"
            for digest, name in found.items()
        ]
        raise RefusedError(
            f"parameters of one group here were in several before, or in none: "
            f"{'; '.join(listed)}. Give the optimizer the parameter groups that the job had."
        )
    (digest,) = found
    for key, value in saved["values"][digest].items():
        present, value = group.get(key), live(value)
        if isinstance(present, torch.Tensor):
            present.copy_(value)  # captured in a graph: keep its place
        else:
            group[key] = tuple(value) if isinstance(present, tuple) else value


def _values(group: Mapping[str, Any]) -> Json:
    kept = {key: value for key, value in group.items() if key != "params" and key[0] != "_"}
    return all_plain(kept, "parameter group")


def _digest(values: Json) -> str:
    """Name a group by what it says, equal on all ranks."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
