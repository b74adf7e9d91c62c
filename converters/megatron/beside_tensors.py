"""The content of Megatron's checkpoints beside tensors: its place in their trees, its value at new
degrees; the directories of iterations and the tracker file.

Source: ``generate_state_dict`` and ``save_checkpoint`` of megatron/training/checkpointing.py and
the optimizers' ``state_dict`` in megatron/core/optimizer (0.16.1).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from scalai.converters.bounded import read_pointer
from scalai.converters.megatron.rules import UNEVEN_STAGES
from scalai.converters.torch_archive import NewTensor
from scalai.core.errors import RefusedError
from scalai.store.files import number_of

DEGREE_ARGUMENTS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "dp": "data_parallel_size",
}
"""Megatron's arguments for the sizes of the axes."""

_OF_STAGES = frozenset(UNEVEN_STAGES) - {"hybrid_layer_pattern"}
"""Arguments for the numbers of layers of some stages."""

_MOMENTA = {"betas", "momentum", "momentum_beta"}

_COUNTERS = (
    "consumed_train_samples", "consumed_valid_samples", "skipped_train_samples",
    "padded_vocab_size",
)  # fmt: skip


def argument_degrees(arguments: Mapping[str, Any]) -> dict[str, int]:
    return {
        axis: int(arguments[name])
        for axis, name in DEGREE_ARGUMENTS.items()
        if arguments.get(name) is not None
    }


def counters_of(arguments: Mapping[str, Any]) -> dict[str, int]:
    return {name: arguments[name] for name in _COUNTERS if arguments.get(name) is not None}


def with_degrees(arguments: Mapping[str, Any], degrees: Mapping[str, int]) -> dict[str, Any]:
    """Return Megatron's arguments at other degrees. Degrees absent from the arguments stay out;
    arguments of uneven stages stay only at the same PP."""
    changed = dict(arguments)
    pp = DEGREE_ARGUMENTS["pp"]
    if degrees.get("pp", changed.get(pp)) != changed.get(pp):
        changed |= dict.fromkeys(_OF_STAGES & changed.keys())
    for axis, name in DEGREE_ARGUMENTS.items():
        if axis in degrees and name in changed:
            is_off = axis == "vpp" and degrees[axis] == 1
            changed[name] = None if is_off else degrees[axis]
    if "world_size" in changed:
        changed["world_size"] = (
            degrees.get("tp", 1) * degrees.get("pp", 1) * degrees.get("cp", 1) * degrees["dp"]
            if "dp" in degrees
            else changed["world_size"]
        )
    return changed


