"""DeepSpeed's experts: their expert-parallel ranks, and their names there.

An expert has its number in the layer in its own file, its number on the rank in optimizers.
Expert-parallel rank ``r`` of ``ep`` has the experts from ``r * count / ep`` on. The data-parallel
ranks ``r``, ``r + ep``, ... have the same experts and share their flat buffers.

Source: ``_save_moe_checkpoint`` and ``load_moe_state_dict`` of deepspeed/runtime/engine.py,
``_get_expert_parallel_ranks`` of utils/groups.py, 0.19.8.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scalai.converters.deepspeed.shards.expert_names import Name, expert_of
from scalai.core.errors import RefusedError

MAX_GROUP_ELEMENTS = 178_956_971
"""Elements of an expert group on a rank: DeepSpeed's default ``max_group_size``."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with experts: its module's name, the entries of each expert, and their number."""

    name: str
    entries: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Experts:
    """The layers with experts, in the order of their files."""

    layers: tuple[Layer, ...]

    def counts(self) -> dict[str, int]:
        """Return the number of experts by layer."""
        return {layer.name: layer.count for layer in self.layers}

    def check(self, ep: int, dp: int) -> None:
        """Check the degrees.

        Raises:
            RefusedError: ``ep`` does not divide the experts, or the data-parallel ranks.
        """
        for layer in self.layers:
            if layer.count % ep:
                raise RefusedError(
                    f"ep={ep} does not divide the {layer.count} experts of {layer.name}. Choose "
                    "another --ep."
                )
        if dp % ep:
            raise RefusedError(
                f"ep={ep} does not divide dp={dp}: DeepSpeed's expert-parallel ranks are "
                "data-parallel ones. Choose another --ep or --dp."
            )

    def is_on(self, name: str, ep: int, ep_rank: int) -> bool:
        """Tell whether an expert-parallel rank has a parameter; every rank has those outside
        experts."""
        expert = expert_of(name)
        return expert is None or expert.number // self._each(expert, ep) == ep_rank

    def local(self, name: str, ep: int) -> str:
        """Return a parameter's name on its rank."""
        expert = expert_of(name)
        if expert is None:
            return name
        return str(replace(expert, number=expert.number % self._each(expert, ep)))

    def whole(self, name: str, ep: int, ep_rank: int) -> str:
        """Return the name in the whole model for a rank's name."""
        expert = expert_of(name)
        if expert is None:
            return name
        return str(replace(expert, number=expert.number + ep_rank * self._each(expert, ep)))

    def widen(self, names: Sequence[str], ep: int) -> tuple[str, ...]:
        """Return the names of all experts, in the order of a rank's own.

        Raises:
            RefusedError: They are neither expert by expert nor kind by kind.
        """
        wide: list[str] = []
        for layer, run in _runs(names):
            wide.extend(run if layer is None else self._widen(layer, run, ep))
        return tuple(wide)

    def _each(self, expert: Name, ep: int) -> int:
        return self.counts().get(expert.layer, ep) // ep

    def _widen(self, layer: str, names: Sequence[str], ep: int) -> list[str]:
        found = [expert_of(name) for name in names]
        pairs = [(expert.number, expert.rest) for expert in found if expert]
        numbers, rests = (list(dict.fromkeys(column)) for column in zip(*pairs, strict=True))
        count = self.counts().get(layer, 0)
        if numbers != list(range(count // ep)):
            raise RefusedError(
                f"an optimizer's rank has experts {numbers[:8]} of {layer}, and the first "
                f"{count // ep} of {count} are expected at ep={ep}. Use another checkpoint."
            )
        if pairs == [(number, rest) for number in numbers for rest in rests]:
            return [str(Name(layer, at, rest)) for at in range(count) for rest in rests]
        if pairs == [(number, rest) for rest in rests for number in numbers]:
            return [str(Name(layer, at, rest)) for rest in rests for at in range(count)]
        raise RefusedError(
            f"the optimizer has the parameters of {layer} neither expert by expert nor kind by "
            f"kind (first {names[0]}), so their order at another degree is not known. Give them "
            "to the optimizer in the module's order."
        )


def _runs(names: Sequence[str]) -> Iterator[tuple[str | None, list[str]]]:
    run: list[str] = []
    before: str | None = None
    for name in names:
        expert = expert_of(name)
        layer = expert.layer if expert else None
        if run and layer != before:
            yield before, run
            run = []
        run.append(name)
        before = layer
    if run:
        yield before, run


Groups = list[tuple[str, ...]]
"""Names of parameters by parameter group."""


def split_groups(
    groups: Sequence[Sequence[str]], sizes: Mapping[str, int]
) -> tuple[Groups, list[int]]:
    """Split groups of experts as DeepSpeed does, by the elements on a rank.

    Source: ``split_params_into_different_moe_groups_for_optimizer`` of deepspeed/moe/utils.py.

    Returns:
        The groups, and the number of each one's original.
    """
    split: Groups = []
    origins = []
    for origin, names in enumerate(groups):
        parts: list[list[str]] = [[]]
        held = 0
        for name in names:
            if expert_of(name) and parts[-1] and held + sizes[name] > MAX_GROUP_ELEMENTS:
                parts.append([])
                held = 0
            parts[-1].append(name)
            held += sizes[name]
        split.extend(map(tuple, parts))
        origins.extend([origin] * len(parts))
    return split, origins


def unite_groups(
    groups: Sequence[Sequence[str]],
    values: Sequence[Mapping[str, Any]],
    sizes: Mapping[str, int],
) -> tuple[Groups, list[Mapping[str, Any]]]:
    """Undo ``split_groups``: unite successive expert groups of equal values, if it would split them
    again alike."""
    united: Groups = []
    kept: list[Mapping[str, Any]] = []
    parts: Groups = []
    for names, value in zip(map(tuple, groups), values, strict=True):
        is_more = kept and value.get("moe") and _bare(value) == _bare(kept[-1])
        if is_more and split_groups([united[-1] + names], sizes)[0] == [*parts, names]:
            united[-1] += names
            parts.append(names)
        else:
            united.append(names)
            kept.append(value)
            parts = [names]
    return united, kept


def _bare(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: entry for key, entry in value.items() if key != "params"}
