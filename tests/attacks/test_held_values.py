"""Settings of a loss that are switched on after the check that it does not mix records.

The attacks of docs/attacks.md, "Settings that change unseen". The loss makes the same calls before
and after, so only the setting tells that the check has to be made again.
"""

import argparse
import array
import collections
import contextvars
import decimal
import functools
import importlib
import math
import multiprocessing
import queue
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp import separable
from dpvision.dp.clip import clipped_sum
from dpvision.dp.held_values import Undescribed, held, number_of
from dpvision.errors import PrivacyError
from dpvision.models import make_model
from dpvision.recipes import RECIPES
from dpvision.train.objectives import example_batch, loss_function

NUM = 12
LAM = 0.0
SHARED = argparse.Namespace(lam=0.0)


def losses(model: nn.Module, batch: Batch, lam: Any) -> Tensor:
    """Each record's output times its softmax over its own two numbers, or (``lam``) over records:
    there the largest record leaves nothing for the others.
    """
    out_B = model(batch.image_BVCHW[:, 0, 0, 0])
    pair_B2 = torch.stack([out_B, out_B], dim=1).detach()
    return 1e6 * out_B * (1e3 * pair_B2).softmax(0 if lam else 1)[:, 0]


def batch_of(num: int) -> Batch:
    image_BVCHW = torch.zeros(NUM, 1, 3, 1, 4)
    image_BVCHW[..., 0] = 1.0
    image_BVCHW[-1, ..., 0] = 1000.0
    return Batch(torch.arange(1, num + 1), torch.ones(num, dtype=torch.bool), image_BVCHW[:num])


