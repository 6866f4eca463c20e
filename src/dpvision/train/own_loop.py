"""A private training loop around your own model, data set, loss and optimizer.

    with private_loop(model, data, loss, config, "private/photos") as loop:
        for step in loop:
            step.backward()
            optimizer.step()

``private_loop`` opens the ledger and makes every check before the first step is charged. A step is
one operation, so its parts cannot be mixed up: it is charged, its batch drawn, read, clipped and
summed, and noise is added once. Only the private gradient comes out.

Each record is read and collated alone, with random numbers keyed by (step, position in the data
set). So no transform or collate function can mix records, and neither the size of a pass nor the
number of workers changes what a record contributes.

Another library's loop may turn it (docs/other_loops.md): ``len`` is the number of steps left. Until
the block ends, a backward pass of its own into the trained parameters is refused.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, default_collate

from dpvision.config import PrivacyConfig
from dpvision.data.batch import Batch, HostRows, mapped, take
from dpvision.data.declared import fits, rounded_up
from dpvision.data.keys import StepKey
from dpvision.devices import send
from dpvision.dp.buckets import num_buckets, pass_sizes, passes
from dpvision.dp.clip import (
    ClippedSum,
    LossFn,
    check_bits,
    clipped_sum,
    trained_parameters,
)
from dpvision.dp.noise import DPGradient, privatize
from dpvision.dp.reference_bits import forget_admitted
from dpvision.dp.route import trained
from dpvision.dp.separable import MAX_RECORDS, random_records, require_separable
from dpvision.errors import OPERATOR_ONLY, ConfigError, DataError, PrivacyError
from dpvision.files import write_json
from dpvision.privacy.accountant import PrivacySpent
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.plan import DPPlan, make_plan
from dpvision.privacy.sampling import derive_rng
from dpvision.privacy.store_marks import StoreLedgers
from dpvision.runs.run import Secrets
from dpvision.train.own_records import Reader, as_batch

Loss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> losses_B: one loss per record, with ``batch`` as the collate function gives it.
"""
_LOG = logging.getLogger("dpvision")
_KEY = StepKey(0, 0)
"""Of the checks, whose sums are not released."""


@contextlib.contextmanager
def private_loop(
    model: nn.Module,
    data: Any,
    loss: Loss,
    config: PrivacyConfig,
    folder: str | Path,
    *,
    run: str | None = None,
    resume: bool = False,
    physical_batch_size: int = 64,
    workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    public_batch: Any = None,
) -> "Iterator[PrivateLoop]":
    """Open a private training loop for the duration of the block.

    The ledger belongs to the data set: give every run on it the same ``folder``, and their epsilons
    add up (``dpvision ledger FOLDER``). After a crash, restore your weights and go on with
    ``resume=True``: steps that were charged stay charged.

    Args:
        model: on its device, in the mode in which it trains. Its parameters with ``requires_grad``
            are trained, and must stay the same.
        data: map-style data set, whose items are tensors, tuples or dicts of one shape. An item is
            a record: the guarantee is for one item, so an image that is in several (repeated,
            paired, mixed into others) has less. Its length must be the declared
            ``dataset_size``, within 1%. Random transforms use the global
            random numbers of torch, NumPy or Python. An item that raises, or has another shape,
            contributes zero, and so does one whose loss raises.
        loss: one loss per record, a function of that record and the weights, without random numbers
            of its own.
        config: the guarantee, with the record as its unit.
        folder: folder of the data set's identity, made at first use; LEDGERS is made beside it. A
            store of ``dpvision data import`` has both.
        run: name of the run in the ledgers; if None, a random one.
        resume: go on with the run of that name, which has the same plan.
        physical_batch_size: records of a pass, which fit the device's memory. Changes the order of
            float sums only.
        workers: processes that read records, as for ``DataLoader``.
        collate_fn: makes a batch of one from a list of one item.
        public_batch: public records as ``collate_fn`` gives them, at least two, for the checks; if
            None, random numbers in the shapes of the first record.

    Raises:
        ConfigError: a setting does not fit; PrivacyError: the model or loss mixes records, or the
            ledger refuses the plan; DataError: the data set or the folder cannot be used;
            CheckpointError: the run is in use, exists, or does not exist. No step was charged.
    """
    _require_plain(model)
    plan = _plan(config, data, run, resume)
    root = _data_folder(Path(folder))
    # Workers start before the ledger is opened: they would inherit its lock, and hold it for
    # seconds after this process was killed.
    reader = Reader.start(data, collate_fn, workers, public_batch)
    loss_fn: LossFn = partial(_losses, loss, reader.form.spec)
    rows = physical_batch_size
    _check(loss_fn, model, plan, rows, reader, public_batch)
    with (
        Ledger.open(root, run or uuid4().hex[:8], plan, resume=resume) as ledger,
        _no_other_gradients(model),
    ):
        yield PrivateLoop(ledger, model, loss_fn, reader, rows)


