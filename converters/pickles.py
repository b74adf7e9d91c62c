"""Pickles without their classes: read to inert stand-ins, written back under the same names.

A framework's checkpoint names classes of torch, megatron or deepspeed. They are never imported
here: an object of such a class becomes a ``Foreign``, an inert holder of the pickle's content, and
goes out again as an object of the class of that qualified name. So reading needs no framework, and
runs no library's own unpickling: numpy's would take raw memory for pointers at a file's word. Only
the plain classes below are built, with arguments they check themselves, and a file can alter none
of the classes and functions within its reach.
"""

import _compat_pickle
import argparse
import collections
import copyreg
import datetime
import io
import logging
import pathlib
import pickle
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from math import prod
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from scalai.converters.bounded import bounded_memory, short_text
from scalai.core.errors import RefusedError, ScalaiError

log = logging.getLogger("scalai.converters")

PLAIN: Mapping[str, tuple[Any, ...]] = {
    "builtins": (
        bool, bytearray, bytes, complex, dict, float, frozenset, int, list, object, range, set,
        slice, str, tuple,
    ),
    "collections": (collections.defaultdict,),
    "datetime": (datetime.timedelta, datetime.timezone),
}  # fmt: skip
"""Plain classes: building one runs only itself, and its objects have no attributes to set."""

_NUMPY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
INERT = frozenset(
    {("signal", "Signals"), ("uuid", "UUID"), ("decimal", "Decimal"), ("_io", "BytesIO")}
)
"""Classes of the standard library in checkpoints; they too stay stand-ins."""
_ROOTS = frozenset({"apex", "deepspeed", "megatron", "torch", "transformer_engine"})
"""Packages with stand-ins for classes."""
_FUNCTIONS = frozenset({("torch", "device"), ("torch.serialization", "_get_layout")})
"""Functions of these packages, and classes with names like functions, called by checkpoints."""

MEMORY_BYTES, MEMORY_FACTOR = 256 << 20, 100
"""Memory for reading a pickle: bytes, plus a multiple of its size."""

_DAMAGE = (
    pickle.UnpicklingError, ArithmeticError, AttributeError, BufferError, EOFError, LookupError,
    RecursionError, SyntaxError, SystemError, TypeError, ValueError,
)  # fmt: skip
"""Errors of a damaged pickle: the unpickler's own, and those plain classes' at wrong arguments."""

_UNKNOWN = (
    "which no checkpoint of a known framework needs. If you know where the file comes from and "
    "what this does, pass --trust-pickle."
)

_NUMBERS = (
    "of numpy, numbers, truth values and texts are read, and arrays of such objects and None. Save "
    "it as a list, or as a tensor."
)

Classes = Mapping[tuple[str, str], Any]
"""Replacements of classes, by module and name."""


