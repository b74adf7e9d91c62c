"""DeepSpeed's model_states files: weights, buffers, and a job's names and values; experts' weights
are in files of their own.

Source: ``_common_checkpoint_state`` and ``_save_moe_checkpoint`` of deepspeed/runtime/engine.py,
0.19.8.
"""

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from scalai.converters.checkpoint import (
    PARAM,
    REPORT,
    CheckpointFile,
    FilePiece,
    Values,
    stored_files,
)
from scalai.converters.deepspeed.experts import (
    Experts,
    Groups,
    Layer,
    Name,
    expert_of,
    unite_groups,
)
from scalai.converters.deepspeed.flat import part_of
from scalai.converters.deepspeed.job import STATE, DeepSpeedJob, check_config
from scalai.converters.deepspeed.pipeline import unit_of
from scalai.converters.deepspeed.tag_files import Tag, carried, flatten, read_dictionary
from scalai.converters.torch_archive import StoredTensor
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import flat_range, whole


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


_MADE_ANEW = (
    "module", "frozen_param_fragments", "frozen_param_shapes", "param_shapes", "shared_params",
    "buffer_names", "optimizer",
)  # fmt: skip
"""Entries that a writer rebuilds."""
NEEDED = ("module", "param_shapes", "global_steps", "dp_world_size")
"""Entries of every file with ZeRO."""