def _optimizers(common: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the optimizers' trees: one, or one for each link of a chain."""
    tree = common.get("optimizer")
    if not isinstance(tree, Mapping):
        return
    links = [tree[key] for key in sorted(key for key in tree if isinstance(key, int))]
    yield from links or [tree]


def find_param_groups(common: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the parameter groups of all optimizers, without their lists of parameters."""
    found: list[Mapping[str, Any]] = []
    for tree in _optimizers(common):
        inner = tree.get("optimizer", tree)
        for group in inner.get("param_groups", ()) if isinstance(inner, Mapping) else ():
            found.append({key: value for key, value in group.items() if key != "params"})
    return tuple(found)


def find_links(common: Mapping[str, Any]) -> tuple[int, ...]:
    inner = [tree.get("optimizer", tree) for tree in _optimizers(common)]
    return tuple(len(of.get("param_groups", ())) for of in inner if isinstance(of, Mapping))


def has_hyperparameters(group: Mapping[str, Any]) -> bool:
    """Whether a group has more than rates: Adam's betas, a momentum."""
    return not _MOMENTA.isdisjoint(group)


def are_several_kinds(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the groups are of several kinds of optimizers, as Muon's and Adam's."""
    return len({"betas" in group for group in groups if has_hyperparameters(group)}) > 1


def is_same_group(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether megatron would match two parameter groups, of any EP degree."""
    keys = "wd_mult", "lr_mult", "is_decoupled_lr"
    return all(one.get(k, one.get(f"pre_{k}")) == other.get(k, other.get(f"pre_{k}")) for k in keys)


def find_scaler(common: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for tree in _optimizers(common):
        if isinstance(tree.get("grad_scaler"), Mapping):
            scaler: Mapping[str, Any] = tree["grad_scaler"]
            return scaler
    return None


def find_step(
    directory: Path, common: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> float | None:
    """Return the optimizer's number of steps: of the parameter groups, or ``common_step``.

    Raises:
        RefusedError: They differ.
    """
    steps = [_number(group["step"]) for group in groups if group.get("step") is not None]
    for tree in _optimizers(common):
        inner = tree.get("optimizer", tree)
        state = inner.get("state") if isinstance(inner, Mapping) else None
        if isinstance(state, Mapping) and "common_step" in state:
            steps.append(_number(state["common_step"]))
    return agreed_step(directory, steps)


def agreed_step(directory: Path, steps: Iterable[float]) -> float | None:
    """Return the number of steps of parameter groups and links of a chain.

    Raises:
        RefusedError: They differ: Adam's bias correction would be another for some of them.
    """
    found = sorted(set(steps))
    if len(found) > 1:
        raise RefusedError(
            f"{directory}: the optimizer's parameter groups have made {found} steps, and all make "
            "each step together. The checkpoint was saved or restored wrongly: use an older one."
        )
    return found[0] if found else None


def _number(value: Any) -> float:
    if isinstance(value, NewTensor):
        return number_of(value.content or b"", value.dtype)
    return float(value)


def optimizer_tree(
    groups: Sequence[Mapping[str, Any]],
    step: float | None,
    scaler: Mapping[str, Any] | None,
    *,
    is_split: bool,
    is_mixed: bool,
    is_chained: bool,
    sizes: Sequence[int] | None = None,
) -> dict[Any, Any]:
    """Return the optimizer's part of ``common.pt``.

    Args:
        groups: Parameter groups of the source.
        step: The optimizer's number of steps.
        scaler: State of the fp16 loss scale.
        is_split: For the distributed optimizer.
        is_mixed: There are 16-bit parameters.
        is_chained: Expert parameters have an optimizer of their own: from EP 2 on.
        sizes: Number of groups of each optimizer of a chain; None: it follows from the experts.
    """
    dense = [group for group in groups if not group.get("is_expert_parallel")]
    experts = [group for group in groups if group.get("is_expert_parallel")]
    links = [dense or [{**group, "is_expert_parallel": False} for group in experts]]
    if is_chained:
        links.append(experts or [{**group, "is_expert_parallel": True} for group in dense])
    if sizes is not None:
        ends = list(accumulate(sizes, initial=0))
        links = [list(groups[low:high]) for low, high in pairwise(ends)]
    trees = [
        _link(link, step, scaler, is_split=is_split, is_mixed=is_mixed or scaler is not None)
        for link in links
    ]
    return trees[0] if len(trees) == 1 else dict(enumerate(trees))


def _link(
    groups: Sequence[Mapping[str, Any]],
    step: float | None,
    scaler: Mapping[str, Any] | None,
    *,
    is_split: bool,
    is_mixed: bool,
) -> dict[str, Any]:
    bare = [{key: value for key, value in group.items() if key != "step"} for group in groups]
    if is_split:
        counted = [{**group, "step": step} if step is not None else group for group in bare]
        tree: dict[str, Any] = {
            "optimizer": {"param_groups": counted},
            "param_state_sharding_type": "fully_reshardable",
        }
    else:
        state: dict[str, Any] = {}
        # Adam counts steps; SGD and Muon do not.
        if step is not None and any("betas" in group for group in groups):
            state["common_step"] = NewTensor("F32", (), np.float32(step).tobytes())
        inner = {"state": state, "param_groups": bare}
        tree = {"optimizer": inner} if is_mixed else inner
    if scaler is not None:
        tree["grad_scaler"] = scaler
    return tree


TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"


def folder_of(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def find_below(path: Path, iteration: int | None) -> Path | None:
    """Return the folder of an iteration below a save directory; of None: the tracker's."""
    name = _tracked(path) if iteration is None else folder_of(iteration)
    return path / name if name is not None and (path / name).is_dir() else None


def check_found(directory: Path | None, path: Path, iteration: int | None) -> Path:
    """Return the folder found. Raises ``RefusedError`` for None."""
    if directory is None:
        raise RefusedError(f"{path} holds no iteration {iteration}. Name one that is there.")
    return directory


def _tracked(path: Path) -> str | None:
    text = read_pointer(path / TRACKER)
    if text is None or text == RELEASE:
        return text
    return folder_of(int(text)) if re.fullmatch(r"[0-9]{1,18}", text) else None


def check_iteration(directory: Path, file: str, iteration: object) -> None:
    """Raise ``RefusedError`` if a file is of another iteration than its folder."""
    named = re.fullmatch(r"iter_(\d{7,18})", directory.name)
    if named and iteration != int(named[1]):
        raise RefusedError(
            f"{directory}: {file} is of iteration {iteration}, not {int(named[1])}. Files of two "
            "checkpoints are mixed: use another one. If the folder was renamed, name it back."
        )
