"""A training in torch.distributed.checkpoint: which keys are weights, optimizer states and
parameter groups.

Scripts choose the tree that they save; DCP joins the keys of its dictionaries by dots:

    app.model.<name>                                  weights, below any path
    app.optim.state.<name>.exp_avg                    nested: ``get_state_dict``
    app.optim.param_groups.0.lr   ....0.params        lists of names
    optimizer.state.<name>.exp_avg                    flattened, as in torchtitan
    optimizer.param_groups.<name>.lr                  no lists: each parameter has its own
    train_state.step   dataloader.0 ...               anything else

The same key may be either form: ``.metadata`` keeps each key's path in the tree.

Source: torch/distributed/checkpoint/state_dict.py and _nested_dict.py of torch 2.13.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scalai.converters.checkpoint import MAIN, Order
from scalai.converters.dcp_metadata import ObjectPath, StoredKey, key_of
from scalai.core.errors import RefusedError
from scalai.core.tensors.dtypes import HALF

DCP = "dcp"
"""The key in ``Values.extra`` of a ``DcpJob``."""

GROUPS, STATE, MEMBERS = "param_groups", "state", "params"
MASTERS = ("master", "master_param", "master_params", "master_weight", MAIN)
"""Names of fp32 masters in the states of optimizers of 16-bit parameters."""

NUMBER, OF_GROUP = "number", "group"
"""Forms of a step other than a tensor: a Python number, or an entry of the parameter group."""


@dataclass(frozen=True, slots=True)
class OptimizerTree:
    """An optimizer's place and form.

    Attributes:
        path: Place of its ``state_dict``.
        is_flat: Without lists of parameters.
        groups: Names of each parameter group, in order.
    """

    path: ObjectPath
    is_flat: bool
    groups: tuple[tuple[str, ...], ...] = ()

    def state_path(self, name: str, kind: str) -> ObjectPath:
        if self.is_flat:
            return (*self.path, f"{STATE}.{name}.{kind}")
        return (*self.path, STATE, name, kind)

    def value_paths(self, number: int, key: str) -> Iterator[ObjectPath]:
        """Yield the places of a group's value."""
        if not self.is_flat:
            yield (*self.path, GROUPS, number, key)
            return
        for name in self.groups[number]:
            yield (*self.path, f"{GROUPS}.{name}.{key}")