@dataclass(frozen=True, eq=False, slots=True)
class ModelStates:
    """The files of one model-parallel rank: one, or in stage 3 one per data-parallel rank.

    ``has_layers``: the module's tensors lie in a pipeline's layer files, ``layer_files``.
    ``nesting``:
    paths in the module of tensors not under their names. ``experts``: the module's tensors in files
    of
    their own.
    """

    directory: Path
    files: tuple[str, ...]
    states: tuple[dict[str, Any], ...]
    is_stage_3: bool
    has_layers: bool = False
    nesting: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    experts: ExpertFiles = NO_EXPERT_FILES
    layer_files: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        directory: Path,
        files: Sequence[str],
        *,
        is_stage_3: bool,
        trust: bool,
        needed: Sequence[str] = NEEDED,
        layers: Mapping[str, StoredTensor] | None = None,
        shared: Mapping[str, str] | None = None,
        tag: Tag | None = None,
    ) -> "ModelStates":
        """Read the files; check that they are of one save and have the ``needed`` entries.

        ``layers``: tensors of a pipeline's layers by the engine's names; ``shared``: shared
        parameters by
        another rank's file; ``tag``: has the files of experts.

        Raises:
            RefusedError: They are of several saves, or not of an engine with ZeRO.
        """
        states = tuple(read_dictionary(directory / name, trust=trust) for name in files)
        nesting: dict[str, tuple[str, ...]] = {}
        experts = NO_EXPERT_FILES
        if tag is not None:
            experts = ExpertFiles.read(tag, states[0], trust=trust)
        for state in states:
            if layers is not None:
                state["module"] = _of_stage(state, layers)
            elif isinstance(state.get("module"), dict):
                trained = [name for of in state.get("param_shapes") or () for name in of]
                state["module"], nesting = flatten(state["module"], trained)
            if experts.files and isinstance(state.get("module"), dict):
                state["module"] = experts.into(state["module"])
            if shared is not None:
                state["shared_params"] = shared
        for name, state in zip(files, states, strict=True):
            check_config(state.get("ds_config"), str(directory / name))
            _check_entries(directory / name, state, needed)
            _check_step(directory / name, state, files[0], states[0])
            _check_trained(directory / name, state)
        has_layers = layers is not None
        return cls(directory, tuple(files), states, is_stage_3, has_layers, nesting, experts)

    @property
    def first(self) -> dict[str, Any]:
        """The entries of the first file."""
        return self.states[0]

    @property
    def path(self) -> Path:
        """Path of the first file."""
        return self.directory / self.files[0]

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks."""
        return int(self.first["dp_world_size"])

    @property
    def config(self) -> Mapping[str, Any]:
        """The job's DeepSpeed configuration."""
        return self.first.get("ds_config") or {}

    def shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Return the trained parameters of each flat buffer, in its order."""
        return _plain(self.first["param_shapes"])

    def file_of(self, name: str) -> str:
        """Return the file of an entry of the module."""
        return self.layer_files.get(name, self.experts.files.get(name, self.files[0]))

    def expert_files(self) -> list[CheckpointFile]:
        """Return the files of experts' weights."""
        return stored_files(self.directory, sorted(set(self.experts.files.values())))

    def weight_dtype(self, name: str) -> str:
        """Return the dtype of a parameter in computations."""
        stored: StoredTensor = self.first["module"][name]
        return stored.dtype

    def aliases(self) -> dict[str, str]:
        """Return the names of shared parameters, with the names of the kept ones."""
        stated = self.first.get("shared_params")
        if stated is not None:
            # Except in stage 3, DeepSpeed takes all parameters without elements for one.
            # It names frozen ones too, which may not have been saved.
            empty = {n for n, v in self.first["module"].items() if 0 in getattr(v, "shape", ())}
            return {a: b for a, b in stated.items() if self.is_stage_3 or a not in empty}
        if self.has_layers:  # positions tell nothing across files
            return {}
        owners: dict[tuple[int, str, tuple[int, ...]], str] = {}
        found = {}
        for name, entry in self.first["module"].items():
            is_here = self.file_of(name) == self.files[0]
            if isinstance(entry, StoredTensor) and is_here and 0 not in entry.shape:
                owner = owners.setdefault((entry.begin, entry.dtype, entry.shape), name)
                if owner != name:
                    found[name] = owner
        return found

    def pieces(self) -> Iterator[FilePiece]:
        """Yield the module's pieces in the files: in stage 3 no trained parameters."""
        if self.has_layers:
            return
        aliases = self.aliases()
        for name, entry in self.first["module"].items():
            is_here = not self.is_stage_3 or name in self.first["buffer_names"]
            if isinstance(entry, StoredTensor) and is_here:
                tensor = Tensor(f"{PARAM}/{aliases.get(name, name)}", entry.shape, entry.dtype)
                file = self.file_of(name)
                yield FilePiece(tensor, whole(entry.shape), file, entry.begin, entry.stride)
        if self.is_stage_3:
            yield from self._frozen()

    def _frozen(self) -> Iterator[FilePiece]:
        """Yield parameters without gradients; in stage 3 each rank has a part."""
        shapes = _plain([self.first.get("frozen_param_shapes") or {}])[0]
        for name, shape in shapes.items():
            numel, part = prod(shape), part_of(shape, self.dp)
            for rank, state in enumerate(self.states):
                entry: StoredTensor = state["frozen_param_fragments"][name]
                tensor = Tensor(f"{PARAM}/{name}", shape, entry.dtype)
                begin = entry.begin
                low, high = min(rank * part, numel), min((rank + 1) * part, numel)
                for box in flat_range(shape, low, high):
                    yield FilePiece(tensor, box, self.files[rank], begin)
                    begin += box.numel * ITEM_BYTES[entry.dtype]

    def job(
        self,
        groups: Sequence[Sequence[str]],
        optimizer: Mapping[str, Any],
        *,
        has_number_steps: bool,
        is_bf16: bool,
        is_fused: bool | None = None,
    ) -> DeepSpeedJob:
        """Return the job of these files.

        ``groups``: names of trained parameters by parameter group, in the optimizer's order; the
        rest as in ``DeepSpeedJob``.
        """
        module = self.first["module"]
        stored = {name: v.dtype for name, v in module.items() if isinstance(v, StoredTensor)}
        aliases = self.aliases()
        buffers = self.experts.widen(self.first.get("buffer_names") or ())
        known = {*aliases, *buffers, *(name for group in groups for name in group)}
        values = {name: value for name, value in module.items() if name not in stored}
        model = {key: value for key, value in self.first.items() if key not in _MADE_ANEW}
        frozen = tuple(name for name in stored if name not in known)
        return DeepSpeedJob(
            tag=self.directory.name,
            groups=tuple(map(tuple, groups)),
            module=tuple(module),
            module_values=carried(values, self.path),
            module_metadata=getattr(module, "_metadata", None),
            module_nesting=self.nesting,
            dtypes=stored,
            aliases=aliases,
            buffers=buffers,
            frozen=frozen,
            lacks_frozen=not frozen and self.first.get("frozen_param_shapes") is None,
            model=carried(model, self.path),
            optimizer=optimizer,
            has_number_steps=has_number_steps,
            is_bf16=is_bf16,
            is_fused=is_fused,
            experts=self.experts.experts if self.experts.files else None,
        )

    def notes(self, job: DeepSpeedJob, stage: int) -> Iterator[str]:
        """Yield a note if frozen parameters were not saved, by ``exclude_frozen_parameters``. Below
        stage 2 only shared parameters and the layers under PEFT's adapters show it, and in what a
        conversion made of such a stage.

        Args:
            stage: ZeRO stage of the files.
        """
        if not job.lacks_frozen or self.has_layers:
            return
        versions = getattr(self.first["module"], "_metadata", None) or {}
        layers = [name for name in versions if str(name).endswith(".base_layer")]
        lacking = [name for name in job.aliases.values() if name not in job.dtypes]
        is_told = stage > 1 and not (self.directory.parent / REPORT).exists()
        if layers or lacking or is_told:
            under = f", as of {len(layers)} layers under adapters" if layers else ""
            yield (
                f"saved without the frozen parameters (exclude_frozen_parameters){under}: load it "
                "over the base model with load_module_strict=False, as Trainer does with PEFT's"
            )

    def values(
        self,
        job: DeepSpeedJob,
        param_groups: Sequence[Mapping[str, Any]],
        *,
        is_split: bool = True,
    ) -> Values:
        """Return the checkpoint's values, tensors aside."""
        return Values(
            step=int(self.first["global_steps"]),
            degrees={"tp": 1, "pp": 1, "dp": self.dp, **self.experts.degree()},
            framework="deepspeed",
            is_split=is_split,
            scheduler=job.model.get("lr_scheduler"),
            param_groups=tuple(
                {key: value for key, value in group.items() if key != "params"}
                for group in param_groups
            ),
            arguments=job.model.get("ds_config"),
            counters={"consumed_train_samples": self.first.get("global_samples")},
            extra={STATE: job},
        )