class SealedClass(type):
    """A class safe from pickles. Unpickling may set attributes of objects within reach, classes
    too: it could give a class another name, or other methods."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"{cls.__name__}.{name} is set")


class Call:
    """A function for pickles to call by name, with nothing to alter: changed defaults of a plain
    function would hold for all files read later."""

    __slots__ = ("_function", "path")

    path: tuple[str, str]

    def __init__(self, module: str, name: str, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "path", (module, name))
        object.__setattr__(self, "_function", function)

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"{'.'.join(self.path)}.{name} is set")


_is_trusting = ContextVar("is_trusting", default=False)
"""The current pickle may call anything it names."""


class _Forbidden(Exception):
    """A pickle makes or calls something no checkpoint needs."""


class Foreign(metaclass=SealedClass):
    """An object of a class that is not imported: its arguments, its state and its items.

    The class object itself stands for the framework's class or function, named by a pickle as a
    value (``torch.float32``).
    """

    path: ClassVar[tuple[str, str]] = ("", "")
    is_callable: ClassVar[bool] = True
    """A pickle may make objects by calling it; the loader of the output calls it again."""

    args: tuple[Any, ...]
    state: Any
    is_called: bool
    """Made by a call; else by ``__new__`` alone, as dataclasses are."""

    def __new__(cls, *args: Any, **_: Any) -> "Foreign":
        self = object.__new__(cls)
        self.args, self.state, self.is_called = args, None, False
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        if not (self.is_callable or _is_trusting.get()):
            raise _Forbidden(f"calls {'.'.join(self.path)}, {_UNKNOWN}")
        self.is_called = True

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Foreign):
            return NotImplemented
        mine, theirs = (self.path, self.args, self.state), (other.path, other.args, other.state)
        return mine == theirs

    def __hash__(self) -> int:
        return hash((self.path, self.args))

    def __repr__(self) -> str:
        inside = ", ".join(map(repr, self.args)) or ("" if self.state is None else repr(self.state))
        return f"{'.'.join(self.path)}({inside})"


def _set_attributes(self: Any, state: Any) -> None:
    """Take the state of an object with attributes: the unpickler's own way sets those of its class
    too, as ``items`` and ``__class__``."""
    if not isinstance(state, dict) or any(
        not isinstance(key, str) or hasattr(type(self), key) for key in state
    ):
        raise pickle.UnpicklingError(f"a {type(self).__name__} is given {state!r:.80}")
    vars(self).update(state)


def _refuse_state(self: Any, state: Any) -> None:
    raise pickle.UnpicklingError(f"a {type(self).__name__} is given a state")


SEALED: Mapping[type, type] = {
    SealedClass(cls.__name__, (cls,), {"__setstate__": take}): cls
    for cls, take in {
        argparse.Namespace: _set_attributes,
        collections.OrderedDict: _set_attributes,
        pathlib.PosixPath: _refuse_state,
        pathlib.PurePosixPath: _refuse_state,
    }.items()
}
"""Plain classes with attributes, and the classes they are written back as."""
SEALED_BY_NAME = {(cls.__module__, cls.__name__): sealed for sealed, cls in SEALED.items()}


_made: dict[tuple[str, str], type[Foreign]] = {}


def foreign(module: str, name: str) -> type[Foreign]:
    """Return the stand-in for a class or function; the same object for the same names."""
    path = module, name
    if path in NUMPY:
        return NUMPY[path]
    if path not in _made:
        last = name.rpartition(".")[2]
        is_class = last.lstrip("_")[:1].isupper()
        known = {"path": path, "is_callable": is_class or path in _FUNCTIONS}
        _made[path] = cast(type[Foreign], SealedClass(last, (Foreign,), known))
    return _made[path]


_SIMPLE = re.compile(r"b1|[iu][1248]|f[248]|c8|c16|[SU](0|[1-9]\d{0,5})|O8")
"""numpy's numbers, texts of a fixed length and objects, as its pickles call them."""


class _Dtype(Foreign):
    """``numpy.dtype``: of a name with no other meaning to numpy, and that dtype's state."""

    path = "numpy", "dtype"

    def __init__(self, name: Any = None, *flags: Any) -> None:
        super().__init__()
        if not isinstance(name, str) or not _SIMPLE.fullmatch(name):
            raise _Forbidden(f"holds numpy's dtype {name!r:.80}: {_NUMBERS}")
        if len(flags) > 2 or any(flag not in (0, 1) for flag in flags):
            raise pickle.UnpicklingError(f"a numpy.dtype {name} with {flags!r:.80}")

    def __setstate__(self, state: Any) -> None:
        if self.state is not None:
            raise pickle.UnpicklingError("a numpy.dtype with two states")
        super().__setstate__(state)
        if state != self.numpy.__reduce__()[2]:
            raise _Forbidden(
                f"holds numpy's dtype {self.args[:1]} with the state {state!r:.80}: {_NUMBERS}"
            )

    @property
    def numpy(self) -> np.dtype[Any]:
        if not self.is_called or not isinstance(self.state, tuple):
            raise pickle.UnpicklingError("a numpy.dtype of nothing")
        known: np.dtype[Any] = np.dtype(self.args[0])
        return known.newbyteorder(">") if self.state[1:2] == (">",) else known


ITEMS = (type(None), bool, int, float, complex, str, bytes, np.generic)
"""Elements of an array of objects: no pickle can alter them afterwards."""


def _elements(dtype: Any, data: Any) -> npt.NDArray[Any]:
    """Return the elements in bytes, or in a list of objects, read-only; those of a text, of a bool
    and of a list are checked."""
    kind = dtype.numpy.kind if isinstance(dtype, _Dtype) else None
    given: type = type(data)
    if kind is None or given is not (list if kind == "O" else bytes):
        raise pickle.UnpicklingError(f"numpy's elements {dtype!r:.80}, {type(data).__name__}")
    if kind == "O":
        for item in data:
            if not isinstance(item, ITEMS):
                raise _Forbidden(f"holds numpy's array with a {type(item).__name__}: {_NUMBERS}")
        return np.fromiter(data, object, len(data))
    if not data and not dtype.numpy.itemsize:
        return np.zeros(1, dtype.numpy)  # one empty text
    elements: npt.NDArray[Any] = np.frombuffer(data, dtype.numpy)
    if kind == "U":
        data.decode("utf-32-be" if dtype.numpy.byteorder == ">" else "utf-32-le")
    elif kind == "b" and data.strip(b"\0\1"):
        raise pickle.UnpicklingError("truth values other than 0 and 1")
    return elements.astype(elements.dtype.newbyteorder("="), copy=False)  # as numpy reads its own


