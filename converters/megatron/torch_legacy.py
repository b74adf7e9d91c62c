"""Megatron's legacy ``torch`` checkpoints: each model-parallel rank's own state.

    <root>/latest_checkpointed_iteration.txt
    <root>/iter_0000006/mp_rank_<tp>[_<pp>][_<ep>]/model_optim_rng.pt
                                                   distrib_optim.pt

Megatron loads these at the degrees of the save. ``model_optim_rng.pt`` holds the model's state
dict, the optimizer's (whole, without the distributed optimizer), arguments, the schedule and RNG
states; ``distrib_optim.pt`` the distributed optimizer's flat buffers. A rank's state dict has its
parameters in the order of its modules, with layers and experts counted from the rank's first one.

Source: ``save_checkpoint``, ``generate_state_dict`` and ``get_checkpoint_name`` of
megatron/training/checkpointing.py and GPTModel of megatron/core/models/gpt/gpt_model.py (0.16.1).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from scalai.converters.checkpoint import (
    PARAM,
    STEP,
    Checkpoint,
    CheckpointFile,
    CheckpointTarget,
    FilePiece,
    PlacedTensors,
    ReadOptions,
    Values,
    WriteOptions,
    place,
    stored_files,
)
from scalai.converters.megatron import torch_legacy_writer
from scalai.converters.megatron.beside_tensors import (
    RELEASE,
    agreed_step,
    argument_degrees,
    check_iteration,
    counters_of,
    find_below,
    find_param_groups,
    find_scaler,
)
from scalai.converters.megatron.model_limits import check_model
from scalai.converters.megatron.modules import (
    EMBEDDING,
    OUTPUT,
    PREDICTED,
    Naming,
    expert_of,
    gated,
    is_trained,
    layer_of,
    parts,
    whole_shape,
)
from scalai.converters.megatron.torch_legacy_optimizer import (
    CHECKED,
    MODEL,
    OPTIMIZER,
    Coordinate,
    FoundTensors,
    LegacyParameter,
    Rank,
)
from scalai.converters.megatron.torch_legacy_writer import folder_name
from scalai.converters.opening import MAX_DEGREE
from scalai.converters.torch_archive import StoredTensor, read_archive, with_content
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import whole
from scalai.store.files import map_file

EXTRA_STATE = "_extra_state"
"""Transformer Engine's state of a module beside its parameters, as for fp8: bytes, as an object
or as a tensor, empty if there are none."""
STEP_FILE = "(step)"
"""The file in memory with the optimizer's step."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """All tensors found; second copies; the state dicts' further values; notes."""

    placed: PlacedTensors
    duplicates: PlacedTensors | None
    extra: Mapping[str, Any]
    notes: Sequence[str]


def read_tensors(
    directory: Path,
    ranks: Mapping[Coordinate, Rank],
    degrees: Mapping[str, int],
    groups: Sequence[Mapping[str, Any]],
) -> Tensors:
    """Find all tensors of a checkpoint.

    Args:
        ranks: All ranks of the grid.
        groups: Parameter groups; the distributed optimizer's have the step.

    Raises:
        RefusedError: Something is missing, or does not follow the model's order.
    """
    return _LegacyReader(directory, ranks, degrees, groups, FoundTensors(directory, degrees)).run()


@dataclass(frozen=True, slots=True)
class _LegacyReader:
    directory: Path
    ranks: Mapping[Coordinate, Rank]
    degrees: Mapping[str, int]
    groups: Sequence[Mapping[str, Any]]
    found: FoundTensors

    def run(self) -> Tensors:
        naming = self._naming()
        layers = self._first_layers()
        is_tied = self._is_tied()
        for coordinate, rank in sorted(self.ranks.items()):
            mine = list(self._parameters(coordinate, rank, naming, layers, is_tied))
            for parameter in mine:
                file = f"{rank.folder}/{MODEL}"
                self.found.add_stored(PARAM, parameter, parameter.stored, file)
            if "optimizer" in rank.tree:
                self.found.add_optimizer(coordinate, rank, [p for p in mine if is_trained(p.name)])
        pieces, files = list(self.found.pieces), self._files()
        steps = (float(g["step"]) for g in self.groups if g.get("step") is not None)
        step = agreed_step(self.directory, steps)
        if self.found.stepped and step is not None:
            content = np.float32(step).tobytes()
            files.append(CheckpointFile(STEP_FILE, len(content), content))
            pieces += [
                FilePiece(Tensor(f"{STEP}/{name}", (), "F32"), whole(()), STEP_FILE, 0)
                for name in self.found.stepped
            ]
        extra = {"is_local": naming.is_local, "is_grouped": naming.is_grouped}
        duplicates = place(self.found.duplicates, files) if self.found.duplicates else None
        return Tensors(
            place(pieces, files), duplicates, extra, tuple(dict.fromkeys(self.found.notes))
        )

    def _files(self) -> list[CheckpointFile]:
        names = sorted({piece.file for piece in (*self.found.pieces, *self.found.duplicates)})
        return stored_files(self.directory, names)

    def _state(self, rank: Rank, chunk: int) -> Mapping[str, Any]:
        name = "model" if "model" in rank.tree else f"model{chunk}"
        state = rank.tree.get(name)
        if not isinstance(state, dict) or "language_model" in state:
            raise RefusedError(
                f"{self.directory / rank.folder / MODEL} holds no state dict {name!r} of "
                "megatron-core's models. Load it in Megatron and save it with core models."
            )
        return state

    def _naming(self) -> Naming:
        chunks = range(self.degrees["vpp"])
        ranks = self.ranks.values()
        names = [name for rank in ranks for chunk in chunks for name in self._state(rank, chunk)]
        if any(re.search(r"\.experts\.weight[12]$", name) for name in names):
            raise RefusedError(
                f"{self.directory}: the experts are those of --moe-use-legacy-grouped-gemm, one "
                "transposed tensor for all. Save it in Megatron with --ckpt-format torch_dist."
            )
        if any(name.startswith(PREDICTED) for name in names):
            raise RefusedError(
                f"{self.directory}: the model has layers that predict further tokens (MTP), whose "
                "place among the optimizer's parameters is not known here. Save it in Megatron "
                "with --ckpt-format torch_dist."
            )
        return Naming.of_rank(names)

    def _first_layers(self) -> Mapping[tuple[int, int], int]:
        """Return the first layer of each (stage, chunk), counted over the ranks."""
        found, layer = {}, 0
        for chunk in range(self.degrees["vpp"]):
            for stage in range(self.degrees["pp"]):
                found[stage, chunk] = layer
                state = self._state(self.ranks[0, stage, 0], chunk)
                layer += len({layer_of(name) for name in state} - {None})
        return found

    def _is_tied(self) -> bool:
        """Whether the last stage's output layer is the first one's embedding."""
        if self.degrees["pp"] == 1:
            return False
        last = self.ranks[0, self.degrees["pp"] - 1, 0]
        first = self.ranks[0, 0, 0]
        output = self._state(last, self.degrees["vpp"] - 1).get(OUTPUT)
        embedding = self._state(first, 0).get(EMBEDDING)
        stated = getattr(first.tree.get("args"), "untie_embeddings_and_output_weights", None)
        if stated is not None or output is None or embedding is None:
            return not stated
        if (output.dtype, output.shape) != (embedding.dtype, embedding.shape):
            return False
        size = min(CHECKED, prod(output.shape)) * ITEM_BYTES[output.dtype]
        one = self.found.read(f"{first.folder}/{MODEL}", embedding.begin, size)
        return one == self.found.read(f"{last.folder}/{MODEL}", output.begin, size)

    def _parameters(
        self,
        coordinate: Coordinate,
        rank: Rank,
        naming: Naming,
        layers: Mapping[tuple[int, int], int],
        is_tied: bool,
    ) -> Iterator[LegacyParameter]:
        """Yield a rank's tensors in the order of its modules."""
        tp_rank, stage, ep_rank = coordinate
        tp, pp, vpp = self.degrees["tp"], self.degrees["pp"], self.degrees["vpp"]
        for chunk in range(vpp):
            state = self._state(rank, chunk)
            tensors = {
                key: value
                for key, value in state.items()
                if isinstance(value, StoredTensor) and not key.endswith(EXTRA_STATE)
            }
            for key, value in state.items():
                if key not in tensors and not _is_nothing(value):
                    self.found.notes.append(f"{re.sub(r'[.][0-9]+[.]', '.*.', key)} is not carried")
            experts = {expert_of(naming.to_global(key, 0, 0)) for key in tensors} - {None}
            names = {
                key: naming.to_global(key, layers[stage, chunk], ep_rank * len(experts))
                for key in tensors
            }
            local = gated({names[key]: value.shape for key, value in tensors.items()})
            is_last = (stage, chunk) == (pp - 1, vpp - 1)
            is_first = (stage, chunk) == (0, 0)
            for key, stored in tensors.items():
                name = names[key]
                is_copy = is_tied and is_last and name == OUTPUT
                is_shared = is_copy or (is_tied and is_first and name == EMBEDDING)
                name = EMBEDDING if is_copy else name
                shape = whole_shape(name, stored.shape, tp)
                mine = parts(name, shape, tp, tp_rank, is_gated=name in local)
                yield LegacyParameter(name, shape, stored, mine, chunk, is_copy, is_shared)


