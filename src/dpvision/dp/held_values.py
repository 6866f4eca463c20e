"""What a loss or a layer holds besides its parameters: code, numbers that it captures or reads,
attributes, layers.

A check of one loss holds for another of equal description. What is not described, such as a file
that a loss reads, can change unseen.
"""

import contextlib
import dis
import functools
import hashlib
import sys
import types
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_DEPTH, _MOST = 6, 10_000
"""How deep, and at how many elements of a container, the description looks."""
_LARGE = 2**24
"""Bytes of an array above which it counts by identity."""
_SMALL = 64
"""Most elements of a tensor or array that counts by its values."""
_THEMSELVES = (
    int,
    str,
    bytes,
    torch.dtype,
    torch.device,
    Enum,
    type(None),
    types.ModuleType,
    types.BuiltinFunctionType,
)
_LIBRARIES = {
    *sys.stdlib_module_names,
    "torch",
    "numpy",
    "torchvision",
    "timm",
    "transformers",
    "dpvision",
}
"""Packages whose classes, modules and functions stay as they are."""
_OF_PYTORCH = vars(nn.Module()).keys()
"""Attributes of every layer. Of these, ``layer`` looks at the buffers and hooks."""


def held(value: Any) -> Any:
    """Return a hashable description of a loss function, or of a value that it holds: equal for
    equal code and equal numbers.

    Large tensors, and those on a GPU, count by identity and number of writes; other objects by
    class and attributes, the class's own included. Left out: what is more than six levels down,
    elements from 10,000 on, iterators and caches.
    """
    return _held(value, 0, {})


def layers(model: nn.Module) -> Any:
    """Return a hashable description of a model's layers: classes, modes, numbers, buffers, fixed
    parameters and hooks.
    """
    everywhere = [
        hook
        for name, hooks in vars(torch.nn.modules.module).items()
        if name.startswith("_global_")
        for hook in _values(hooks)
    ]
    return _held([model, everywhere], 0, {})


def _held(value: Any, depth: int, seen: dict[int, Any]) -> Any:
    if isinstance(value, _THEMSELVES):
        return type(value), value
    if isinstance(value, float | complex | np.generic):
        return type(value), repr(value)  # NaN is equal to itself
    if isinstance(value, Tensor):
        if value.device.type == "cpu" and value.numel() <= _SMALL:
            return value.dtype, value.shape, repr(value.detach().tolist())
        return id(value), value.shape, None if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        return (
            value.dtype.str,
            value.shape,
            hashlib.sha256(value.tobytes()).digest() if value.nbytes <= _LARGE else id(value),
        )
    if isinstance(value, type) and _library(value):
        return value
    if depth > _DEPTH or id(value) in seen:
        return type(value)
    seen[id(value)] = value  # kept, so that no later object has the same id
    if isinstance(value, type):
        kinds = [kind for kind in value.__mro__ if not _library(kind)]
        own = {
            name: item
            for kind in reversed(kinds)
            for name, item in vars(kind).items()
            if not name.startswith("__")
        }
        return value, _held(own, depth + 1, seen)
    if isinstance(value, staticmethod | classmethod):
        return _held(value.__func__, depth, seen)
    if isinstance(value, nn.Module):
        return tuple(_layer(module, depth, seen) for module in value.modules())
    if isinstance(value, functools.partial):
        return _held((value.func, value.args, value.keywords), depth, seen)
    if isinstance(value, types.MethodType):
        return _held((value.__func__, value.__self__), depth, seen)
    if isinstance(value, types.FunctionType):
        return value.__code__, _held(_captured(value), depth + 1, seen)
    if isinstance(value, Mapping):
        return type(value), tuple(
            (str(name), _held(item, depth + 1, seen)) for name, item in list(value.items())[:_MOST]
        )
    if isinstance(value, list | tuple | set | frozenset):
        return (
            type(value),
            len(value),
            tuple(_held(item, depth + 1, seen) for item in list(value)[:_MOST]),
        )
    return _held(type(value), depth, seen), _held(_attributes(value), depth + 1, seen)


def _values(hooks: Any) -> list[Any]:
    return list(hooks.values()) if isinstance(hooks, dict) else []


def _library(value: Any) -> bool:
    """Whether a class, module or function is of a package that stays as it is."""
    name = (
        value.__name__
        if isinstance(value, types.ModuleType)
        else getattr(value, "__module__", None)
    )
    return str(name or "").partition(".")[0] in _LIBRARIES


def _attributes(value: Any) -> dict[str, Any]:
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    found = {}
    for name in ("__dict__", *names):
        with contextlib.suppress(Exception):  # whatever a class's own __getattr__ raises
            found[name] = getattr(value, name)
    return found


def _layer(module: nn.Module, depth: int, seen: dict[int, Any]) -> Any:
    own = [value for name, value in vars(module).items() if name not in _OF_PYTORCH]
    hooks = [
        list(named.values())
        for named in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)
    ]
    fixed = [p for p in module._parameters.values() if p is not None and not p.requires_grad]
    return module.training, _held([type(module), own, module._buffers, fixed, hooks], depth, seen)


def _captured(function: types.FunctionType) -> list[Any]:
    """Values of the enclosing functions, defaults, and global values by the names that the code
    has; a library's function has its code.
    """
    if _library(function):
        return []
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # an empty cell
            cells.append(None)
    read = []
    for name, *path in _global_names(function.__code__):
        value = function.__globals__.get(name)
        while path and isinstance(value, types.ModuleType) and not _library(value):
            value = getattr(value, path.pop(0), None)
        read.append(value)
    return [*cells, function.__defaults__, function.__kwdefaults__, *read]


@functools.cache
def _global_names(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Global names that the code, and functions defined inside it, read; each with the chain of
    attributes that follows it, such as ("module", "weight").
    """
    found: list[tuple[str, ...]] = []
    follows = False
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found.append((instruction.argval,))
        elif follows and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            found[-1] += (instruction.argval,)
        elif instruction.opname in ("CACHE", "EXTENDED_ARG"):
            continue
        follows = instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") or (
            follows and instruction.opname == "LOAD_ATTR"
        )
    inner = [
        names
        for value in code.co_consts
        if isinstance(value, types.CodeType)
        for names in _global_names(value)
    ]
    return *found, *inner
