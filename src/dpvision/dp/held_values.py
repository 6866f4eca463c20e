"""What a loss or a layer holds besides its parameters: code, numbers that it captures or reads, attributes, layers.

A check of one loss holds for another of equal description. What is not described, such as a file that a loss reads, can change unseen.
"""

import dis
import functools
import types
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_DEPTH, _MOST = 4, 256
"""How deep, and at how many elements of a container, the description looks."""
_SMALL = 64
"""Most elements of a tensor or array that counts by its values."""
_THEMSELVES = (int, str, bytes, torch.dtype, torch.device, Enum, type(None), types.ModuleType, types.BuiltinFunctionType, type)
_OF_PYTORCH = vars(nn.Module()).keys()
"""Attributes of every layer. Of these, ``layer`` looks at the buffers and hooks."""


def held(value: Any) -> Any:
    """Return a hashable description of a loss function, or of a value that it holds: equal for equal code and equal numbers.

    Large tensors, and those on a GPU, count by identity and number of writes; other objects by class and attributes. What is more than
    four levels down is left out.
    """
    return _held(value, 0, set())


def layer(module: nn.Module) -> Any:
    """Return a hashable description of one layer, without those inside it: class, mode, numbers, buffers and hooks."""
    return _layer(module, 0, set())


def _held(value: Any, depth: int, seen: set[int]) -> Any:
    if isinstance(value, _THEMSELVES):
        return type(value), value
    if isinstance(value, float | complex | np.generic):
        return type(value), repr(value)  # NaN is equal to itself
    if isinstance(value, Tensor):
        if value.device.type == "cpu" and value.numel() <= _SMALL:
            return value.dtype, value.shape, repr(value.detach().tolist())
        return id(value), value.shape, None if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes() if value.size <= _SMALL else id(value)
    if depth > _DEPTH or id(value) in seen:
        return type(value)
    seen.add(id(value))
    if isinstance(value, nn.Module):
        return tuple(_layer(module, depth, seen) for module in value.modules())
    if isinstance(value, functools.partial):
        return _held((value.func, value.args, value.keywords), depth, seen)
    if isinstance(value, types.MethodType):
        return _held((value.__func__, value.__self__), depth, seen)
    if isinstance(value, types.FunctionType):
        return value.__code__, _held(_captured(value), depth + 1, seen)
    if isinstance(value, Mapping):
        return type(value), tuple((str(name), _held(item, depth + 1, seen)) for name, item in list(value.items())[:_MOST])
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), len(value), tuple(_held(item, depth + 1, seen) for item in list(value)[:_MOST])
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    attributes = {**getattr(value, "__dict__", {}), **{name: getattr(value, name, None) for name in slots}}
    return type(value), _held(attributes, depth + 1, seen)


def _layer(module: nn.Module, depth: int, seen: set[int]) -> Any:
    own = [value for name, value in vars(module).items() if name not in _OF_PYTORCH]
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return type(module), module.training, _held([own, module._buffers, hooks], depth, seen)


def _captured(function: types.FunctionType) -> list[Any]:
    """Values of the enclosing functions, defaults, and global values by the names that the code has; a library's function has its code."""
    if (function.__module__ or "").partition(".")[0] == "torch":
        return []
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # an empty cell
            cells.append(None)
    names = [name for name in _global_names(function.__code__) if name in function.__globals__]
    return [*cells, function.__defaults__, function.__kwdefaults__, *(function.__globals__[name] for name in names)]


@functools.cache
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Global names that the code and the functions written inside it read; not those of attributes, such as ``step`` of ``key.step``."""
    own = [instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [name for value in code.co_consts if isinstance(value, types.CodeType) for name in _global_names(value)]
    return *own, *inner
