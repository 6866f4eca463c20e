"""What a loss or a layer holds besides its trained parameters: code, numbers that it captures or
reads, attributes, layers.

A check of one loss holds for another of equal description. So a description is complete, or equal
to no other: then the check is made again. Not seen: files, the environment, names that are put
together while the code runs, and writes that PyTorch does not count to large tensors.
"""

import contextlib
import copyreg
import dis
import functools
import hashlib
import itertools
import multiprocessing.synchronize
import os
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

_MOST = 200_000
"""Most values of a description."""
_LARGE = 2**24
"""Bytes of an array above which it is not described."""
_SMALL = 2**14
"""Most bytes of a tensor that counts by its numbers."""
_NUMBERS = frozenset((int, float, complex, bool, str, bytes, type(None)))
_CONSTANTS = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    types.CodeType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.EllipsisType,
    types.NotImplementedType,
)
_LOCKS = (
    type(threading.Lock()),
    type(threading.RLock()),
    multiprocessing.synchronize._multiprocessing.SemLock,  # type: ignore[attr-defined]
)
_OF_NO_CLASS = ("__dict__", "__weakref__", "__annotations__", "_abc_impl")
"""Attributes of a class that are no part of what it does."""
_BY_ANY_NAME = frozenset(("eval", "exec", "globals", "__import__"))
"""Functions that read values whose names the code does not have."""


class Undescribed:
    """Stands for what cannot be described; equal to nothing else."""

    def __init__(self, what: str) -> None:
        self.what = what


def held(loss_fn: Any, model: nn.Module) -> Any:
    """Return a hashable description of a loss function, a model's layers and what both hold: equal
    for equal code and equal numbers. ``Undescribed`` for an open file, a generator and whatever
    else does not say what it holds.

    The model's trained parameters count by identity; large tensors, and those on a GPU, by identity
    and number of writes; other objects by class and attributes, the class's own included; modules
    by those values whose names the code has.
    """
    walk = _Walk({id(p) for p in model.parameters() if p.requires_grad})
    everywhere = [
        list(hooks.values())
        for name, hooks in vars(torch.nn.modules.module).items()
        if name.startswith("_global_") and isinstance(hooks, dict)
    ]
    try:
        walk.all([loss_fn, model, everywhere])
    except _CannotDescribe as error:
        return Undescribed(str(error))
    return tuple(walk.found)


class _CannotDescribe(Exception):
    pass