@dataclass(frozen=True, eq=False, slots=True)
class DcpJob:
    """A training's own names and values in its checkpoint.

    Attributes:
        model: Place of the model's ``state_dict``.
        optimizers: One, or several of disjoint parameters.
        steps: Forms of parameters' steps other than 0-d fp32 tensors: ``NUMBER``, ``OF_GROUP``, or
            the dtype and shape of a tensor.
        kinds: Names of the optimizer's masters, by parameter.
        objects: Archives of everything else that is no tensor, by key.
        paths: Places of keys that are neither weights nor states.
        folders: Of the model and of the optimizer, below the checkpoint's directory.
    """

    model: ObjectPath
    optimizers: tuple[OptimizerTree, ...] = ()
    steps: Mapping[str, str | tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    masters: Mapping[str, str] = field(default_factory=dict)
    objects: Mapping[str, bytes] = field(default_factory=dict)
    paths: Mapping[str, ObjectPath] = field(default_factory=dict)
    folders: tuple[str, str] = ("", "")

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Names by parameter group, of all optimizers."""
        return tuple(group for tree in self.optimizers for group in tree.groups)


@dataclass(frozen=True, slots=True)
class State:
    """An entry of an optimizer's ``state``."""

    tree: int
    name: str
    kind: str


@dataclass(frozen=True, eq=False, slots=True)
class SplitKeys:
    """The keys of a checkpoint by their meaning.

    Attributes:
        model: Place of the model's ``state_dict``.
        trees: The optimizers, without their groups.
        weights: Keys of weights -> names.
        states: Keys of states, tensors and objects.
        values: Keys of parameter groups -> (tree, group's number or parameter's name, entry).
        numbers: Names of parameters by their numbers in the optimizer; empty: it has names.
    """

    model: ObjectPath
    trees: tuple[OptimizerTree, ...]
    weights: Mapping[str, str]
    states: Mapping[str, State]
    values: Mapping[str, tuple[int, int | str, str]]
    numbers: tuple[str, ...] = ()


def split_keys(
    tensors: Sequence[StoredKey],
    objects: Iterable[str],
    paths: Mapping[str, ObjectPath],
    where: Path,
    order: Order | None = None,
) -> SplitKeys:
    """Tell weights from states and parameter groups.

    Args:
        order: Of the optimizer's parameters, where it has numbers for them.

    Raises:
        RefusedError: States are of parameters that are not there, or are not named.
    """
    keys = [*(tensor.key for tensor in tensors), *objects]
    known = {key: paths.get(key) or _guessed(key) for key in keys}
    trees = tuple(dict.fromkeys(_trees(known.values(), has_paths=bool(paths), keys=set(keys))))
    states: dict[str, State] = {}
    values: dict[str, tuple[int, int | str, str]] = {}
    for key, path in known.items():
        for number, tree in enumerate(trees):
            inside = path[len(tree.path) :] if path[: len(tree.path)] == tree.path else ()
            found = _entry(inside, tree.is_flat)
            if found is not None and found[0] == STATE:
                states[key] = State(number, str(found[1]), found[2])
                break
            if found is not None:
                values[key] = number, found[1], found[2]
                break
    left = [tensor for tensor in tensors if tensor.key not in states and tensor.key not in values]
    named = {state.name for state in states.values()}
    model = _model(left, known, named)
    weights = {
        stored.key: key_of(known[stored.key][len(model) :])
        for stored in left
        if known[stored.key][: len(model)] == model and len(known[stored.key]) > len(model)
    }
    if model == ():
        weights = {key: name for key, name in weights.items() if len(known[key]) == 1}
    lacking = sorted(named - set(weights.values()))
    numbers: tuple[str, ...] = ()
    if lacking and all(re.fullmatch(r"\d{1,9}", name) for name in named):
        numbers = _numbered(list(weights.values()), order, where)
        states = _renamed(tensors, weights, states, numbers, where)
        lacking = []
    if lacking:
        raise RefusedError(
            f"{where} has optimizer states of {len(lacking)} parameters that are not in it: "
            f"{', '.join(lacking[:5])}. It is mixed from two saves, or incomplete: use another one."
        )
    return SplitKeys(model, trees, weights, states, values, numbers)


def _numbered(names: Sequence[str], order: Order | None, where: Path) -> tuple[str, ...]:
    """Return the parameters by their numbers: groups one behind the other, as torch counts them.

    Raises:
        RefusedError: Their order is not known.
    """
    dealt = [None if order is None else order(of) for of in (names, names[::-1])]
    if dealt[0] is None or dealt[0] != dealt[1]:
        raise RefusedError(
            f"{where} keeps the optimizer's states under numbers, as optimizer.state_dict() does, "
            "and nothing says whose they are. Save it by "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, which names them; "
            "or pass --args-from with such a checkpoint of the job, or with a file whose "
            "[[deepspeed.group]] tables list the parameters by name, in the optimizer's order."
        )
    return tuple(name for group in dealt[0] for name in group)


def _renamed(
    tensors: Sequence[StoredKey],
    weights: Mapping[str, str],
    states: Mapping[str, State],
    numbers: Sequence[str],
    where: Path,
) -> dict[str, State]:
    """Return states under names instead of numbers.

    Raises:
        RefusedError: A number has no name, or a state another shape than its parameter.
    """
    shapes = {weights[of.key]: of.shape for of in tensors if of.key in weights}
    of_key = {of.key: of.shape for of in tensors}
    found = {}
    for key, state in states.items():
        number = int(state.name)
        name = numbers[number] if number < len(numbers) else ""
        shape = of_key.get(key, ())
        if name not in shapes or shape not in ((), (1,), shapes[name]):
            raise RefusedError(
                f"{where}: {key} is {list(shape)}, and parameter {number} of the order given by "
                f"--args-from is {name or 'none'} {list(shapes.get(name, ()))}. Correct the order."
            )
        found[key] = replace(state, name=name)
    return found


def _guessed(key: str) -> ObjectPath:
    """Return the path of a key without a note of it: DCP's usual trees."""
    first, dot, rest = key.partition(".")
    return (first, rest) if dot and first in ("model", "optimizer", "optim") else (key,)


def _trees(
    paths: Iterable[ObjectPath], *, has_paths: bool, keys: set[str]
) -> Iterator[OptimizerTree]:
    for path in paths:
        for at, part in enumerate(path):
            if part == GROUPS:
                yield OptimizerTree(path[:at], is_flat=False)
                break
            if isinstance(part, str) and part.startswith(f"{GROUPS}."):
                first = key_of((*path[:at], GROUPS, 0, MEMBERS))
                yield OptimizerTree(path[:at], is_flat=has_paths or first not in keys)
                break


def _entry(inside: ObjectPath, is_flat: bool) -> tuple[str, int | str, str] | None:
    """Return the section, the parameter or group, and the entry of a path in an optimizer's tree;
    None: it is another value."""
    if not inside or not isinstance(inside[0], str):
        return None
    section, dot, rest = inside[0].partition(".")
    if section not in (STATE, GROUPS):
        return None
    if dot and len(inside) == 1:
        owner, _, entry = rest.rpartition(".")
        if not is_flat and section == GROUPS:  # without notes of paths
            return (section, int(owner), entry) if owner.isdecimal() else None
        return (section, owner, entry) if owner else None
    if dot or len(inside) != 3:
        return None
    _, middle, last = inside
    owner_ = int(middle) if section == GROUPS and str(middle).isdecimal() else middle
    return section, owner_, str(last)


def _model(
    left: Sequence[StoredKey], paths: Mapping[str, ObjectPath], named: set[str]
) -> ObjectPath:
    """Return the place of the model's ``state_dict``: the one with the optimizer's names, or with
    the most elements."""
    sizes: dict[ObjectPath, int] = {}
    names: dict[ObjectPath, set[str]] = {}
    for stored in left:
        parent, last = paths[stored.key][:-1], str(paths[stored.key][-1])
        size = 1
        for extent in stored.shape:
            size *= extent
        sizes[parent] = sizes.get(parent, 0) + size
        names.setdefault(parent, set()).add(last)

    def worth(parent: ObjectPath) -> tuple[bool, bool, int]:
        is_called = not parent or "model" in str(parent[-1])
        return named <= names[parent], is_called, sizes[parent]

    # Of equal ones the first: a copy of the weights, as an average, comes behind them.
    return max(sizes, key=worth, default=())


def kind_of(state: State, dtype: str, weight: str) -> str:
    """Return our kind of a state: fp32 masters of 16-bit weights have one of their own."""
    return MAIN if state.kind in MASTERS and dtype == "F32" and weight in HALF else state.kind


def same_groups(
    values: Mapping[str, Mapping[str, Any]], order: Sequence[str]
) -> tuple[tuple[tuple[str, ...], ...], tuple[dict[str, Any], ...]]:
    """Return the names of parameters with equal values as groups, and the groups' values.

    Args:
        values: Values of a flattened optimizer's parameters, by name.
        order: The parameters in their order.
    """
    found: dict[str, list[str]] = {}
    first: dict[str, dict[str, Any]] = {}
    for name in order:
        if name in values:
            text = repr(sorted(values[name].items()))
            found.setdefault(text, []).append(name)
            first.setdefault(text, dict(values[name]))
    return tuple(tuple(names) for names in found.values()), tuple(first.values())