def _scalar(dtype: Any, data: Any) -> Any:
    """Stand in for numpy's function: return one number or text."""
    (element,) = _elements(dtype, data)
    return element


class Array(Foreign):
    """A numpy array, as numpy writes it: a call and a state."""

    def __init__(self, *args: Any) -> None:
        super().__init__()
        if args != (foreign("numpy", "ndarray"), (0,), b"b"):
            raise pickle.UnpicklingError(f"a numpy array of {args!r:.80}")

    def __setstate__(self, state: Any) -> None:
        version, shape, dtype, is_fortran, data = state
        if version != 1 or is_fortran not in (0, 1):
            raise pickle.UnpicklingError(f"a numpy array of version {version!r:.80}")
        if type(shape) is not tuple or any(type(size) is not int or size < 0 for size in shape):
            raise pickle.UnpicklingError(f"a numpy array of shape {shape!r:.80}")
        if prod(shape) != len(_elements(dtype, data)):
            raise pickle.UnpicklingError(f"a numpy array {shape!r:.80} of {len(data)} bytes")
        # A pickle could go on with its list.
        super().__setstate__((version, shape, dtype, is_fortran, data[:]))
        self.array()

    def array(self) -> npt.NDArray[Any]:
        """Return the array, with memory of its own."""
        if self.state is None:
            return np.zeros(0, np.int8)
        _, shape, dtype, is_fortran, data = self.state
        flat = _elements(dtype, data)
        if flat.dtype.hasobject:  # numpy lists objects row by row at any order in memory
            return flat.reshape(shape).copy(order="F" if is_fortran else "C")
        return flat.reshape(shape, order="F" if is_fortran else "C").copy(order="A")


NUMPY: Mapping[tuple[str, str], type[Foreign]] = {
    ("numpy", "dtype"): cast(type[Foreign], SealedClass("dtype", (_Dtype,), {})),
    **{
        (module, "_reconstruct"): cast(
            type[Foreign], SealedClass("_reconstruct", (Array,), {"path": (module, "_reconstruct")})
        )
        for module in _NUMPY_MODULES
    },
}


def made(cls: type[Foreign], state: Mapping[str, Any]) -> Foreign:
    """Return an object as pickle makes it: by ``__new__`` and a state, without a call."""
    new = cls.__new__(cls)
    new.__setstate__(dict(state))
    return new


def loads(
    data: bytes,
    where: str,
    *,
    classes: Classes | None = None,
    persistent: Callable[[Any], Any] | None = None,
    trust: bool = False,
) -> Any:
    """Read a pickle.

    Args:
        data: The pickle.
        where: The file, for errors.
        classes: Replacements of stand-ins, by module and name.
        persistent: Returns the value of a persistent id (torch: a storage).
        trust: Let classes of unknown packages pass. They too become stand-ins, and each is named in
            the log; their code runs not here, but at the loader of the output.

    Raises:
        RefusedError: A forbidden class, or a damaged pickle; names ``where``.
    """
    trusting = _is_trusting.set(trust)
    try:
        with bounded_memory(MEMORY_BYTES + MEMORY_FACTOR * len(data)):
            return _Unpickler(io.BytesIO(data), where, classes or {}, persistent, trust).load()
    except ScalaiError:
        raise
    except _Forbidden as error:
        raise RefusedError(f"{where} {error}") from error
    except MemoryError as error:
        raise RefusedError(short_text(where, error)) from error
    except _DAMAGE as error:
        raise RefusedError(
            f"{where} holds a damaged pickle ({type(error).__name__}: {error}). Use another "
            "checkpoint."
        ) from error
    finally:
        _is_trusting.reset(trusting)


