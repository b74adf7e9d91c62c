"""DeepSpeed's experts (``deepspeed.moe.layer.MoE``): their names, files and expert-parallel ranks.

An expert has its number in the layer in its own file, its number on the rank in optimizers.
Expert-parallel rank ``r`` of ``ep`` has the experts from ``r * count / ep`` on. The data-parallel
ranks ``r``, ``r + ep``, ... have the same experts and share their flat buffers.

Source: ``_save_moe_checkpoint`` and ``load_moe_state_dict`` of deepspeed/runtime/engine.py,
``_get_expert_parallel_ranks`` of utils/groups.py, 0.19.8. Their files:

    layer_<l>_expert_<e>_mp_rank_00_model_states.pt   the weights of one expert
    expp_rank_<r>_mp_rank_00_optim_states.pt          without ZeRO: an expert-parallel rank's
                                                      optimizer

``l`` counts the layers with experts, ``e`` the experts of a layer.

Source: ``_get_expert_ckpt_name`` and ``_get_optimizer_ckpt_name`` of deepspeed/runtime/engine.py,
0.19.8.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalai.core.errors import RefusedError

_EXPERT = re.compile(
    r"(?P<layer>.*)\.deepspeed_moe\.experts\.deepspeed_experts\.(?P<number>\d{1,9})(?P<rest>\..*)"
)
_FILE = re.compile(
    r"(?:layer_(?P<layer>\d+)_expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states"
    r"|expp_rank_(?P<rank>\d+)_mp_rank_(?P<optimizer_mp>\d+)_optim_states)\.pt"
)
_OLD = re.compile(r"expert_\d+_mp_rank_\d+_model_states\.pt")


@dataclass(frozen=True, slots=True)
class Name:
    """A parameter's name in parts: the layer, the expert's number, the rest."""

    layer: str
    number: int
    rest: str

    def __str__(self) -> str:
        return f"{self.layer}.deepspeed_moe.experts.deepspeed_experts.{self.number}{self.rest}"


def expert_of(name: str) -> Name | None:
    """Take an expert's name apart; None: the name is of no expert."""
    found = _EXPERT.fullmatch(name)
    return Name(found["layer"], int(found["number"]), found["rest"]) if found else None


def model_file(layer: int, expert: int) -> str:
    """Return the name of an expert's file."""
    return f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"


def optimizer_file(ep_rank: int) -> str:
    """Return the name of an expert-parallel rank's optimizer file, without ZeRO."""
    return f"expp_rank_{ep_rank}_mp_rank_00_optim_states.pt"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The files of experts in a tag.

    Attributes:
        model: Files by the place of the layer and the expert's number.
        optimizers: Files by expert-parallel rank, without ZeRO.
    """

    model: Mapping[tuple[int, int], str]
    optimizers: tuple[str, ...]

    @classmethod
    def of(cls, directory: Path, names: Iterable[str]) -> "ExpertNames":
        """Find them among the names of a tag's files.

        Raises:
            RefusedError: A file is missing, or of an unsupported kind.
        """
        layers: dict[int, dict[int, str]] = {}
        ranks: dict[int, str] = {}
        for name in names:
            if _OLD.fullmatch(name):
                raise RefusedError(
                    f"{directory} holds experts in files that do not name their layer ({name}), "
                    "as old releases wrote them. Load it in DeepSpeed and save it again."
                )
            match = _FILE.fullmatch(name)
            if match is None:
                continue
            if int(match["mp"] or match["optimizer_mp"]):
                raise RefusedError(
                    f"{directory} holds experts of several model-parallel ranks ({name}), which "
                    "are not read. Load it in DeepSpeed at the degrees that saved it."
                )
            is_model = match["expert"] is not None
            into = layers.setdefault(int(match["layer"]), {}) if is_model else ranks
            number = int(match["expert"] if is_model else match["rank"])
            if number in into:
                raise RefusedError(
                    f"{directory} has {into[number]} and {name}: files of two checkpoints are "
                    "mixed. Remove those of one."
                )
            into[number] = name
        firsts = {layer: next(iter(of.values())) for layer, of in layers.items()}
        check_numbers(directory, "layer with experts", firsts)
        for layer, of in layers.items():
            check_numbers(directory, f"expert (of layer {layer})", of)
        check_numbers(directory, "expert-parallel rank", ranks)
        model = {(at, number): name for at, of in layers.items() for number, name in of.items()}
        return cls(model, tuple(ranks[rank] for rank in sorted(ranks)))


NO_EXPERTS = ExpertNames({}, ())


def check_numbers(directory: Path, what: str, names: Mapping[int, str]) -> None:
    """Refuse a gap in numbers from 0 on."""
    missing = next((at for at, number in enumerate(sorted(names)) if number != at), None)
    if missing is not None:
        like = next(iter(names.values()))
        raise RefusedError(
            f"{directory} has no file of {what} {missing} (of {max(names) + 1}, as {like}). "
            "Copy the missing files of the same save, or use another checkpoint."
        )


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
