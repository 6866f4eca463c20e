"""Find how each parameter's per-record gradient is computed, for a recipe, a timm model or the
model of a function, on the ``meta`` device: no values, and no memory for the weights.

Legend: B records, V views, C channels, H height, W width, K classes.
"""

import contextlib
import difflib
import importlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from dpvision.config import OptimConfig, RunConfig
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import LossFn
from dpvision.dp.per_record import LossModule, copied_buffers, default_chunk, prefixed
from dpvision.dp.route import make_route, trained
from dpvision.dp.separable import check_module
from dpvision.errors import ConfigError, PrivacyError
from dpvision.models import make_model, make_model_on_meta
from dpvision.models.timm_encoder import keep_statistics
from dpvision.recipes import RECIPES
from dpvision.train.objectives import example_batch, loss_function

KEY = StepKey(0, 0)
NUM_RECORDS = 3
_IMAGE_SIZE = 224
_EXPECTED = "a recipe, a timm name, or module:function"


@dataclass(frozen=True)
class Built:
    """A model in its training state, its loss function, and a few public records."""

    model: nn.Module
    loss_fn: LossFn
    batch: Batch


@dataclass(frozen=True)
class Subject:
    """The model that the argument MODEL names."""

    name: str
    kind: str
    """'recipe', 'timm' or 'function'."""
    config: RunConfig | None
    """The recipe's config, or None for other kinds."""
    make: Callable[[bool], Built]
    """Builds the model: on the meta device, without memory for the weights, if the argument is
    true; otherwise on the CPU.
    """


@dataclass(frozen=True)
class Refusal:
    """Why private training would refuse the model, with the remedy and the layers affected."""

    message: str
    layers: list[str]
    """Names of modules; empty if the message is about the whole model or its loss."""


def find_subject(name: str, image_size: int | None = None) -> Subject:
    """Return the model that ``name`` refers to. Nothing is built, but a user's module is imported.

    Args:
        name: a recipe, ``module:function`` (the current folder is searched too), or a timm model.
        image_size: height and width of the images in pixels, for models that do not define it.

    Raises:
        ConfigError: no model has that name; the message lists similar names.
    """
    if image_size is not None and not image_size >= 1:
        raise ConfigError(
            f"doctor: --image-size={image_size}; expected at least 1. Give pixels, 224 say."
        )
    if name in RECIPES:
        config = RECIPES[name]()
        if image_size is not None:
            raise ConfigError(
                f"doctor: --image-size={image_size}; expected none with recipe {name}, which "
                "defines it. Drop it."
            )
        return Subject(name, "recipe", config, lambda on_meta: _recipe(config, on_meta))
    if ":" in name:
        function = _find_function(name)
        return Subject(
            name,
            "function",
            None,
            lambda on_meta: _from_function(name, function, image_size, on_meta),
        )
    import timm  # takes seconds, so only now

    if timm.is_model(name.partition(".")[0]):
        return Subject(name, "timm", None, lambda on_meta: _from_timm(name, image_size, on_meta))
    close = difflib.get_close_matches(name, [*RECIPES, *timm.list_models()], n=3)
    remedy = f"Did you mean {' or '.join(close)}?" if close else f"Recipes: {', '.join(RECIPES)}."
    raise ConfigError(f"doctor: {name!r}; expected {_EXPECTED}. {remedy}")