class Net(nn.Module):
    """A linear model; ``lam`` is what its own code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        nn.init.ones_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[:, 0]


def moved(loss: Any, model: nn.Module, step: int) -> float:
    """How far the last record moves the sum, in C."""
    with_it, without = (
        clipped_sum(loss, model, batch_of(num), StepKey(0, step), max_grad_norm=1.0, rows=16).grads
        for num in (NUM, NUM - 1)
    )
    return sum(float((with_it[n] - without[n]).square().sum()) for n in with_it) ** 0.5


class Called:
    def __call__(self, model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        return losses(model, batch, LAM)


class ByProperty:
    @property
    def lam(self) -> float:
        return LAM

    def run(self, model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        return losses(model, batch, self.lam)


class ByItem:
    def __getitem__(self, i: int) -> float:
        return LAM


class ByAnyName:
    def __getattr__(self, name: str) -> float:
        if name.startswith("__"):
            raise AttributeError(name)
        return LAM


class Deep:
    """The setting three levels below a method's object, met first seven levels down."""

    def __init__(self, lam: Any) -> None:
        self.first = [[[[[[lam]]]]]]
        self.cfg = argparse.Namespace(loss=argparse.Namespace(lam=lam))

    def run(self, model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        return losses(model, batch, self.cfg.loss.lam.lam)


class OfModule:
    def __init__(self, module: types.ModuleType) -> None:
        self.module = module

    def run(self, model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        return losses(model, batch, self.module.lam)


def of_import(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    import settings_of_an_attack as settings  # type: ignore[import-not-found]

    return losses(model, batch, settings.lam)


def of_from_import(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    from settings_of_an_attack import lam

    return losses(model, batch, lam)


def with_attribute(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    return losses(model, batch, with_attribute.lam)  # type: ignore[attr-defined]


def switch_global() -> None:
    global LAM
    LAM = 1.0


def reading(read: Callable[[], Any]) -> Any:
    return lambda model, batch, key: losses(model, batch, read())


def of_holder(name: str) -> tuple[Any, Callable[[], object]]:
    """A loss that reads an object's attribute, which is put in its place anew."""
    before, after, read = {
        "decimal": (decimal.Decimal(0), decimal.Decimal(1), bool),
        "range": (range(0), range(1), len),
        "slice": (slice(0, 0), slice(0, 1), lambda s: len([1][s])),
    }[name]
    holder = types.SimpleNamespace(x=before)
    return reading(lambda: read(holder.x)), lambda: setattr(holder, "x", after)


def of_container(name: str) -> tuple[Any, Callable[[], object]]:
    made = {
        "array": lambda: array.array("d", [0.0]),
        "deque": lambda: collections.deque([0.0]),
        "bytearray": lambda: bytearray(1),
        "object array": lambda: np.array([0.0, None], dtype=object),
        "large array": lambda: np.zeros(2**21 + 1),
        "tensor of inference mode": lambda: torch.zeros(10_000),
    }[name]()
    if name == "tensor of inference mode":

        def fill() -> None:
            with torch.inference_mode():
                made[0] = 1.0

        return reading(lambda: made[0].item()), fill
    return reading(lambda: made[0]), lambda: made.__setitem__(0, 1)


def others(name: str, settings: types.ModuleType) -> tuple[Any, Callable[[], object]]:
    def switch_module() -> None:
        vars(settings)["lam"] = 1.0

    if name == "queue":
        waiting: queue.Queue[float] = queue.Queue()
        waiting.put(0.0)
        return reading(lambda: waiting.queue[0]), lambda: waiting.queue.__setitem__(0, 1.0)
    if name == "value of several processes":
        value = multiprocessing.Value("d", 0.0)
        return reading(lambda: value.value), lambda: setattr(value, "value", 1.0)
    if name == "weak reference":
        target = argparse.Namespace(lam=0.0)
        refers = weakref.ref(target)
        return reading(lambda: refers().lam), lambda: setattr(target, "lam", 1.0)
    if name == "bound method of a dict":
        table = {"lam": 0.0}
        get = table.get
        return reading(lambda: get("lam")), lambda: table.__setitem__("lam", 1.0)
    if name == "context variable":
        variable = contextvars.ContextVar("variable", default=0.0)
        variable.set(0.0)
        return reading(variable.get), lambda: variable.set(1.0)
    if name == "factory of a dict":
        made = collections.defaultdict(lambda: LAM)
        return reading(lambda: made.default_factory()), switch_global
    if name == "generator":
        given = iter(lambda: LAM, None)
        return reading(lambda: next(given)), switch_global
    if name == "item":
        by_item = ByItem()
        return reading(lambda: by_item[0]), switch_global
    if name == "attribute of any name":
        by_any = ByAnyName()
        return reading(lambda: by_any.lam), switch_global
    if name == "attribute of a function":
        with_attribute.lam = 0.0  # type: ignore[attr-defined]
        return with_attribute, lambda: setattr(with_attribute, "lam", 1.0)
    if name == "deep":
        inner = argparse.Namespace(lam=0.0)
        return Deep(inner).run, lambda: setattr(inner, "lam", 1.0)
    if name == "module in an object":
        return OfModule(settings).run, switch_module
    if name == "module in a closure":
        return reading(lambda: settings.lam), switch_module
    if name == "decorated by a library":
        return torch.enable_grad()(Called().__call__), switch_global
    return {
        "call": (Called(), switch_global),
        "property": (ByProperty().run, switch_global),
        "eval": (reading(lambda: eval("LAM")), switch_global),
        "import": (of_import, switch_module),
        "from import": (of_from_import, switch_module),
    }[name]


HOLDERS = ("decimal", "range", "slice")
CONTAINERS = (
    "array",
    "deque",
    "bytearray",
    "object array",
    "large array",
    "tensor of inference mode",
)
OTHERS = (
    "call",
    "property",
    "item",
    "attribute of any name",
    "attribute of a function",
    "import",
    "from import",
    "module in an object",
    "module in a closure",
    "deep",
    "queue",
    "value of several processes",
    "weak reference",
    "bound method of a dict",
    "context variable",
    "factory of a dict",
    "generator",
    "eval",
    "decorated by a library",
)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.setitem(globals(), "LAM", 0.0)
    module = types.ModuleType("settings_of_an_attack")
    vars(module)["lam"] = 0.0
    monkeypatch.setitem(sys.modules, "settings_of_an_attack", module)
    return module


@pytest.mark.parametrize("name", [*HOLDERS, *CONTAINERS, *OTHERS])
def test_a_setting_that_makes_the_loss_mix_is_seen(name: str, settings: types.ModuleType) -> None:
    """10.3 C in 25 of these 28 forms, under a check that was made before the switch."""
    if name in HOLDERS:
        loss, switch = of_holder(name)
    elif name in CONTAINERS:
        loss, switch = of_container(name)
    else:
        loss, switch = others(name, settings)
    model = Net()
    for step in range(2):
        assert moved(loss, model, step) <= 1.0
    switch()
    with pytest.raises(PrivacyError, match="mixes records"):
        moved(loss, model, 2)


def test_a_tensor_put_in_place_of_another_is_another() -> None:
    """The id of one that is gone was taken for it, so some of these steps passed."""
    holder = types.SimpleNamespace()
    loss = reading(lambda: holder.w[0].item())
    model, refused = Net(), 0
    for step in range(8):
        holder.w = torch.full((5000,), float(step >= 4))
        try:
            assert moved(loss, model, step) <= 1.0
        except PrivacyError:
            refused += 1
    assert refused == 4


def test_a_users_package_with_the_name_of_a_standard_module_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "statistics").mkdir()
    (tmp_path / "statistics" / "own.py").write_text(
        "lam = 0.0\ndef run(losses, model, batch, key):\n    return losses(model, batch, lam)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "statistics", raising=False)
    (tmp_path / "statistics" / "__init__.py").write_text("")
    own = importlib.import_module("statistics.own")
    try:
        loss = lambda model, batch, key: own.run(losses, model, batch, key)  # noqa: E731
        net = Net()
        assert moved(loss, net, 0) <= 1.0
        own.lam = 1.0  # type: ignore[attr-defined]
        with pytest.raises(PrivacyError, match="mixes records"):
            moved(loss, net, 1)
    finally:
        sys.modules.pop("statistics.own", None)


def test_a_layers_own_code_and_hooks_count() -> None:
    class Reads(Net):
        def forward(self, x: Tensor) -> Tensor:
            out_B = self.layer(x)[:, 0]
            pair_B2 = torch.stack([out_B, out_B], dim=1).detach()
            return 1e6 * out_B * (1e3 * pair_B2).softmax(0 if SHARED.lam else 1)[:, 0]

    def of_model(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        return model(batch.image_BVCHW[:, 0, 0, 0])

    model = Reads()
    assert moved(of_model, model, 0) <= 1.0
    SHARED.lam = 1.0
    try:
        with pytest.raises(PrivacyError, match="mixes records"):
            moved(of_model, model, 1)
    finally:
        SHARED.lam = 0.0
    before = held(of_model, model)
    model.layer.register_full_backward_pre_hook(lambda layer, grads: (grads[0] + grads[0].flip(0),))
    assert held(of_model, model) != before


def count_checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made: list[int] = []
    real = separable.check_separable
    monkeypatch.setattr(separable, "check_separable", lambda *a: (made.append(1), real(*a))[1])
    return made


@pytest.mark.parametrize("name", ["vip.micro", "dpcap.micro", "supervised.micro"])
def test_the_products_own_losses_are_checked_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, config = count_checks(monkeypatch), RECIPES[name]()
    model, loss = make_model(config.model, 0), loss_function(config)
    for step in range(3):
        clipped_sum(loss, model, example_batch(config), StepKey(0, step), max_grad_norm=1.0)
        with torch.no_grad():  # an optimizer's step
            for p in model.parameters():
                if p.requires_grad:
                    p.add_(0.01)
    assert len(made) == 1


def test_what_cannot_be_described_is_checked_at_every_step_and_what_can_be_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = count_checks(monkeypatch)
    for value, each_step in (
        (collections.OrderedDict(a=[1.0, float("nan")]), False),
        (np.random.default_rng(0).normal(size=1000), False),
        (nn.Linear(300, 300).requires_grad_(False), False),
        (argparse.Namespace(lock=multiprocessing.Lock(), loss=nn.CrossEntropyLoss()), False),
        ((i for i in range(3)), True),
        (np.zeros(2**21 + 1), True),
    ):
        made.clear()
        model = Net()
        for step in range(3):
            moved(lambda m, b, k, value=value: (value, losses(m, b, 0))[1], model, step)
        assert len(made) == (6 if each_step else 1)


def test_no_two_descriptions_without_content_are_equal() -> None:
    loss = reading(lambda given=(i for i in range(3)): next(given))
    first, second = held(loss, Net()), held(loss, Net())
    assert isinstance(first, Undescribed) and first != second and first.what.endswith("generator")


def test_a_number_is_given_to_one_object_only() -> None:
    given = set()
    for _ in range(100):
        tensor = torch.zeros(1)
        given.add(number_of(tensor))
        assert number_of(tensor) in given
        del tensor
    assert len(given) == 100


class Weighted(torch.Tensor):
    lam = 0.0


class ByFactor(Net):
    """A library's layer over the two numbers of a record."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.Softmax(1)

    def forward(self, x: Tensor) -> Tensor:
        out_B = self.layer(x)[:, 0]
        pair_B2 = torch.stack([out_B, out_B], dim=1).detach()
        return 1e6 * out_B * self.softmax(1e3 * pair_B2)[:, 0]


def of_model(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    return model(batch.image_BVCHW[:, 0, 0, 0])


def undescribed(name: str, patch: pytest.MonkeyPatch) -> tuple[Any, Callable[[], object], Net]:
    """A loss whose setting is the state of a library, or else not in its description."""
    net = Net()
    first = net.layer.weight
    if name == "a trained weight":
        return reading(lambda: first[0, 0].item() > 5), lambda: first.data.fill_(6.0), net
    if name == "attribute of a library":
        return (
            reading(lambda: getattr(math, "lam", 0.0)),
            lambda: patch.setattr(math, "lam", 1.0, raising=False),
            net,
        )
    if name == "context of decimal":
        return (
            reading(lambda: decimal.getcontext().prec == 5),
            lambda: patch.setattr(decimal.getcontext(), "prec", 5),
            net,
        )
    if name == "global generator":
        torch.manual_seed(0)
        return reading(torch.initial_seed), lambda: torch.manual_seed(1), net
    if name == "a layer of a library":
        real = torch.softmax
        return (
            of_model,
            lambda: patch.setattr(nn.Softmax, "forward", lambda layer, x: real(x, 0)),
            ByFactor(),
        )
    assert name == "a name that is put together"
    return (
        reading(lambda: vars(sys.modules[__name__])["LA" + "M"]),
        lambda: patch.setitem(globals(), "LAM", 1.0),
        net,
    )


@pytest.mark.parametrize(
    "name",
    [
        "a trained weight",
        "attribute of a library",
        "context of decimal",
        "global generator",
        "a layer of a library",
        "a name that is put together",
    ],
)
def test_a_setting_that_no_description_has_is_seen_in_the_calls(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10.3 C each: the pass makes the same calls, along another dimension."""
    loss, switch, model = undescribed(name, monkeypatch)
    for step in range(2):
        assert moved(loss, model, step) <= 1.0
    switch()
    with pytest.raises(PrivacyError, match="mixes records"):
        moved(loss, model, 2)


def test_descriptions_see_more_than_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of these were equal before and after."""
    weighted, frozen = torch.zeros(2).as_subclass(Weighted), torch.zeros(3)
    frozen.grad = torch.zeros(3)
    wrapped = functools.wraps(nn.Linear, updated=())(
        type("Own", (), {"lam": 0.0, "get": lambda own: own.lam})
    )
    named = types.ModuleType("named_in_a_text")
    vars(named).update(lam=0.0, __getattr__=lambda name: made[0])
    made = [0.0]
    monkeypatch.setitem(sys.modules, "named_in_a_text", named)
    softmax = nn.Softmax(1)
    cases: list[tuple[Any, Callable[[], object]]] = [
        (lambda: weighted.lam, lambda: monkeypatch.setattr(Weighted, "lam", 1.0)),
        (lambda: frozen.grad, lambda: setattr(frozen, "grad", torch.ones(3))),
        (lambda: wrapped().get(), lambda: setattr(wrapped, "lam", 1.0)),
        (
            lambda: sys.modules["named_in_a_text"].lam,
            lambda: monkeypatch.setitem(vars(named), "lam", 1.0),
        ),
        (lambda: named.other, lambda: made.__setitem__(0, 1.0)),
        (
            lambda: softmax,
            lambda: monkeypatch.setattr(nn.Softmax, "forward", lambda layer, x: x),
        ),
    ]
    for read, switch in cases:
        net, loss = Net(), reading(read)
        before = held(loss, net)
        assert before == held(loss, net) and not isinstance(before, Undescribed)
        switch()
        assert held(loss, net) != before
