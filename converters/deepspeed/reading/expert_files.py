"""Reads the weights of DeepSpeed's experts, from files of their own.

Source: ``_save_moe_checkpoint`` of deepspeed/runtime/engine.py, 0.19.8.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalai.converters.deepspeed.files import Tag, read_dictionary
from scalai.converters.deepspeed.shards.expert_names import Name, expert_of
from scalai.converters.deepspeed.shards.experts import Experts, Groups, Layer, unite_groups
from scalai.converters.torch_archive import StoredTensor
from scalai.core.errors import RefusedError


@dataclass(frozen=True, eq=False, slots=True)
class ExpertFiles:
    """The experts of a tag.

    Attributes:
        tensors: Tensors of all experts, by their names in the whole model.
        ep: Number of expert-parallel ranks.
        optimizers: Optimizer file by expert-parallel rank, without ZeRO.
    """

    experts: Experts
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, str]
    ep: int
    optimizers: tuple[str, ...]

    @classmethod
    def read(cls, tag: Tag, state: Mapping[str, Any], *, trust: bool) -> "ExpertFiles":
        """Read a tag's files of experts, if it has some.

        Args:
            state: Content of the model's first file.

        Raises:
            RefusedError: They are of an unsupported kind, or do not fit together.
        """
        if state.get("ds_autoep_layers") or state.get("autoep_layers"):
            raise RefusedError(
                f"{tag.directory} holds experts of AutoEP (expert_parallel in ds_config), whose "
                "fused weights are not read. Load it in DeepSpeed at the degrees that saved it."
            )
        if not tag.experts.model:
            return NO_EXPERT_FILES
        config = state.get("ds_config")
        if isinstance(config, dict) and config.get("use_data_before_expert_parallelism"):
            raise RefusedError(
                f"{tag.directory} was saved with use_data_before_expert_parallelism, whose order "
                "of ranks is not read. Load it in DeepSpeed at the degrees that saved it."
            )
        tensors: dict[str, StoredTensor] = {}
        files: dict[str, str] = {}
        layers: list[Layer] = []
        for place in sorted({place for place, _ in tag.experts.model}):
            numbers = [number for at, number in tag.experts.model if at == place]
            found = []
            for number in sorted(numbers):
                file = tag.experts.model[place, number]
                mine = _read_expert(tag.directory / file, number, trust)
                tensors.update(mine)
                files.update(dict.fromkeys(mine, file))
                found.append(_layer(tag.directory / file, mine, len(numbers)))
            if found != found[:1] * len(found):
                raise RefusedError(
                    f"{tag.directory} has experts of layer {place} that are not alike: files of "
                    "two checkpoints are mixed. Use another one."
                )
            if found[0].name in {layer.name for layer in layers}:
                raise RefusedError(
                    f"{tag.directory} has {found[0].name} as layer {place} and as another one: "
                    "files of two checkpoints are mixed. Use another one."
                )
            layers.append(found[0])
        experts = Experts(tuple(layers))
        ep = _degree(tag, experts, state)
        experts.check(ep, int(state["dp_world_size"]))
        return cls(experts, tensors, files, ep, tag.experts.optimizers)

    def degree(self) -> dict[str, int]:
        """Return ``ep``, if there are experts."""
        return {"ep": self.ep} if self.files else {}

    def widen(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return names of the whole model for those of expert-parallel rank 0. Raises as
        ``Experts.widen``."""
        return self.experts.widen(names, self.ep)

    def is_on(self, name: str, ep_rank: int) -> bool:
        """Tell whether an expert-parallel rank has a parameter."""
        return self.experts.is_on(name, self.ep, ep_rank)

    def whole_groups(
        self,
        groups: Sequence[Sequence[str]],
        values: Sequence[Mapping[str, Any]],
        sizes: Mapping[str, int],
    ) -> tuple[Groups, list[Mapping[str, Any]]]:
        """Return the parameter groups of the whole model, and their values.

        Args:
            groups, values: Groups and values of expert-parallel rank 0.
            sizes: Elements of its parameters.

        Raises:
            RefusedError: The order of experts is unknown; experts are with others in a group.
        """
        for names in groups:
            if len({expert_of(name) is None for name in names}) > 1:
                raise RefusedError(
                    f"{names[0]} is with experts in one parameter group, which DeepSpeed splits. "
                    "Use another checkpoint."
                )
        united, kept = [tuple(names) for names in groups], list(values)
        if values:  # elastic checkpoints have none
            united, kept = unite_groups(groups, values, sizes)
        return [self.widen(names) for names in united], kept

    def into(self, module: Mapping[str, Any]) -> OrderedDict[str, Any]:
        """Return a module's entries with those of experts in their places: after the gate of their
        layer."""
        gates = {}
        for key in module:
            layer, gate, _ = key.partition(".deepspeed_moe.")
            if gate:
                gates[layer] = key
        behind = {gate: layer for layer, gate in gates.items()}
        entries: OrderedDict[str, Any] = OrderedDict()
        for key, value in module.items():
            entries[key] = value
            for name in self._of(behind.get(key)):
                entries[name] = self.tensors[name]
        entries.update(self.tensors)  # those of a layer without a gate
        if getattr(module, "__dict__", None):
            entries.__dict__.update(module.__dict__)
        return entries

    def _of(self, layer: str | None) -> Iterator[str]:
        for of in self.experts.layers:
            if of.name == layer:
                for number in range(of.count):
                    yield from (str(Name(of.name, number, rest)) for rest in of.entries)


NO_EXPERT_FILES = ExpertFiles(Experts(()), {}, {}, 1, ())


def _read_expert(path: Path, number: int, trust: bool) -> dict[str, StoredTensor]:
    state = read_dictionary(path, trust=trust)
    for key, value in state.items():
        expert = expert_of(str(key))
        if expert is None or expert.number != number or not isinstance(value, StoredTensor):
            raise RefusedError(
                f"{path} holds {key!r} ({type(value).__name__}), and tensors of expert {number} "
                "are expected. Use another checkpoint."
            )
    if not state:
        raise RefusedError(f"{path} is of expert {number} and holds nothing of it.")
    return state


def _layer(path: Path, tensors: Mapping[str, StoredTensor], count: int) -> Layer:
    names = [name for name in map(expert_of, tensors) if name]
    if len({name.layer for name in names}) != 1:
        raise RefusedError(f"{path} has tensors of several layers, first {next(iter(tensors))}.")
    return Layer(names[0].layer, tuple(name.rest for name in names), count)


def _degree(tag: Tag, experts: Experts, state: Mapping[str, Any]) -> int:
    """Return the number of expert-parallel ranks: a layer's experts divided by one rank's."""
    if tag.experts.optimizers:
        return len(tag.experts.optimizers)
    counts = experts.counts()
    numbers: dict[str, set[int]] = {}
    for shapes in state.get("param_shapes") or ():
        for name in filter(None, map(expert_of, shapes)):
            numbers.setdefault(name.layer, set()).add(name.number)
    sizes = {counts.get(layer, 0) / len(of) for layer, of in numbers.items()}
    if len(sizes) != 1 or not next(iter(sizes)).is_integer() or 0 in sizes:
        raise RefusedError(
            f"{tag.directory} has experts of {len(experts.layers)} layers, of which a rank trains "
            f"one in {sorted(sizes) or 'none'}: layers of unequal expert-parallel sizes, or "
            "without trained experts, are not read. Load it in DeepSpeed at its own degrees."
        )
    return int(sizes.pop())
