"""Find how each parameter's per-record gradient is computed, on the ``meta`` device: no values, and
no memory for the weights.

Legend: B records.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.func import functional_call

from dpvision.cli.doctor_model import Built
from dpvision.data.keys import StepKey
from dpvision.dp.per_record import LossModule, copied_buffers, prefixed
from dpvision.dp.route import make_route, trained
from dpvision.dp.separable import check_module
from dpvision.errors import ConfigError, PrivacyError

KEY = StepKey(0, 0)


@dataclass(frozen=True)
class Refusal:
    """Why private training would refuse the model, with the remedy and the layers affected."""

    message: str
    layers: list[str]
    """Names of modules; empty if the message is about the whole model or its loss."""


@dataclass(frozen=True)
class Look:
    """Findings about a model's parameters, by name."""

    ways: dict[str, list[str]] = field(default_factory=dict)
    """From a way (the rules of ``dp.matrix_rules``, "slow" or "unused") to its parameters; empty if
    the model is refused.
    """
    slow: dict[str, str] = field(default_factory=dict)
    """From each parameter without a rule to the reason."""
    refused: list[Refusal] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    tied: dict[str, list[str]] = field(default_factory=dict)
    """From each tied parameter to its other names."""


def look(name: str, built: Built) -> Look:
    """Find how every trained parameter's gradient is computed, or why the model is refused.

    Args:
        name: the model's name, for messages.
        built: on the ``meta`` device.

    Raises:
        ConfigError: no parameter is trainable, or the forward pass fails.
    """
    frozen, tied = _frozen_and_tied(built.model)
    if not trained(built.model):
        raise ConfigError(
            f"doctor: {name} has no parameter with requires_grad; expected at least one. Call "
            "requires_grad_(True) on some."
        )
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
    """Check all layers by type and return one refusal for each refused type."""
    found: dict[str, Refusal] = {}
    for name, module in model.named_modules():
        try:
            check_module(name, module)
        except PrivacyError as error:
            found.setdefault(type(module).__name__, Refusal(str(error), [])).layers.append(name)
    return list(found.values())


def _check_losses(name: str, built: Built) -> None:
    """Run the forward pass once, report errors in it, and check that it gives one loss per
    record.
    """
    shape = tuple(built.batch.image_BVCHW.shape)
    wrapped, buffers = LossModule(built.loss_fn, built.model), prefixed(copied_buffers(built.model))
    try:
        with torch.no_grad():
            functional_call(wrapped, buffers, (built.batch, KEY))
    except PrivacyError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"doctor: the forward pass of {name} on images of shape {shape} raised "
            f"{type(error).__name__}: {first}; expected one loss per record, from operations "
            "that read no values. Give --image-size, or return (model, loss_fn, batch): "
            "docs/doctor.md."
        ) from None


@contextlib.contextmanager
def told_by_us() -> Iterator[None]:
    """Suppress the warnings about slow parameters and slow vmap, since the table lists them."""
    log = logging.getLogger("dpvision")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="There is a performance drop", category=UserWarning
            )
            yield
    finally:
        log.setLevel(level)
