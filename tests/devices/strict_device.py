"""A device of its own on a machine that has none, as strict as a GPU: tensors that claim to be on
"strict:0" and compute on the CPU.

It is torch's PrivateUse1 device, named "strict", with a tensor subclass that holds a CPU tensor.
What a GPU would refuse is refused: a CPU tensor beside one of the device (numbers of no dimension
may stay), a generator of another device, ``.numpy()``; so are CPU indices and masks, for which a
GPU would wait, and, if asked, float64. What makes the host wait, and every copy between host and
device, is recorded with the function of dpvision that did it. ``data_ptr`` is the held tensor's, so
views and shared inputs keep their identity.

What it cannot show: kernels, their rounding and their speed, half precision, autocast, memory,
streams and pinning.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, library
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

import dpvision

_PACKAGE = str(Path(dpvision.__file__).parent) + "/"
_WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "repeat_interleave",
}
"""Operations whose result, or its shape, the host must know."""
_COPIES = {"_to_copy", "copy_", "_copy_from"}
_BLAMED_ON_CALLER = ("take", "mapped", "to_device", "send")
"""Functions that, with those written in them, only do what their caller asks."""


class StrictDeviceError(RuntimeError):
    """A GPU would refuse this, or the test's rules do."""


class _Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    def get_rng_state(self, _device: Any = None) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, _state: Tensor, _device: Any = None) -> None: ...


_setup_privateuseone_for_python_backend("strict", _Backend())
DEVICE = torch.device("strict", 0)


class _Watch:
    """What is recorded and refused; one for the process, since operations come from autograd's
    threads too.
    """

    def __init__(self) -> None:
        self.crossings: Counter[tuple[str, str]] | None = None
        self.float64 = True


_WATCH = _Watch()


class StrictTensor(Tensor):
    """A tensor of the device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "StrictTensor":
        assert type(held) is Tensor and held.device.type == "cpu", held
        if held.dtype == torch.float64 and not _WATCH.float64:
            raise StrictDeviceError(
                f"a float64 tensor on a device without float64, made by {_caller()}"
            )
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            "can't convert strict:0 device type tensor to numpy. Use Tensor.cpu() to copy the "
            "tensor to host memory first."
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def __repr__(self, **_: Any) -> str:
        return f"strict({self.held!r})"


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation: checked, recorded, computed by the CPU's kernel."""
    name, leaves = func.overloadpacket.__name__, tree_leaves((args, kwargs))
    ours = [t for t in leaves if isinstance(t, StrictTensor)]
    others = [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, StrictTensor)]
    wanted = kwargs.get("device")
    here = bool(ours) if wanted is None else torch.device(wanted).type == DEVICE.type
    for leaf in leaves:
        if isinstance(leaf, torch.Generator) and here and leaf.device.type != DEVICE.type:
            raise StrictDeviceError(
                f"{name}: expected a {DEVICE.type!r} generator but found {leaf.device.type!r}, "
                f"called by {_caller()}"
            )
    if name not in _COPIES and ours and any(t.dim() > 0 or _index(name, t) for t in others):
        raise StrictDeviceError(
            f"{name}: expected all tensors to be on the same device, {DEVICE} and cpu, called by "
            f"{_caller()}"
        )
    if name == "copy_":
        _record_copy(args[1], args[0], kwargs.get("non_blocking", len(args) > 2 and args[2]))
    elif name in _WAITS and not (
        name == "repeat_interleave" and kwargs.get("output_size") is not None
    ):
        _record(f"waits: {name}")
    elif name in ("index", "index_put", "index_put_") and any(
        t is not None and t.dtype == torch.bool for t in args[1]
    ):
        _record(f"waits: {name} by a mask")
    held_args, held_kwargs = tree_map(_held, (args, kwargs))
    if wanted is not None:
        held_kwargs["device"] = torch.device("cpu")
        held_kwargs.pop("pin_memory", None)
    out = func(*held_args, **held_kwargs)
    if name == "_to_copy" and ours and not here:
        _record("waits: copy to the host")
    if name == "_to_copy" and here and not ours:
        _record(f"copy to the device{'' if kwargs.get('non_blocking') else ', blocking'}")
    known = {id(t.held): t for t in ours}
    # A view of an ordinary tensor stays ordinary in inference mode.
    ordinary = func.is_view and bool(ours) and not ours[0].is_inference()

    def put(value: Any) -> Any:
        if not (isinstance(value, Tensor) and here):
            return value
        if id(value) in known:
            return known[id(value)]
        with torch.inference_mode(False) if ordinary else contextlib.nullcontext():
            return StrictTensor(value)

    return tree_map(put, out)


def _index(name: str, tensor: Tensor) -> bool:
    """Whether a CPU tensor without dimensions is an index, whose copy to the device a GPU would
    hide.
    """
    return name in (
        "index",
        "index_put",
        "index_put_",
        "index_select",
        "gather",
    ) and tensor.dtype in (torch.int64, torch.bool)


def _held(value: Any) -> Any:
    return value.held if isinstance(value, StrictTensor) else value


def _record_copy(source: Tensor, target: Tensor, non_blocking: bool) -> None:
    if isinstance(source, StrictTensor) and not isinstance(target, StrictTensor):
        _record("waits: copy to the host")
    elif (
        isinstance(target, StrictTensor)
        and not isinstance(source, StrictTensor)
        and source.dim() > 0
    ):
        _record(f"copy to the device{'' if non_blocking else ', blocking'}")


def _record(what: str) -> None:
    if _WATCH.crossings is not None:
        _WATCH.crossings[what, _caller()] += 1


def _caller() -> str:
    """The innermost function of the package on the stack: "dp/clip.py clipped_sum"."""
    frame = sys._getframe(1)
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if (
            file.startswith(_PACKAGE)
            and name.partition(".")[0] not in _BLAMED_ON_CALLER
            and "<genexpr>" not in name
        ):
            return f"{file.removeprefix(_PACKAGE)} {name.replace('.<locals>', '')}"
        frame = frame.f_back  # type: ignore[assignment]
    return "outside the package"


def _made(func: Any) -> Any:
    return lambda *args, **kwargs: _run(func, args, {**kwargs, "device": DEVICE})


def _copied(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _record_copy(source, target, non_blocking)
    _held(target).copy_(_held(source))
    return target


# Kernels that are reached without a tensor of the device among the arguments, or with Python's
# dispatch switched off.
library.impl("aten::empty.memory_format", DEVICE.type, _made(torch.ops.aten.empty.memory_format))
library.impl("aten::empty_strided", DEVICE.type, _made(torch.ops.aten.empty_strided.default))
library.impl("aten::_copy_from", DEVICE.type, _copied)


@contextlib.contextmanager
def crossings() -> Iterator[Counter[tuple[str, str]]]:
    """Count what crosses between host and device inside: {(what, the package's function):
    times}.
    """
    before, _WATCH.crossings = _WATCH.crossings, Counter()
    try:
        yield _WATCH.crossings
    finally:
        _WATCH.crossings = before


@contextlib.contextmanager
def without_float64() -> Iterator[None]:
    """Refuse float64 tensors on the device inside, as a device without them does."""
    before, _WATCH.float64 = _WATCH.float64, False
    try:
        yield
    finally:
        _WATCH.float64 = before