def _is_nothing(value: Any) -> bool:
    """Whether an entry of a state dict beside parameters is empty."""
    return value is None or (isinstance(value, StoredTensor) and not prod(value.shape))


VERSION = 3.0
"""The ``checkpoint_version`` of all megatron-core models."""

LAYER_WISE = "layer_wise_optimizer_*"

_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_SMALL = ("optimizer", "opt_param_scheduler", "rng_state")
_KNOWN = {
    "args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far", *_SMALL,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TorchLegacyLayout:
    """The layout ``torch``."""

    name: str = "torch"
    framework: str = "megatron"

    def find(self, path: Path) -> bool:
        directory = _find_iteration(path, None)
        return directory is not None and bool(_folders(directory))

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """Read the metadata of a checkpoint, or of the newest below a save directory."""
        directory = _find_iteration(path, options.iteration)
        if directory is None or not _folders(directory):
            raise RefusedError(f"{path} holds no iteration {options.iteration} of this layout.")
        return _read(self.name, directory, trust=options.trust_pickle)

    def lay_out(self, source: Checkpoint, options: WriteOptions) -> CheckpointTarget:
        """Lay out ``iter_<n>`` and the tracker file, as Megatron's ``--load`` finds them."""
        return torch_legacy_writer.lay_out(source, options)


def _read(name: str, directory: Path, *, trust: bool) -> Checkpoint:
    ranks = _read_ranks(directory, trust)
    first = ranks[min(ranks)]
    degrees = _check_grid(directory, ranks)
    _check_equal(directory, ranks)
    common = _common(directory, first)
    tensors = read_tensors(directory, ranks, degrees, find_param_groups(common))
    values = _values(directory, ranks, degrees, common, tensors.extra)
    check_model(directory, values, tensors.placed.collection.tensors)
    return Checkpoint(
        name,
        directory,
        tensors.placed,
        values,
        duplicates=tensors.duplicates,
        notes=(*tensors.notes, *_notes(first)),
    )


def _find_iteration(path: Path, iteration: int | None) -> Path | None:
    """Return the directory of an iteration: ``path`` itself, or the tracker's."""
    if iteration is None and _folders(path):
        return path
    return find_below(path, iteration)


def _folders(directory: Path) -> list[str]:
    if not directory.is_dir():
        return []
    found = (entry for entry in directory.iterdir() if _FOLDER.fullmatch(entry.name))
    return sorted(entry.name for entry in found if entry.is_dir())


def _read_ranks(directory: Path, trust: bool) -> dict[Coordinate, Rank]:
    trees = {}
    for folder in _folders(directory):
        path = directory / folder / MODEL
        if not path.is_file():
            raise RefusedError(
                f"{path} is missing; every mp_rank folder has one. The save or a copy was "
                "interrupted: copy it again, or use another checkpoint."
            )
        trees[folder] = _tree(path, trust)
    arguments = _arguments(trees[min(trees)])
    ranks: dict[Coordinate, Rank] = {}
    for folder, tree in trees.items():
        layer_wise = sorted(path.name for path in (directory / folder).glob(LAYER_WISE))
        if layer_wise:
            raise RefusedError(
                f"{directory / folder} keeps its optimizer in {layer_wise[0]}, as --optimizer "
                "dist_muon does, which is not read: the weights alone would be left. Save it in "
                "Megatron with --ckpt-format torch_dist; or, if the weights are enough, in a copy "
                "without these files."
            )
        optimizer = directory / folder / OPTIMIZER
        state = read_archive(optimizer, trust=trust) if optimizer.is_file() else None
        coordinate = _coordinate(directory / folder, argument_degrees(arguments))
        if coordinate in ranks:
            raise RefusedError(
                f"{directory} has {ranks[coordinate].folder} and {folder} of one rank: files of "
                "two checkpoints are mixed. Remove those of one."
            )
        ranks[coordinate] = Rank(folder, tree, state)
    return ranks


def _tree(path: Path, trust: bool) -> Mapping[str, Any]:
    tree = read_archive(path, trust=trust)
    if not isinstance(tree, dict) or not any(key.startswith("model") for key in tree):
        raise RefusedError(
            f"{path} holds no model: it is a {type(tree).__name__} of {list(tree)[:5]}."
            if isinstance(tree, dict)
            else f"{path} holds a {type(tree).__name__}, not a dictionary with a model."
        )
    return tree


def _arguments(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = tree.get("args")
    return vars(arguments) if hasattr(arguments, "__dict__") else {}


def _coordinate(folder: Path, degrees: Mapping[str, int]) -> Coordinate:
    """Return (tp, pp, ep) of a folder: pp stands there if there are stages, ep likewise."""
    found = _FOLDER.fullmatch(folder.name)
    assert found
    numbers = [int(text) for text in found.groups()[1:] if text is not None]
    has_pp, has_ep = degrees.get("pp", len(numbers) + 1) > 1, degrees.get("ep", 1) > 1
    if len(numbers) != has_pp + has_ep:
        raise RefusedError(
            f"{folder} is named by {1 + len(numbers)} numbers, but its arguments say "
            f"pp={degrees.get('pp')} and ep={degrees.get('ep', 1)}. Files of two checkpoints are "
            "mixed: use another one."
        )
    pp = numbers.pop(0) if has_pp else 0
    return int(found[1]), pp, numbers.pop(0) if has_ep else 0


def _check_grid(directory: Path, ranks: Mapping[Coordinate, Rank]) -> dict[str, int]:
    """Return the degrees; refuse missing and foreign ranks."""
    degrees = argument_degrees(_arguments(ranks[min(ranks)].tree))
    counted = {axis: 1 + max(c[at] for c in ranks) for at, axis in enumerate(("tp", "pp", "ep"))}
    degrees = {**counted, **degrees}
    text = f"tp={degrees['tp']} pp={degrees['pp']} ep={degrees['ep']}"
    if degrees["tp"] * degrees["pp"] * degrees["ep"] > MAX_DEGREE:
        raise RefusedError(f"{directory}: the job had {text} by its arguments. Use another one.")
    wanted = {
        (tp, pp, ep)
        for tp in range(degrees["tp"])
        for pp in range(degrees["pp"])
        for ep in range(degrees["ep"])
    }
    for what, wrong in ("missing", wanted - set(ranks)), ("not of this job", set(ranks) - wanted):
        if wrong:
            names = ", ".join(folder_name(at, degrees) for at in sorted(wrong)[:4])
            raise RefusedError(
                f"{directory}: the files of {len(wrong)} ranks are {what} ({names}); the job had "
                f"{text}. Copy the whole checkpoint again, or use another one."
            )
    if degrees.get("etp", degrees["tp"]) != degrees["tp"] and degrees["ep"] > 1:
        raise RefusedError(
            f"{directory}: experts are cut by etp={degrees['etp']} beside tp={degrees['tp']}, "
            "which is not read from this layout. Save it in Megatron with --ckpt-format torch_dist."
        )
    degrees["vpp"] = sum(1 for key in ranks[0, 0, 0].tree if re.fullmatch(r"model\d+", key)) or 1
    return degrees


def _check_equal(directory: Path, ranks: Mapping[Coordinate, Rank]) -> None:
    first = ranks[min(ranks)]
    step = first.tree.get("iteration")
    for rank in ranks.values():
        mine, file = rank.tree.get("iteration", step), f"{rank.folder}/{MODEL}"
        if mine is not None:
            check_iteration(directory, file, mine)
        if mine != step:
            raise RefusedError(
                f"{directory}: {file} is of iteration {mine}, not {step}. Files of two checkpoints "
                "are mixed: use another one."
            )
        version = rank.tree.get("checkpoint_version", VERSION)
        if version != VERSION:
            raise RefusedError(
                f"{directory}: {file} has checkpoint_version {version!r}, and {VERSION} is read: "
                "others order the rows of QKV otherwise. Load it in Megatron and save it again."
            )
        mine, theirs = (argument_degrees(_arguments(r.tree)) for r in (rank, first))
        if mine != theirs:
            raise RefusedError(
                f"{directory}: {rank.folder} was saved at {mine}, {first.folder} at {theirs}. "
                "Files of two checkpoints are mixed: use another one."
            )


def _common(directory: Path, first: Rank) -> dict[str, Any]:
    """Return the values beside tensors, as ``common.pt`` of torch_dist has them; tensors with
    bytes."""
    if "iteration" not in first.tree and directory.name != RELEASE:
        raise RefusedError(
            f"{directory / first.folder / MODEL} has no iteration. Use another checkpoint."
        )
    optimizer = first.tree.get("optimizer")
    links = dict(enumerate(optimizer)) if isinstance(optimizer, list) else {0: optimizer or {}}
    # Without the state of a whole optimizer, as large as the model.
    bare = {number: _without_state(link) for number, link in links.items()}
    data = map_file(directory / first.folder / MODEL)
    common = {**first.tree, "optimizer": bare if optimizer else None}
    small = {key: value for key, value in common.items() if key in _SMALL}
    return {**common, **with_content(small, data)}


def _without_state(link: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: link[key] for key in ("grad_scaler", "param_groups") if key in link}
    inner = link.get("optimizer", {})
    if "param_groups" in inner:
        kept["param_groups"] = inner["param_groups"]
    return kept


def _values(
    directory: Path,
    ranks: Mapping[Coordinate, Rank],
    degrees: Mapping[str, int],
    common: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> Values:
    arguments = _arguments(common)
    carried = {"checkpoint_version", "num_floating_point_operations_so_far"} & common.keys()
    rng_states = {
        at: with_content(rank.tree["rng_state"], map_file(directory / rank.folder / MODEL))
        for at, rank in ranks.items()
        if "rng_state" in rank.tree
    }
    has_optimizer = common.get("optimizer") is not None
    return Values(
        step=int(common.get("iteration", 0)),
        degrees=degrees,
        framework="megatron",
        is_split=any(rank.buffers is not None for rank in ranks.values())
        if has_optimizer
        else None,
        scheduler=common.get("opt_param_scheduler"),
        grad_scaler=find_scaler(common),
        param_groups=find_param_groups(common),
        arguments=arguments or None,
        counters=counters_of(arguments),
        extra={
            **{key: common[key] for key in sorted(carried)},
            **extra,
            "rng_state": rng_states,
        },
    )


def _notes(first: Rank) -> Iterator[str]:
    for key in sorted(set(first.tree) - _KNOWN):
        if not re.fullmatch(r"model\d*", key):
            yield f"{MODEL} holds {key!r}, which is not carried"