def _check_entries(path: Path, state: Mapping[str, Any], needed: Sequence[str]) -> None:
    for key in needed:
        if state.get(key) is None:
            raise RefusedError(
                f"{path} has no {key}: it was saved without an optimizer, or by a pipeline engine "
                "whose layer_*-model_states.pt are missing. Copy them, or use another checkpoint."
            )


def _check_step(
    path: Path, state: Mapping[str, Any], first: str, first_state: Mapping[str, Any]
) -> None:
    step, expected = state["global_steps"], first_state["global_steps"]
    if step != expected:
        raise RefusedError(
            f"{path} is of step {step}, and {first} of step {expected}: files of two checkpoints "
            "are mixed. Use another one."
        )
    tagged = re.fullmatch(r"global_step(\d{1,18})(_universal)?", path.parent.name)
    if tagged and step != int(tagged[1]):
        raise RefusedError(
            f"{path} is of step {step}: files of two checkpoints are mixed. Use another one. If "
            "the tag was renamed, name it back."
        )


def _check_trained(path: Path, state: Mapping[str, Any]) -> None:
    for shapes in state.get("param_shapes") or ():
        for parameter in shapes:
            if not isinstance(state["module"].get(parameter), StoredTensor):
                raise RefusedError(
                    f"{path} trains {parameter} and has no tensor of it. Use another checkpoint."
                )


def _of_stage(
    state: Mapping[str, Any], layers: Mapping[str, StoredTensor]
) -> OrderedDict[str, StoredTensor]:
    """Return a stage's tensors among a pipeline's; all, if the file does not name them."""
    if state.get("param_shapes") is None:
        return OrderedDict(layers)
    trained = [name for shapes in _plain(state.get("param_shapes") or ()) for name in shapes]
    names = {*trained, *(state.get("buffer_names") or ())}
    units = {unit_of(name) for name in names}
    return OrderedDict((name, v) for name, v in layers.items() if unit_of(name) in units)


def _plain(groups: Any) -> list[dict[str, tuple[int, ...]]]:
    return [{name: tuple(shape) for name, shape in group.items()} for group in groups]