def dumps(
    value: Any,
    *,
    reduce: Callable[[Any], Any] | None = None,
    persistent: Callable[[Any], Any] | None = None,
) -> bytes:
    """Write a pickle (protocol 2, as torch does), stand-ins under their original names.

    Args:
        value: Plain values, numpy arrays, stand-ins.
        reduce: Returns a (stand-in, arguments) pair for an object of its own kind, else None.
        persistent: Returns the persistent id of an object, else None.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, reduce, persistent).dump(value)
    return buffer.getvalue()


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        file: io.BytesIO,
        where: str,
        classes: Classes,
        persistent: Callable[[Any], Any] | None,
        trust: bool,
    ) -> None:
        super().__init__(file, encoding="utf-8")
        self._where, self._classes, self._persistent = where, classes, persistent
        self._trust = trust

    def find_class(self, module: str, name: str) -> Any:
        # Protocol 2, torch's, has the names of Python 2.
        module, name = _compat_pickle.NAME_MAPPING.get(
            (module, name), (_compat_pickle.IMPORT_MAPPING.get(module, module), name)
        )
        if (module, name) in self._classes:
            return self._classes[module, name]
        plain = {cls.__name__: cls for cls in PLAIN.get(module, ())}
        if name in plain:
            return plain[name]
        if (module, name) in SEALED_BY_NAME:
            return SEALED_BY_NAME[module, name]
        if (module, name) in CALLS:
            return CALLS[module, name]
        if (module, name) in NUMPY or (module, name) == ("numpy", "ndarray"):
            return foreign(module, name)
        is_known = module.partition(".")[0] in _ROOTS or (module, name) in INERT
        if not is_known and not self._trust:
            raise RefusedError(f"{self._where} names {module}.{name}, {_UNKNOWN}")
        cls = foreign(module, name)
        if self._trust and not (is_known and cls.is_callable):
            log.warning("event=trusted-pickle class=%s.%s file=%s", module, name, self._where)
        return cls

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise RefusedError(f"{self._where} refers to data outside of itself: {pid!r}.")
        return self._persistent(pid)


def _deque(items: Any = (), maxlen: int | None = None) -> collections.deque[Any]:
    """Return a deque: of a list, because a short one of a long ``range`` would take forever."""
    if not isinstance(items, list | tuple):
        raise pickle.UnpicklingError(f"a deque of a {type(items).__name__}")
    return collections.deque(items, maxlen)


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """Return bytes that protocol 2 wrote as text."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes encoded as {encoding!r:.80}")
    return text.encode("latin1")


def _date(*args: Any) -> datetime.date:
    # The class checks only the month of bytes; `replace` checks all.
    return datetime.date(*args).replace()


def _datetime(*args: Any) -> datetime.datetime:
    return datetime.datetime(*args).replace()


_FUNCTIONS_BY_NAME: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("collections", "deque"): _deque,
    ("_codecs", "encode"): _encode,
    ("datetime", "date"): _date,
    ("datetime", "datetime"): _datetime,
    **{(module, "scalar"): _scalar for module in _NUMPY_MODULES},
}
CALLS = {path: Call(*path, function) for path, function in _FUNCTIONS_BY_NAME.items()}


# The C pickler wants names to lead to the object; stand-ins lead elsewhere.
class _Pickler(pickle._Pickler):
    def __init__(
        self,
        file: io.BytesIO,
        reduce: Callable[[Any], Any] | None,
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(file, protocol=2)
        self._reduce, self._persistent = reduce, persistent

    def persistent_id(self, obj: Any) -> Any:
        return self._persistent(obj) if self._persistent is not None else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Foreign):
            if obj.is_called:
                return type(obj), obj.args, obj.state
            # Protocol 2's NEWOBJ; the stub leaves it out.
            return copyreg.__newobj__, (type(obj), *obj.args), obj.state  # type: ignore[attr-defined]
        if isinstance(obj, Call):
            return ".".join(obj.path)
        if isinstance(obj, set | frozenset):
            # Else the bytes, and a run's identity, depend on the hash seed.
            return type(obj), (sorted(obj, key=repr),)
        reduced = self._reduce(obj) if self._reduce is not None else None
        return NotImplemented if reduced is None else reduced

    def save_global(self, obj: Any, name: str | None = None) -> None:
        # The pure Python pickler's own methods and arguments; its stub leaves them out.
        is_foreign = isinstance(obj, type) and issubclass(obj, Foreign)
        if isinstance(obj, Call) or is_foreign or obj in SEALED:
            known = SEALED.get(obj)
            module, qualified = obj.path if known is None else (known.__module__, known.__name__)
            self.write(pickle.GLOBAL + f"{module}\n{qualified}\n".encode())  # type: ignore[attr-defined]
            self.memoize(obj)  # type: ignore[attr-defined]
        else:
            super().save_global(obj, name)  # type: ignore[misc]