@dataclass(eq=False)
class PrivateLoop:
    """The steps of a run that are left; made by ``private_loop``."""

    ledger: Ledger
    model: nn.Module = field(repr=False)
    _loss_fn: LossFn = field(repr=False)
    _reader: Reader = field(repr=False)
    _rows: int = field(repr=False)
    _secrets: Secrets = field(default_factory=Secrets, repr=False)

    def __post_init__(self) -> None:
        self._params = trained(self.model)
        self._versions, self._told = list[int](), set[str]()
        self._num_drawn = self._num_left_out = 0

    @property
    def plan(self) -> DPPlan:
        return self.ledger.plan

    def spent(self) -> PrivacySpent:
        """Return the privacy stated for the run: that of all planned steps from the first one on
        (``DPPlan.stated_steps``). Weights that began in another run on this data set have both:
        ``dpvision ledger FOLDER`` adds them up.
        """
        return self.plan.spent(self.plan.stated_steps(self.ledger.steps))

    def __len__(self) -> int:
        """Return the number of steps that are left."""
        return self.plan.steps - self.ledger.steps

    def __iter__(self) -> "Iterator[PrivateStep]":
        """Charge and yield the steps that are left.

        Raises:
            PrivacyError: ``backward`` of the step before was not called, or failed.
        """
        while self.ledger.steps < self.plan.steps:
            step = PrivateStep(self, self.ledger.append())
            yield step
            if not step.done:
                raise PrivacyError(
                    f"loop: step={step.number} was charged and has no gradient; expected one call "
                    "of step.backward() in every turn, also after an error. Stop, and resume the "
                    "run with run=NAME, resume=True."
                )
        if self._num_left_out:
            self._tell_operator(
                "end",
                f"{self._num_left_out} of {self._num_drawn} records drawn contributed nothing: "
                "they could not be read, their loss raised, or they are not finite",
            )

    def _tell_operator(self, what: str, text: str) -> None:
        """Log what is secret, each kind of message once."""
        if what not in self._told:
            _LOG.warning("loop: %s%s", OPERATOR_ONLY, text)
        self._told.add(what)

    def _gradient(self, step: int) -> DPGradient:
        _require_plain(self.model)
        plan, params = self.plan, trained(self.model)
        if not step < self.ledger.steps:
            raise PrivacyError(
                f"loop: step={step}; expected one of the {self.ledger.steps} that were charged. "
                "Leave step.number as it is; take steps from `for step in loop`."
            )
        if params.keys() != self._params.keys() or any(
            params[name] is not p for name, p in self._params.items()
        ):
            wrong = sorted(params.keys() ^ self._params.keys()) or ["other tensors"]
            raise PrivacyError(
                f"loop: the trained parameters changed ({wrong[0]}); expected those that were "
                "checked. Freeze and unfreeze parameters before private_loop, or open another run."
            )
        versions = [p._version for p in params.values()]
        if versions == self._versions and "unchanged" not in self._told:
            self._told.add("unchanged")
            _LOG.warning(
                "loop: no trained parameter was written to since step %d; expected "
                "optimizer.step() after step.backward(), without zero_grad() in between, of an "
                "optimizer that holds this model's parameters",
                step - 1,
            )
        self._versions = versions
        drawn = plan.draw(step, self._reader.num_records, derive_rng(self._secrets.draw, step))
        total = ClippedSum.add_up(
            self.model,
            plan.max_grad_norm,
            (
                self._sum(batch, host, StepKey(0, step))
                for batch, host in self._batches(step, drawn)
            ),
        )
        left_out = len(drawn) - int(total.norms_B.isfinite().sum())
        self._num_drawn, self._num_left_out = (
            self._num_drawn + len(drawn),
            self._num_left_out + left_out,
        )
        if left_out == len(drawn) > 0:
            self._tell_operator("none", f"no record of step {step} contributed anything")
        first = next(iter(params.values()))
        gradient = privatize(total, plan, step, self._secrets.noise, dtype=first.dtype)
        for name, p in params.items():
            p.grad = gradient.grads[name]
        return gradient

    def _sum(self, batch: Batch, host: HostRows, key: StepKey) -> ClippedSum:
        """The clipped sum of a pass, without records whose own loss raises, as a label beyond the
        model's classes does: else one record would decide where a run ends.
        """
        settings: dict[str, Any] = {"rule": self.plan.clipping, "rows": self._rows}
        settings["max_grad_norm"] = self.plan.max_grad_norm
        try:
            return clipped_sum(self._loss_fn, self.model, batch, key, host=host, **settings)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if isinstance(error, PrivacyError) and not isinstance(error.__cause__, RuntimeError):
                raise
            taken_B = torch.tensor([self._takes(batch, i, key) for i in range(len(batch.valid_B))])
            wrong = (host.valid_B & ~taken_B).nonzero()[:, 0]
            # Where all raise, a record of random numbers shows whether the loss itself fails.
            if not len(wrong) or not (taken_B.any() or self._takes(self._stand_in(batch), 0, key)):
                raise
            first = int(host.record_id_B[wrong[0]])
            self._tell_operator(
                "raises", f"record {first}: {type(error).__name__}: {error}; it contributes zero"
            )
        valid_B = host.valid_B & taken_B
        batch = batch._replace(valid_B=send(valid_B, batch.valid_B.device))
        host = HostRows(host.record_id_B, valid_B)
        return clipped_sum(self._loss_fn, self.model, batch, key, host=host, **settings)

    def _stand_in(self, batch: Batch) -> Batch:
        device = batch.record_id_B.device
        return mapped(random_records(batch, 1), lambda value: send(value, device))

    @torch.no_grad()
    def _takes(self, batch: Batch, row: int, key: StepKey) -> bool:
        """Whether the loss of a record alone raises nothing: in as many copies as the checks had
        records, since a loss may want more than one.
        """
        rows = torch.full((MAX_RECORDS,), row, device=batch.record_id_B.device)
        try:
            self._loss_fn(self.model, take(batch, rows), key)
        except Exception:  # whatever a loss raises
            return False
        return True

    def _batches(self, step: int, drawn: np.ndarray) -> Iterator[tuple[Batch, HostRows]]:
        """Yield the passes of a step on the model's device: buckets by hash, as ``train.step``."""
        count = num_buckets(self.plan.expected_batch_size, self._rows)
        parts = [drawn[part] for part in passes(StepKey(0, step), drawn, count, self._rows)]
        device = next(iter(self._params.values())).device
        for batch in self._reader.read(step, parts):
            host = HostRows(batch.record_id_B, batch.valid_B)
            yield mapped(batch, lambda value: send(value, device)), host