class _Walk:
    """Walks through values and all that they hold, each object once. What is found is in the order
    of the walk, with the number of each object's parts, so it describes one structure only.
    """

    def __init__(self, trained: set[int]) -> None:
        self.found: list[Any] = []
        self._trained = trained
        self._seen: dict[int, tuple[int, Any]] = {}  # objects too, so that no id is used again
        self._todo: list[Any] = []
        self._modules: list[types.ModuleType] = []
        self._names: dict[str, None] = {}
        self._looked_up: set[tuple[int, str]] = set()

    def all(self, values: list[Any]) -> None:
        self._parts(values)
        while self._todo or self._look_up():
            self._one(self._todo.pop())

    def _look_up(self) -> bool:
        """Go on with the modules' values that any of the code so far may read by name; whether
        there is something to go on with.
        """
        for module in self._modules:
            own = vars(module)
            for name in sorted(self._names.keys() & own.keys()):
                if (id(module), name) not in self._looked_up:
                    self._looked_up.add((id(module), name))
                    self.found += number_of(module), name
                    self._parts([own[name]])
        return bool(self._todo)

    def _parts(self, values: Iterable[Any]) -> None:
        start = len(self.found)
        for value in values:
            if type(value) in _NUMBERS:
                self.found.append(repr(value))  # NaN is equal to itself
            else:
                self.found.append(None)
                self._todo.append(value)
        self.found.append(len(self.found) - start)
        if len(self.found) > _MOST:
            raise _CannotDescribe(f"more than {_MOST} values")

    def _one(self, value: Any) -> None:
        if isinstance(value, _CONSTANTS):
            self.found.append(value)
            return
        if id(value) in self._seen:
            self.found += "again", self._seen[id(value)][0]
            return
        self._seen[id(value)] = len(self._seen), value
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, np.ndarray | np.generic):
            self._array(value)
        elif isinstance(value, types.ModuleType):
            self.found.append(number_of(value))
            self._parts([vars(value).get("__getattr__")])
            if not _of_library(vars(value).get("__file__"), value.__name__):
                self._modules.append(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, nn.Module):
            self._layer(value)
        else:
            self._parts([type(value), *_state(value)])

    def _tensor(self, value: Tensor) -> None:
        self.found += value.dtype, tuple(value.shape), value.requires_grad
        if id(value) in self._trained:
            self.found.append(number_of(value))
        elif (
            value.device.type == "cpu"
            and value.layout == torch.strided
            and value.numel() * value.element_size() <= _SMALL
        ):
            numbers = value.detach().resolve_conj().resolve_neg().contiguous().flatten()
            self.found.append(_digest(numbers.view(torch.uint8).numpy()))
        elif value.is_inference():
            raise _CannotDescribe("a tensor of torch.inference_mode")
        else:
            self.found += number_of(value), value._version
        own_grad = None if id(value) in self._trained or not value.is_leaf else value.grad
        if value._backward_hooks or vars(value) or own_grad is not None:
            self._parts([value._backward_hooks, vars(value), own_grad])
        if type(value) not in (Tensor, nn.Parameter):
            self._parts([type(value)])

    def _array(self, value: np.ndarray | np.generic) -> None:
        self.found += str(value.dtype), value.shape
        if value.dtype.hasobject:
            self._parts(value.ravel().tolist())
        elif value.nbytes > _LARGE:
            raise _CannotDescribe(f"an array of {value.nbytes} bytes")
        else:
            self.found.append(_digest(value))
        if type(value) is not np.ndarray and isinstance(value, np.ndarray):
            self._parts([type(value), getattr(value, "__dict__", None)])

    def _class(self, value: type) -> None:
        self.found.append(value)
        kinds = [kind for kind in value.__mro__ if not _library_class(kind)]
        for kind in kinds:
            own = {name: item for name, item in vars(kind).items() if name not in _OF_NO_CLASS}
            self.found.append(tuple(own))
            self._parts(own.values())
        self._parts(map(type, kinds))

    def _function(self, value: types.FunctionType) -> None:
        """Values of enclosing functions, defaults, attributes and, by the names that the code has,
        global values. A library's function has no global values of its user.
        """
        self.found.append(value.__code__)
        parts: list[Any] = [value.__defaults__, value.__kwdefaults__, vars(value)]
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                parts.append(cell.cell_contents)
        own = value.__globals__
        if not _of_library(own.get("__file__"), own.get("__name__")):
            names = _names(value.__code__)
            if by_any := _BY_ANY_NAME.intersection(names.of_globals):
                raise _CannotDescribe(f"a call of {min(by_any)}")
            self._names.update(dict.fromkeys(names.all))
            parts += [own.get(name) for name in names.of_globals]
            parts += _imported(names.of_modules, own.get("__package__") or "")
        self._parts(parts)

    def _layer(self, module: nn.Module) -> None:
        own = vars(module)
        self.found.append(tuple(own))
        # Of hooks the functions: their numbers grow.
        self._parts(
            None
            if value is None or (isinstance(value, dict | set) and not value)
            else list(value.values())
            if name.endswith("_hooks")
            else value
            for name, value in own.items()
        )
        self._parts([type(module)])


def _state(value: Any) -> list[Any]:
    """What an object is made of, beside its class."""
    if isinstance(value, _LOCKS):
        return []
    if isinstance(value, dict):
        default = getattr(value, "default_factory", None)
        return [*value.keys(), *value.values(), default, *_attributes(value)]
    if isinstance(value, list | tuple | set | frozenset):
        return [*value, *_attributes(value)]
    if isinstance(value, int | float | complex | str | bytes):
        base: Any = next(kind for kind in type(value).__mro__ if kind in _NUMBERS)
        return [base.__repr__(value), *_attributes(value)]
    if isinstance(value, types.MappingProxyType):
        return [dict(value)]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
        owner = value.__self__
        return [value.__name__, number_of(owner) if isinstance(owner, types.ModuleType) else owner]
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget, value.fset, value.fdel]
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, ContextVar):
        return [value.get(None)]
    own_way = type(value).__reduce_ex__, type(value).__reduce__
    if _made_in_python(type(value)) and (
        own_way == (object.__reduce_ex__, object.__reduce__) or not _library_class(type(value))
    ):
        return _attributes(value)
    return _reduced(value)


def _attributes(value: Any) -> list[Any]:
    own = []
    with contextlib.suppress(AttributeError):
        own.append(object.__getattribute__(value, "__dict__"))
    for kind in type(value).__mro__:
        for item in vars(kind).values():
            if isinstance(item, types.MemberDescriptorType):  # a slot
                try:
                    own.append(item.__get__(value))
                except AttributeError:  # without a value
                    own.append(None)
    return own


def _reduced(value: Any) -> list[Any]:
    """What pickle would write of a library's object, which may leave out caches and locks."""
    refused = _CannotDescribe(f"an object of the class {type(value).__qualname__}")
    if not _library_class(type(value)):
        raise refused
    try:
        reduce = copyreg.dispatch_table.get(type(value))
        made = reduce(value) if reduce else value.__reduce_ex__(4)
    except Exception:
        raise refused from None
    if isinstance(made, str):  # the name of a value that stays
        return [made, getattr(value, "__dict__", None)]
    function, given, state, items, pairs = (*made, None, None, None)[:5]
    return [
        function,
        given,
        state,
        None if items is None else list(items),
        None if pairs is None else list(pairs),
    ]