@dataclass(frozen=True)
class Findings:
    """What was found about a model's parameters, by name."""

    subject: Subject
    sizes: dict[str, int]
    """Numbers of all parameters, frozen ones included."""
    frozen: list[str]
    tied: dict[str, list[str]]
    """From each tied parameter to its other names."""
    refused: list[Refusal] = field(default_factory=list)
    ways: dict[str, list[str]] = field(default_factory=dict)
    """From a way (the rules of ``dp.matrix_rules``, "slow" or "unused") to its parameters; empty if
    the model is refused.
    """
    slow: dict[str, str] = field(default_factory=dict)
    """From each parameter without a rule to the reason."""
    slow_chunk: int = 0
    """Records whose slow gradients are held at once."""

    def num_parameters(self, names: Iterable[str]) -> int:
        """Return the number of parameters of some names."""
        return sum(self.sizes[name] for name in names)

    @property
    def trained(self) -> list[str]:
        """Names of the trained parameters."""
        return [name for name in self.sizes if name not in self.frozen]

    @property
    def state_bytes(self) -> int:
        """Memory that training holds between steps: weights, clipped sum, noise (one tensor at a
        time), the optimizer's moments, the averaged weights; float32 each.
        """
        config = self.subject.config
        optim = OptimConfig() if config is None else config.optim
        copies = 3 + (2 if optim.name == "adamw" else 1) + optim.averages
        return 4 * (copies * self.num_parameters(self.trained) + self.num_parameters(self.frozen))

    def to_dict(self) -> dict[str, Any]:
        """Plain dict, ready for JSON."""
        parts: dict[str, int] = {}
        for name in self.trained:
            part = name.split(".")[0]
            parts[part] = parts.get(part, 0) + self.sizes[name]
        total = self.num_parameters(self.trained)

        def counts(names: list[str]) -> dict[str, int]:
            return {"num_tensors": len(names), "num_parameters": self.num_parameters(names)}

        return {
            "model": self.subject.name,
            "kind": self.subject.kind,
            "recipe": self.subject.name if self.subject.kind == "recipe" else None,
            "num_parameters": total,
            "parts": parts,
            "state_bytes": self.state_bytes,
            "per_record_gradient_bytes": 4 * total,
            "ways": {way: counts(names) for way, names in self.ways.items()},
            "slow": self.slow,
            "unused": self.ways.get("unused", []),
            "refused": [asdict(refusal) for refusal in self.refused],
            "frozen": {**counts(self.frozen), "names": self.frozen},
            "tied": self.tied,
        }


def look(subject: Subject) -> Findings:
    """Find how every trained parameter's gradient is computed, or why the model is refused. Takes
    seconds for any size: nothing is allocated.

    Raises:
        ConfigError: the model cannot be built, no parameter is trainable, or the forward pass
            fails.
    """
    built = subject.make(True)
    model, params = built.model, trained(built.model)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    found = Findings(subject, sizes, *_frozen_and_tied(model))
    if not params:
        raise ConfigError(
            f"doctor: {subject.name} has no parameter with requires_grad; expected at least one. "
            "Call requires_grad_(True) on some."
        )
    if refused := _refused_layers(model):
        return replace(found, refused=refused)
    try:
        _check_losses(subject.name, built)
        with told_by_us():
            route = make_route(built.loss_fn, model, built.batch, KEY)
    except PrivacyError as error:
        return replace(found, refused=[Refusal(str(error), [])])
    ways: dict[str, list[str]] = {}
    for parameter, rules in route.uses.items():
        way = "slow" if parameter in route.slow else " + ".join(dict.fromkeys(rules)) or "unused"
        ways.setdefault(way, []).append(parameter)
    chunk = default_chunk({name: params[name] for name in route.slow}) if route.slow else 0
    return replace(found, ways=ways, slow=route.slow, slow_chunk=chunk)


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


def classification_losses(model: nn.Module, batch: Batch, _key: StepKey) -> Tensor:
    """Cross-entropy of each record's first view against its label.

    Returns:
        losses_B, float32.
    """
    assert batch.label_B is not None
    return F.cross_entropy(model(batch.image_BVCHW[:, 0]).float(), batch.label_B, reduction="none")


def records(batch: Batch, num: int) -> Batch:
    """Return a batch of ``num`` records that repeats those of ``batch``, with distinct ids."""
    rows = torch.arange(num, device=batch.record_id_B.device) % len(batch.record_id_B)
    made = Batch._make(None if value is None else value[rows] for value in batch)
    return made._replace(record_id_B=torch.arange(1, num + 1, device=rows.device))


def _recipe(config: RunConfig, on_meta: bool) -> Built:
    model = make_model_on_meta(config.model) if on_meta else make_model(config.model, config.seed)
    return Built(
        model, loss_function(config), _to_meta(example_batch(config, NUM_RECORDS), on_meta)
    )


