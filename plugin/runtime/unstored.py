"""Tensors without storage, for a build beside a training whose memory leaves no room for a second
model.

Every large tensor made in an ``UnstoredBuild`` is the tensor that the framework asks for, with its
size, strides, device, attributes and hooks, over a storage of no bytes. Parameters stay so, and
what is made of them alone (flat buffers, fp32 masters): their values come from a restore, so no
initialisation, cast or copy of them is carried out. Anything else gets its storage as soon as it is
read or written, such as a mask. ``take_back`` gives the rest storage, once.

``resize_`` of a storage keeps its views. Views of a storage without bytes are made by torch's
``_reinterpret_tensor``, which checks no bounds.
"""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from scalai.core.errors import RefusedError
from scalai.store.files import MADV_POPULATE_WRITE, advise_memory

LEAST_BYTES = 1 << 16

_aten = torch.ops.aten
_FILLS: dict[Any, Callable[[Sequence[Any], dict[str, Any]], Any]] = {
    **dict.fromkeys(
        (_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default,
         _aten.new_empty.default, _aten.new_empty_strided.default),
        lambda args, kwargs: None,
    ),
    **dict.fromkeys(
        (_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default),
        lambda args, kwargs: 0,
    ),
    **dict.fromkeys(
        (_aten.ones.default, _aten.ones_like.default, _aten.new_ones.default),
        lambda args, kwargs: 1,
    ),
    **dict.fromkeys(
        (_aten.full.default, _aten.full_like.default, _aten.new_full.default),
        lambda args, kwargs: args[-1] if len(args) > 1 else kwargs["fill_value"],
    ),
}  # fmt: skip
"""Makers of tensors, and the value of the elements; None: any."""
_COPIES = (_aten.clone.default, _aten._to_copy.default)
_WAY_OUT = "The next workers start after the present ones instead."


@dataclass(eq=False, slots=True)
class _Unstored:
    """A storage without its bytes.

    ``fill``: the value of its elements; None: any. ``is_state``: a restore brings its values.
    """

    storage: StorageWeakRef
    size: int
    dtype: torch.dtype
    device: torch.device
    fill: Any
    is_state: bool = False

    def alive(self) -> torch.UntypedStorage | None:
        if self.storage.expired():  # type: ignore[no-untyped-call]
            return None
        return torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)