def _made_in_python(kind: type) -> bool:
    """Whether attributes and slots are all that an object of the class has."""
    bases = [base for base in kind.__mro__ if base is not object]
    slots = sum(
        isinstance(item, types.MemberDescriptorType)
        for base in bases
        for item in vars(base).values()
    )
    # Beside its slots an object has pointers to its attributes and to what refers to it weakly.
    return (
        all("__slots__" in vars(b) or any("__dict__" in vars(c) for c in b.__mro__) for b in bases)
        and kind.__itemsize__ == 0
        and kind.__basicsize__ <= object.__basicsize__ + 8 * (slots + 2)
    )


class _Names(NamedTuple):
    of_globals: tuple[str, ...]
    of_modules: tuple[str, ...]
    all: tuple[str, ...]


@functools.cache
def _names(code: types.CodeType) -> _Names:
    """Names that the code, and functions defined inside it, have: of global values, of modules that
    it imports; all, texts included, which may be names of attributes.
    """
    of_globals, of_modules, every = dict[str, None](), dict[str, None](), dict[str, None]()
    todo = [code]
    while todo:
        code = todo.pop()
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                of_globals[instruction.argval] = None
            elif instruction.opname == "IMPORT_NAME":
                of_modules[instruction.argval] = None
        every |= dict.fromkeys(code.co_names)
        for value in code.co_consts:
            if isinstance(value, types.CodeType):
                todo.append(value)
            elif isinstance(value, str) and value.replace(".", "_").isidentifier():
                every[value] = of_modules[value] = None  # as in import_module("settings")
    return _Names(tuple(of_globals), tuple(of_modules), tuple(every))


def _imported(names: tuple[str, ...], package: str) -> list[types.ModuleType]:
    """The modules of these names, and those that contain them, if they were imported; a name may be
    relative to any part of the package.
    """
    found = []
    for start in itertools.accumulate(["", *package.split(".")], lambda a, b: f"{a}.{b}"):
        for name in names:
            parts = f"{start}.{name}".strip(".").split(".")
            for end in range(1, len(parts) + 1):
                module = sys.modules.get(".".join(parts[:end]))
                if module is not None:
                    found.append(module)
    return found


def _library_class(kind: type) -> bool:
    """Whether a class is a library's, and so are its functions: one that was put into it, or a
    class that only says so (as under ``functools.wraps``), is a user's.
    """
    name = str(kind.__module__)
    return _of_library(getattr(sys.modules.get(name), "__file__", None), name) and all(
        _of_library(own.__globals__.get("__file__"), own.__globals__.get("__name__"))
        for own in vars(kind).values()
        if type(own) is types.FunctionType
    )


_LIBRARIES = ("torch", "torchvision", "timm", "transformers", "peft", "accelerate", "lightning")
_FOLDERS = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")),
        Path(os.__file__).parent,
        Path(__file__).parents[1],
        Path(np.__file__).parent,
        *(Path(torch.__file__).parents[1] / name for name in _LIBRARIES),
    )
)
"""Of libraries whose classes, modules and functions stay as they are: of Python, without what users
install beside it, of this package and of those that it builds on.
"""
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


@functools.cache
def _of_library(file: str | None, name: str | None) -> bool:
    """Whether a module stays as it is: by where its file is, since a user's may have the same name
    as a library's.
    """
    if file is None:
        top, _, inner = (name or "").partition(".")
        if inner and top in sys.modules:
            return _of_library(getattr(sys.modules[top], "__file__", None), top)
        return top in sys.builtin_module_names
    if file.startswith("<frozen "):
        return True
    return any(
        file.startswith(folder) and not any(part in file[len(folder) - 1 :] for part in _INSTALLED)
        for folder in _FOLDERS
    )


def number_of(value: Any) -> int:
    """Return a number that no other object has had or will have."""
    known = _NUMBERED.get(id(value))
    if known is None or known[0]() is not value:
        known = weakref.ref(value, functools.partial(_forget, id(value))), next(_COUNTER)
        _NUMBERED[id(value)] = known
    return known[1]


def _forget(name: int, gone: Any) -> None:
    if name in _NUMBERED and _NUMBERED[name][0] is gone:
        del _NUMBERED[name]


_COUNTER = itertools.count()
_NUMBERED: dict[int, tuple[Any, int]] = {}


def _digest(numbers: Any) -> bytes:
    return hashlib.sha256(numbers.tobytes()).digest()
