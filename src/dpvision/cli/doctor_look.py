"""Which way each parameter's gradient goes, found on the ``meta`` device: shapes without values, no memory for the weights.

Legend: B records.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from dpvision.cli.doctor_model import Built
from dpvision.data.keys import StepKey
from dpvision.dp.one_pass import make_route, trained
from dpvision.dp.per_record import LossModule, copied_buffers, prefixed
from dpvision.dp.support import check_module
from dpvision.errors import ConfigError, PrivacyError

KEY = StepKey(0, 0)


@dataclass(frozen=True)
class Refusal:
    """Why private training would refuse the model, and what to do; the layers that the same is true of."""

    message: str
    layers: list[str]
    """Names of modules; empty where the message is about the model or its loss."""


@dataclass(frozen=True)
class Look:
    """What a model's trained parameters are, by name."""

    ways: dict[str, list[str]] = field(default_factory=dict)
    """Way -> parameters; empty where the model is refused. Ways: the rules of ``dp.matrix_rules``, "slow" and "unused"."""
    slow: dict[str, str] = field(default_factory=dict)
    """Parameter without a rule -> why."""
    refused: list[Refusal] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    tied: dict[str, list[str]] = field(default_factory=dict)
    """Parameter -> its other names."""


def look(name: str, built: Built) -> Look:
    """Find the way of every trained parameter, or why there is none.

    Args:
        name: of the model, for messages.
        built: on the ``meta`` device.

    Raises:
        ConfigError: nothing is trained, or the forward pass fails.
    """
    frozen, tied = _frozen_and_tied(built.model)
    if not trained(built.model):
        raise ConfigError(f"doctor: {name} has no parameter with requires_grad; expected at least one. Unfreeze what is to be trained.")
    refused = _refused_layers(built.model)
    if refused:
        return Look(refused=refused, frozen=frozen, tied=tied)
    try:
        _check_losses(name, built)
        with told_by_us():
            route = make_route(built.loss_fn, built.model, built.batch, KEY)
    except PrivacyError as error:
        return Look(refused=[Refusal(str(error), [])], frozen=frozen, tied=tied)
    ways: dict[str, list[str]] = {}
    for parameter, rules in route.uses.items():
        way = "slow" if parameter in route.slow else " + ".join(dict.fromkeys(rules)) or "unused"
        ways.setdefault(way, []).append(parameter)
    return Look(ways, route.slow, [], frozen, tied)


def _frozen_and_tied(model: nn.Module) -> tuple[list[str], dict[str, list[str]]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return frozen, {first: others for first, *others in names.values() if others}


def _refused_layers(model: nn.Module) -> list[Refusal]:
    """The gate's first look, at all layers: one refusal for each kind of layer."""
    found: dict[str, Refusal] = {}
    for name, module in model.named_modules():
        try:
            check_module(name, module)
        except PrivacyError as error:
            found.setdefault(type(module).__name__, Refusal(str(error), [])).layers.append(name)
    return list(found.values())


def _check_losses(name: str, built: Built) -> None:
    """Run the forward pass once, so that a mistake in it is told as one, and see that it gives one loss per record."""
    shape = tuple(built.batch.image_BVCHW.shape)
    wrapped, buffers = LossModule(built.loss_fn, built.model), prefixed(copied_buffers(built.model))
    try:
        with torch.no_grad():
            losses_B: Any = functional_call(wrapped, buffers, (built.batch, KEY))
    except PrivacyError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"doctor: the forward pass of {name} on images of shape {shape} raised {type(error).__name__}: {first}; expected one loss "
            "per record, by steps that read no values. Say --image-size, or return (model, loss_fn, batch): docs/doctor.md."
        ) from None
    got, wanted = tuple(getattr(losses_B, "shape", ())), tuple(built.batch.record_id_B.shape)
    if got != wanted:
        raise PrivacyError(f"separability: losses of shape {got}; expected one per record, {wanted}. Do not average over the batch.")


@contextlib.contextmanager
def told_by_us() -> Iterator[None]:
    """The engine's warning of slow parameters is left out, and torch's of slow vmap: the table says it."""
    log = logging.getLogger("dpvision")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
            yield
    finally:
        log.setLevel(level)