class UnstoredBuild(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """From ``begin`` to ``end`` tensors of this thread are made without storage.

    What cannot be done without it raises ``RefusedError``: a value computed from a parameter.

    Args:
        least_bytes: Size of the smallest tensors made so; smaller ones are made the usual way.
    """

    def __init__(self, least_bytes: int = LEAST_BYTES) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._least_bytes = least_bytes
        self._unstored: dict[int, _Unstored] = {}
        """By the address of the storage, which a weak reference keeps from being used again."""
        self._parameters: list[weakref.ref[torch.Tensor]] = []
        self._hook: Any = None

    def begin(self) -> None:
        self._hook = register_module_parameter_registration_hook(self._registered)
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        if self._hook is not None:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._hook.remove()
            self._hook = None

    def check(self, restored: Sequence[torch.Tensor]) -> None:
        """Check that a restore of these flat buffers brings all values that are not known here.

        Raises:
            RefusedError: Some memory of a parameter, or made of one, is in none of them.
        """
        covered = _ranges(restored)
        living = [p for each in self._parameters if (p := each()) is not None]
        needed = _ranges([p for p in living if self._of(p) is not None])
        for cdata, each in self._living():
            if each.is_state and each.fill is None:
                needed[cdata] = [(0, each.size)]
        for cdata, ranges in needed.items():
            gaps = list(_gaps(covered.get(cdata, ()), self._unstored[cdata].size))
            missing = sum(
                max(0, min(high, end) - max(low, begin))
                for low, high in gaps
                for begin, end in ranges
            )
            if missing:
                raise RefusedError(
                    f"{missing} bytes of parameters, or of tensors made of them, are no part of "
                    f"the state. {_WAY_OUT}"
                )

    def take_ahead(self, limit: int) -> int:
        """Take host memory of tensors before ``take_back``; return its bytes, at most ``limit``."""
        taken = 0
        for _, each in self._living():
            storage, size = each.alive(), min(each.size, limit - taken)
            if each.device.type != "cpu" or size <= 0 or storage is None:
                continue
            with suppress(RuntimeError):  # no room: as much as there was
                storage.resize_(each.size)
                if not _touch(storage, size):
                    break
                taken += size
        return taken

    def take_back(self, restored: Sequence[torch.Tensor]) -> float:
        """Give all tensors storage; return the seconds that took. What a restore of these flat
        buffers will not fill gets its value."""
        began, covered = time.monotonic(), _ranges(restored)
        for cdata, each in self._living():
            storage = each.alive()
            assert storage is not None
            if storage.nbytes() != each.size:
                storage.resize_(each.size)
            if each.device.type == "cpu":
                _touch(storage, each.size)
            if each.fill is not None:
                flat = _flat(storage, each.dtype)
                for low, high in _gaps(covered.get(cdata, ()), each.size):
                    flat[low // flat.itemsize : high // flat.itemsize].fill_(each.fill)
        self._unstored.clear()
        return time.monotonic() - began

    @property
    def size(self) -> int:
        """Bytes that the living tensors will take."""
        return sum(each.size for _, each in self._living())

    def _living(self) -> Iterator[tuple[int, _Unstored]]:
        for cdata, each in list(self._unstored.items()):
            if each.storage.expired():  # type: ignore[no-untyped-call]
                del self._unstored[cdata]
            else:
                yield cdata, each

    # ------------------------------------------------------------------ what is built

    def _registered(self, module: Any, name: str, parameter: torch.Tensor) -> None:
        """Take a parameter's storage, if it has one."""
        self._parameters.append(weakref.ref(parameter))
        each = self._of(parameter)
        if each is not None:
            each.is_state = True
            return
        storage = parameter.untyped_storage()
        if storage.nbytes() >= self._least_bytes and storage.resizable():
            each = self._keep(storage, storage.nbytes(), parameter.dtype, parameter.device, None)
            each.is_state = True
            storage.resize_(0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FILLS:
            return self._made(func, args, kwargs)
        found = [t for t in _tensors((args, kwargs)) if self._of(t) is not None]
        if not found:
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return self._communicated(func, args, kwargs, found)
        if torch.Tag.inplace_view in func.tags:
            self._settle(found)
            if any(self._of(t) is not None for t in found):
                raise self._refusal(func)
            return func(*args, **kwargs)
        if _is_view(func):
            return self._viewed(func, args, kwargs)
        written = [t for t in _tensors(_written(func, args, kwargs))]
        if written:
            return self._wrote(func, args, kwargs, found, written)
        self._settle(found)
        if not (found := [t for t in found if self._of(t) is not None]):
            return func(*args, **kwargs)
        if func in _COPIES and len(found) == 1:
            return self._copied(func, args, kwargs)
        if func is _aten.cat.default:
            return self._joined(func, args, kwargs)
        raise self._refusal(func)

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        device, of = kwargs.get("device"), _tensors(args)
        device = torch.device(device) if device is not None else of[0].device if of else None
        device = device or torch.device("cpu")
        is_plain = kwargs.get("layout") in (None, torch.strided) and not kwargs.get("pin_memory")
        if device.type == "meta" or not is_plain:
            return func(*args, **kwargs)
        twin = func(*map(_twin, args), **{**kwargs, "device": "meta"})
        if twin.untyped_storage().nbytes() < self._least_bytes:
            return func(*args, **kwargs)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return self._like(twin, device, _FILLS[func](args, kwargs))

    def _like(self, twin: torch.Tensor, device: torch.device, fill: Any) -> torch.Tensor:
        """Return a tensor of its own storage, without bytes, of a meta tensor's form."""
        base = torch.empty(0, dtype=twin.dtype, device=device)
        size = twin.untyped_storage().nbytes()
        self._keep(base.untyped_storage(), size, twin.dtype, base.device, fill)
        return _placed(base, twin)

    def _keep(
        self, storage: Any, size: int, dtype: torch.dtype, device: torch.device, fill: Any
    ) -> _Unstored:
        weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        each = _Unstored(weak, size, dtype, device, fill)
        self._unstored[storage._cdata] = each
        return each

    def _of(self, tensor: torch.Tensor) -> _Unstored | None:
        if tensor.layout is not torch.strided:
            return None
        return self._unstored.get(tensor.untyped_storage()._cdata)

    # ------------------------------------------------------------------ what is done with it

    def _viewed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return views of a storage without bytes."""
        of = args[0]
        twin = torch.empty(0, dtype=of.dtype, device="meta")
        twin.untyped_storage().resize_(self._unstored[of.untyped_storage()._cdata].size)
        twin = twin.as_strided(of.shape, of.stride(), of.storage_offset())
        made = func(twin, *args[1:], **kwargs)
        return tree_map(lambda each: _placed(of, each) if _is_tensor(each) else each, made)

    def _copied(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """Return a copy of state, or a cast of it: state without storage too."""
        device = torch.device(kwargs.get("device") or args[0].device)
        twin = func(_twin(args[0]), *args[1:], **{k: v for k, v in kwargs.items() if k != "device"})
        return self._state_like(twin, device)

    def _joined(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """Return state joined with state, or with padding: a restore must bring all of it."""
        twin = func([_twin(each) for each in args[0]], *args[1:], **kwargs)
        return self._state_like(twin, args[0][0].device)

    def _state_like(self, twin: torch.Tensor, device: torch.device) -> torch.Tensor:
        made = self._like(twin, device, None)
        self._unstored[made.untyped_storage()._cdata].is_state = True
        return made

    def _wrote(
        self, func: Any, args: Any, kwargs: dict[str, Any], found: Sequence[Any], written: Any
    ) -> Any:
        """Leave out what is written into state; give other tensors storage first."""
        reads_state = any(self._is_state(t) for t in found if not _is_in(t, written))
        is_copy = func is _aten.copy_.default and reads_state
        if is_copy and not self._is_state(written[0]):
            self._becomes_state(func, written[0])
        if all(self._of(t) is not None and self._is_state(t) for t in written):
            return _returned(func, args, kwargs)
        if reads_state or any(self._is_state(t) for t in written):
            raise self._refusal(func)
        self._settle(found)
        return func(*args, **kwargs)

    def _becomes_state(self, func: Any, tensor: torch.Tensor) -> None:
        """What state is copied into is state; it has a storage of its own, or none yet."""
        each, storage = self._of(tensor), tensor.untyped_storage()
        if each is None:
            if storage.nbytes() != tensor.numel() * tensor.itemsize or not storage.resizable():
                raise self._refusal(func)
            each = self._keep(storage, storage.nbytes(), tensor.dtype, tensor.device, None)
            storage.resize_(0)
        each.is_state = True

    def _communicated(
        self, func: Any, args: Any, kwargs: dict[str, Any], found: Sequence[Any]
    ) -> Any:
        """Carry a collective out: other ranks may have storage. State takes part by a stand-in."""
        self._settle(found)
        state = [t for t in found if self._of(t) is not None]
        if state and len(state) < len(_tensors((args, kwargs))):
            raise self._refusal(func)
        stand_ins = {id(t): torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in state}
        args, kwargs = tree_map(
            lambda each: stand_ins.get(id(each), each) if _is_tensor(each) else each,
            (args, kwargs),
        )
        return func(*args, **kwargs)

    def _is_state(self, tensor: torch.Tensor) -> bool:
        """Whether a restore brings this tensor's values: a parameter lies in its storage, perhaps
        since a moment."""
        each = self._of(tensor)
        if each is None:
            return False
        if not each.is_state:
            cdata = tensor.untyped_storage()._cdata
            living = (parameter() for parameter in self._parameters)
            each.is_state = any(
                p is not None and p.untyped_storage()._cdata == cdata for p in living
            )
        return each.is_state

    def _settle(self, found: Sequence[torch.Tensor]) -> None:
        """Give tensors other than state their storage."""
        for tensor in found:
            each = self._of(tensor)
            if each is None or self._is_state(tensor):
                continue
            storage = tensor.untyped_storage()
            del self._unstored[storage._cdata]
            storage.resize_(each.size)
            if each.fill is not None:
                _flat(storage, each.dtype).fill_(each.fill)

    def _refusal(self, func: Any) -> RefusedError:
        return RefusedError(
            f"the build computes {func} from parameters, whose values are not there before the "
            f"restore. {_WAY_OUT}"
        )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if _is_tensor(each)]


def _twin(value: Any) -> Any:
    """Return a meta tensor of a tensor's form; another value as it is."""
    if not _is_tensor(value):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _placed(of: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
    """Return a tensor over ``of``'s storage in the form of a meta tensor."""
    if twin.dtype != of.dtype:
        of = of.view(-1).view(twin.dtype) if of.numel() else of.view(twin.dtype)
    step = twin.storage_offset() - of.storage_offset()
    placed: torch.Tensor = torch.ops.inductor._reinterpret_tensor(
        of, twin.shape, twin.stride(), step
    )
    return placed


def _is_view(func: Any) -> bool:
    returns = [each.alias_info for each in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returns)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes."""
    found = []
    for number, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            found.append(args[number] if number < len(args) else kwargs.get(argument.name))
    return found


def _returned(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return what an operation would that writes and returns its arguments."""
    written, returns = _written(func, args, kwargs), func._schema.returns
    if not returns:
        return None
    return written[0] if len(returns) == 1 else tuple(written)


def _is_in(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    return any(tensor is other for other in others)


def _flat(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


def _ranges(buffers: Sequence[torch.Tensor]) -> dict[int, list[tuple[int, int]]]:
    """Return the bytes [low, high) of flat buffers in their storages, in order."""
    found: dict[int, list[tuple[int, int]]] = {}
    for buffer in buffers:
        low = int(buffer.storage_offset()) * buffer.itemsize
        of = found.setdefault(buffer.untyped_storage()._cdata, [])
        of.append((low, low + buffer.numel() * buffer.itemsize))
    return {cdata: sorted(of) for cdata, of in found.items()}


def _gaps(ranges: Sequence[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """Yield the bytes of ``size`` that lie in none of the ordered ranges."""
    reached = 0
    for low, high in ranges:
        if low > reached:
            yield reached, low
        reached = max(reached, high)
    if reached < size:
        yield reached, size


def _touch(storage: torch.UntypedStorage, size: int) -> bool:
    """Have the kernel give the pages of new host memory, up to byte ``size``; False: it refuses.

    Small ones: the present workers have just given those back, and large ones may be memory that
    the host of a virtual machine has not given it yet (2.5 s a GB here, against 0.4).
    """
    begin = storage.data_ptr()
    return advise_memory(begin, begin + size, MADV_POPULATE_WRITE)