def _from_timm(name: str, image_size: int | None, on_meta: bool) -> Built:
    import timm

    model = _called(name, lambda: timm.create_model(name, pretrained=False), on_meta)
    keep_statistics(model.train())
    shape = tuple(model.pretrained_cfg.get("input_size", (3, _IMAGE_SIZE, _IMAGE_SIZE)))
    if image_size is not None:
        shape = (shape[0], image_size, image_size)
    return _classifier(model, shape, on_meta)


def _find_function(name: str) -> Callable[[], Any]:
    module_name, _, function_name = name.partition(":")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"doctor: {name!r}: module {module_name!r} cannot be imported ({_told(error)}); "
            "expected a module of the current folder or of this Python. Run it where the module "
            "can be imported, or fix the module."
        ) from None
    function = vars(module).get(function_name)
    if not callable(function):
        close = difflib.get_close_matches(
            function_name, [key for key, value in vars(module).items() if callable(value)], n=3
        )
        remedy = (
            f"Did you mean {' or '.join(f'{module_name}:{key}' for key in close)}?"
            if close
            else "Define it there."
        )
        raise ConfigError(
            f"doctor: {name!r}; expected a function of module {module_name!r}. {remedy}"
        )
    return function


def _from_function(
    name: str, function: Callable[[], Any], image_size: int | None, on_meta: bool
) -> Built:
    made = _called(name, function, on_meta)
    if isinstance(made, nn.Module):
        return _classifier(made, (3, image_size or _IMAGE_SIZE, image_size or _IMAGE_SIZE), on_meta)
    if not (isinstance(made, tuple) and len(made) == 3):
        raise ConfigError(
            f"doctor: {name} returns {type(made).__name__}; expected a torch.nn.Module that "
            "classifies, or (model, loss_fn, batch): docs/doctor.md."
        )
    model, loss_fn, batch = made
    if not (
        isinstance(model, nn.Module)
        and callable(loss_fn)
        and isinstance(batch, Batch)
        and len(batch.record_id_B) >= 2
    ):
        got = ", ".join(type(part).__name__ for part in made)
        raise ConfigError(
            f"doctor: {name} returns ({got}); expected (torch.nn.Module, function, "
            "dpvision.data.batch.Batch of at least 2 records). See docs/doctor.md."
        )
    return Built(model, loss_fn, _to_meta(batch, on_meta))


def _classifier(model: nn.Module, shape: tuple[int, ...], on_meta: bool) -> Built:
    """Return a classifier with random images of ``shape`` (C, H, W), all of class 0."""
    generator = torch.Generator().manual_seed(0)
    batch = Batch(
        record_id_B=torch.arange(1, NUM_RECORDS + 1),
        valid_B=torch.ones(NUM_RECORDS, dtype=torch.bool),
        image_BVCHW=torch.randn(NUM_RECORDS, 1, *shape, generator=generator),
        label_B=torch.zeros(NUM_RECORDS, dtype=torch.long),
    )
    return Built(model, classification_losses, _to_meta(batch, on_meta))


def _called(name: str, function: Callable[[], Any], on_meta: bool) -> Any:
    """Call ``function`` with a fixed random seed, without changing the global random state."""
    place = torch.device("meta") if on_meta else contextlib.nullcontext()
    try:
        with torch.random.fork_rng(devices=[]), place:
            torch.manual_seed(0)
            return function()
    except Exception as error:
        hint = (
            " It is called under torch.device('meta'), where tensors have no values: read none."
            if "meta" in str(error)
            else ""
        )
        raise ConfigError(
            f"doctor: {name} raised {_told(error)}; expected a model.{hint} Fix the function."
        ) from None


def _told(error: Exception) -> str:
    """Return an exception as one line, with the file and line where it was raised."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)[1:]
        if not frame.filename.startswith("<frozen")
    ]
    place = (
        f" at {os.path.basename(frames[-1].filename)}, line {frames[-1].lineno}" if frames else ""
    )
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}{place}"


def _to_meta(batch: Batch, on_meta: bool) -> Batch:
    return Batch._make(None if t is None else t.to("meta") for t in batch) if on_meta else batch
