"""How many steps the base optimizer has made for each parameter.

Adam corrects its bias by it. DeepSpeed keeps one number for all parameters of a flat buffer, the
base optimizer one for each parameter that it is given; so it is carried by the parameter's name.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from scalai.core.errors import RefusedError
from scalai.patches.deepspeed.engine.masters import Master, Names, vouched_parts

STEP = "step"
"""The name of the entry in an optimizer's state."""


def take_steps(masters: Sequence[Master], names: Names) -> dict[str, float]:
    """Return the steps of the parameters of this rank, by name."""
    # FusedAdam counts for the last parameter of a group alone, and uses that for all.
    newest: dict[int, int] = {}
    for master in masters:
        count = master.state.get(STEP)
        if isinstance(count, int):
            newest[id(master.group)] = max(count, newest.get(id(master.group), 0))
    counts = _read(master.state[STEP] for master in masters if STEP in master.state)
    return {
        name: float(newest.get(id(master.group), counts[id(master.state[STEP])]))
        for name, master in vouched_parts(masters, names)
        if STEP in master.state
    }


def _read(entries: Iterable[Any]) -> dict[int, float]:
    """Return numbers and tensors of one element as numbers, by identity. Each device is asked once,
    because an answer waits for what is queued there."""
    found = {id(entry): entry for entry in entries}
    tensors = defaultdict[torch.device, dict[int, torch.Tensor]](dict)
    for key, entry in found.items():
        if isinstance(entry, torch.Tensor):
            tensors[entry.device][key] = entry.detach().double().reshape(())
    for of_device in tensors.values():
        found |= dict(zip(of_device, torch.stack([*of_device.values()]).tolist(), strict=True))
    return {key: float(entry) for key, entry in found.items()}


def put_steps(steps: Mapping[str, float], masters: Sequence[Master], names: Names) -> None:
    """Set the steps that ``take_steps`` returned, of all ranks.

    Raises:
        RefusedError: Parameters that are in one buffer here have made unequal numbers of steps, or
            there is none for a parameter.
    """
    for master in masters:
        if STEP not in master.state:
            continue
        members = [names[fragment.parameter] for fragment in master.fragments]
        found = {steps[name]: name for name in members if name in steps}
        missing = [name for name in members if name not in steps]
        if len(found) > 1 or missing:
            raise RefusedError(
                f"the optimizer keeps one number of steps for {len(members)} parameters here, and "
                f"they have made {_text(found, missing)}. Go on with the ZeRO stage and the "
                "parameter groups that the job had."
            )
        for count in found:
            _set(master.state, count)


def _set(state: dict[str, Any], count: float) -> None:
    if isinstance(state[STEP], torch.Tensor):
        state[STEP].fill_(count)
    else:
        state[STEP] = int(count)


def _text(found: Mapping[float, str], missing: Sequence[str]) -> str:
    parts = [f"{count:g} ({name})" for count, name in sorted(found.items())]
    return ", ".join([*parts, *(f"an unknown number ({name})" for name in missing[:3])])
