"""One thread per process: pytest-xdist runs several, and two pools of threads on two cores stand in
each other's way. And nothing of what a process holds for all of its tests is looked at again: the
collector and the disk took a tenth of their time.
"""

import gc
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "oracles"))

torch.set_num_threads(1)

_PASSED: dict[Any, Any] = {}

_KEYS: dict[str, Any] = {"of": "", "drawn": 0, "pid": os.getpid()}
"""Which test or fixture draws keys now, and how many it drew."""


def _key_bytes(size: int) -> bytes:
    """Bytes in place of the operating system's: other ones at each call, the same in each run, so
    that a check with a false alarm of one in a thousand does not fail one run in a thousand. A test
    whose keys cause one gets others with another name.
    """
    _KEYS["drawn"] += 1
    forked = os.getpid() if os.getpid() != _KEYS["pid"] else ""
    return hashlib.shake_256(f"{_KEYS['of']} {_KEYS['drawn']} {forked}".encode()).digest(size)


@pytest.fixture(scope="session", autouse=True)
def same_keys() -> Iterator[None]:
    """The keys of this process are functions of the test, or of the shared fixture, and of how many
    it drew. Processes that a test starts have fresh ones.
    """
    from dpvision.privacy import stream

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "os", SimpleNamespace(urandom=_key_bytes))
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _KEYS.update(of=item.nodeid, drawn=0)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Any:
    """A fixture that tests share draws the same keys whichever of them comes first."""
    before = dict(_KEYS)
    if fixturedef.scope != "function":
        place = request.param_index if hasattr(request, "param_index") else 0
        _KEYS.update(of=f"{fixturedef.baseid} {fixturedef.argname} {place}", drawn=0)
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function":
            _KEYS.update(before)


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """The modules and tests of this process, 850,000 objects, stay: to look through them takes the
    collector half a second or more, once in some ten seconds. ``fit`` collects and freezes once
    more, and thaws at its end what is frozen here too, so it is not asked to.
    """
    gc.freeze()
    gc.enable()
    if loop := sys.modules.get("dpvision.train.loop"):
        asked = dict.fromkeys(("collect", "freeze", "unfreeze"), lambda: None)
        loop.gc = SimpleNamespace(**asked)  # type: ignore[attr-defined]


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """No test cuts the power: what a process wrote outlives its end, waited for or not. Tests of
    where the code waits look at the calls.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # raises for what is no open file, too
        yield


@pytest.fixture(scope="session", autouse=True)
def textures_once() -> Iterator[None]:
    """The public textures of ``texture_centre`` are drawn once for each size in this process: each
    head on a store of its own needs them, and they take a second.
    """
    from dpvision.encoders import feature_file

    own, drawn = feature_file.textures, dict[Any, torch.Tensor]()

    def textures(program_N: torch.Tensor, size_px: int) -> torch.Tensor:
        case = (*program_N.tolist(), size_px)
        if case not in drawn:
            drawn[case] = own(program_N, size_px)
        return drawn[case].clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_file, "textures", textures)
        yield


@pytest.fixture(scope="module")
def gates_once() -> Iterator[None]:
    """Runs of a module, those of its fixtures too, pass the gates (``train.gates``) and the check
    of bits (``dp.reference_bits``) once for each model and setting in this process.

    For tests of something else than these checks, which take two thirds of a run of a few steps.
    They are made for another model, loss, weights or setting, and where a check is replaced.
    """
    from dpvision.dp import clip, reference_bits
    from dpvision.train import gates, start

    def check_once(config: Any, model: torch.nn.Module, loss_fn: Any) -> None:
        functions = gates.check_separable, gates.check_exact, gates.check_at_sizes, gates.make_model
        people = config.privacy.unit.draws_people
        settings = config.model, config.views, people, config.seed
        rows = config.hardware.physical_batch_size
        case = (repr(settings), rows, _digest(model), loss_fn, *functions)
        if case not in _PASSED:
            _PASSED[case] = gates.check_gates(config, model, loss_fn)

    def admit_once(
        loss_fn: Any,
        model: torch.nn.Module,
        public: Any,
        key: Any,
        sizes: Any,
        method: str,
        how: Any,
    ) -> tuple[int, ...]:
        shapes = tuple(None if v is None else (v.shape, v.dtype, v.device) for v in public)
        settings = key, tuple(sizes), method, repr(how), torch.get_num_threads()
        case = (_digest(model), loss_fn, shapes, settings, reference_bits._digests)
        name = reference_bits._name(loss_fn, model, public, len(public.record_id_B), method, how)
        if case not in _PASSED or how.compiled is not None:
            _PASSED[case] = reference_bits.admit(loss_fn, model, public, key, sizes, method, how)
        reference_bits._ADMITTED.setdefault(model, {})[name] = _PASSED[case]
        return _PASSED[case]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "check_gates", check_once)
        patch.setattr(clip, "admit", admit_once)
        yield


def _digest(model: torch.nn.Module) -> Any:
    """What a check may depend on in a model: its layers, weights, and which of them are trained."""
    weights = hashlib.sha256(repr(model).encode())
    for name, value in model.state_dict().items():
        weights.update(f"{name} {value.dtype} {tuple(value.shape)} {value.device}".encode())
        weights.update(value.cpu().contiguous().numpy().tobytes())
    return weights.digest(), tuple(p.requires_grad for p in model.parameters())