class PrivateStep:
    """A charged step of a loop. No dataclass: Lightning would copy it on its way to a device.

    Attributes:
        number: from 0 to the plan's steps - 1, for schedules.
        done: whether its gradient was computed.
    """

    def __init__(self, loop: PrivateLoop, number: int) -> None:
        self._loop, self.number, self.done = loop, number, False

    def backward(self) -> DPGradient:
        """Draw and read the step's batch, and put the private gradient in the ``grad`` of the
        trained parameters, in place of what was there. Runs under the caller's autocast.

        Returns:
            The gradient, which is released: whatever is computed from it is private.

        Raises:
            PrivacyError: it was called before; the trained parameters changed; or as
                ``clipped_sum``.
        """
        if self.done:
            raise PrivacyError(
                f"loop: step={self.number}; expected one backward() a step: a second gradient is "
                "not accounted for. Use the one that it returned."
            )
        gradient = self._loop._gradient(self.number)
        self.done = True
        return gradient


def _require_plain(model: nn.Module) -> None:
    """Refuse models and processes whose gradients would be those of several runs."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    ranks = max(ranks, int(os.environ.get("WORLD_SIZE", "1")))  # torchrun, without a group yet
    wrapped = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    if ranks > 1 or wrapped:
        raise ConfigError(
            f"loop: {type(model).__name__} in {ranks} processes; expected the model itself, in one "
            "process: each would make a run of its own, and their mean is none of them. Pass "
            "model.module in one process; several need plan.draw, clipped_sum and privatize."
        )


@contextlib.contextmanager
def _no_other_gradients(model: nn.Module) -> Iterator[None]:
    """Refuse a backward pass that reaches the trained parameters, as other trainers make, for the
    duration of the block. ``clipped_sum`` takes gradients without writing to ``grad``.
    """

    def refuse(parameter: Tensor) -> None:
        parameter.grad = None
        raise PrivacyError(
            "loop: a backward pass outside the loop reached a trained parameter; expected "
            "gradients of step.backward() only: others have no noise. Leave out loss.backward() "
            "(in Lightning use manual optimisation); for public data use torch.autograd.grad."
        )

    hooks = [p.register_post_accumulate_grad_hook(refuse) for p in trained(model).values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _plan(config: PrivacyConfig, data: Any, run: str | None, resume: bool) -> DPPlan:
    """Make the plan, and refuse what a loop over a data set cannot keep."""
    if config.guarantee != "dp" or config.num_units is not None:
        raise ConfigError(
            f"loop: guarantee={config.guarantee}, num_units={config.num_units}; expected a "
            "guarantee for records: a data set does not say which belong to one person. Drop both; "
            "for people use `dpvision train` on a store."
        )
    if isinstance(data, DataLoader) or not (
        hasattr(data, "__getitem__") and hasattr(data, "__len__")
    ):
        raise ConfigError(
            f"loop: data is a {type(data).__name__}; expected a data set with a length and items "
            "by position: the plan draws the batches. Pass loader.dataset, and the loader's "
            "workers= and collate_fn=."
        )
    if resume and run is None:
        raise ConfigError(
            "loop: resume=True, run=None; expected the run's name. Pass run=NAME, as in "
            "loop.ledger.run_id of its first start."
        )
    if not fits(len(data), config.dataset_size, at_most=config.sampling != "poisson"):
        raise DataError(
            f"loop: {OPERATOR_ONLY}{len(data)} records in the data set; expected the declared "
            f"dataset_size={config.dataset_size}, within 1%, and no more unless batches are "
            f"sampled. Declare dataset_size={rounded_up(len(data))}, which becomes public."
        )
    return make_plan(config)


def _data_folder(root: Path) -> Path:
    """Return the folder that names the data set to its ledgers; a new one gets a random id, and
    marks as after an import.
    """
    if (root / "store.json").exists():
        return root
    root.mkdir(parents=True, exist_ok=True)
    if any(root.iterdir()):
        raise DataError(
            f"loop: {root} holds other files and no store.json; expected a new folder, or one of "
            "this data set's earlier runs. Restore store.json, or name another folder."
        )
    write_json(root / "store.json", {"store_id": uuid4().hex, "visibility": "private"})
    StoreLedgers.of(root).register()
    return root


def _losses(loss: Loss, spec: TreeSpec, model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    return loss(model, tree_unflatten(batch[2:], spec))


def _check(
    loss_fn: LossFn, model: nn.Module, plan: DPPlan, rows: int, reader: Reader, public_batch: Any
) -> None:
    """Check, on public records, that no record changes another's gradient, and that a record's bits
    do not depend on the other rows of its pass.
    """
    assert plan.max_grad_norm is not None, "a plan with a guarantee clips"
    first = next(iter(trained_parameters(model, plan.max_grad_norm).values()))
    public = None if public_batch is None else as_batch(tree_flatten(public_batch)[0])
    like = as_batch(reader.form.zeros()) if public is None else public
    if require_separable(loss_fn, model, like, _KEY, public):
        forget_admitted(model)
    many = random_records(like, rows)
    if public is not None:
        many = take(public, torch.arange(rows) % len(public.valid_B))._replace(
            record_id_B=many.record_id_B
        )
    check_bits(
        loss_fn,
        model,
        mapped(many, lambda value: send(value, first.device)),
        _KEY,
        pass_sizes(plan.expected_batch_size, rows, plan.steps),
        max_grad_norm=plan.max_grad_norm,
        rule=plan.clipping,
    )
