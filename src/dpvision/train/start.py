"""Make a session from a config: every check that can refuse a run comes before the first step is
charged.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpvision.checkpoint import Checkpoint, load_checkpoint, state_tensors
from dpvision.config import CaptionerConfig, ClassifierConfig, HardwareConfig, RunConfig
from dpvision.config.resolve import require_read
from dpvision.data.keys import StepKey
from dpvision.data.open import open_store
from dpvision.data.people import People
from dpvision.data.store import Store
from dpvision.data.texture_store import TextureStore
from dpvision.devices import require_precision
from dpvision.dp.clip import LossFn
from dpvision.dp.compiled import CompiledBlocks, compile_blocks
from dpvision.dp.route import route_of
from dpvision.dp.support import check_compiled
from dpvision.errors import ConfigError
from dpvision.models import make_model
from dpvision.optim.ema import make_ema
from dpvision.optim.optimizer import Optimizer
from dpvision.privacy.plan import DPPlan, make_plan
from dpvision.runs.folder import OTHERS_WEIGHTS, read_run, require_parent
from dpvision.runs.lineage import inherit, lineage_of_results, shaped_in_confidence
from dpvision.runs.run import Stopped, new_run
from dpvision.runs.store_checks import (
    check_labels,
    check_people,
    check_store,
    require_public,
    rows_to_draw,
)
from dpvision.train import distributed
from dpvision.train.distributed import together
from dpvision.train.gates import check_gates
from dpvision.train.loop import Session
from dpvision.train.memory import require_fit, too_large
from dpvision.train.objectives import example_batch, loss_function
from dpvision.train.parent import check_constants, load_weights, start_from
from dpvision.train.same import check_same_everywhere, facts_of_start
from dpvision.train.step import Training, autocast, check_reference_bits, to_device
from dpvision.train.words import open_tokenizer, open_words
from dpvision.weights import Lineage, contents

OpenParent = Callable[[str], Checkpoint]
_COMPARED = 16
"""Compiled blocks are compared in float32 on at most so many records, which fit where a bfloat16
batch may not.
"""


def check_run(
    config: RunConfig, open_parent: OpenParent = load_checkpoint
) -> tuple[DPPlan, Store, int, Lineage]:
    """Make every check of a new run without starting it (``--dry-run``).

    Args:
        open_parent: as for ``new_session``.

    Returns:
        The plan, the store, the number of records that may be drawn, and the lineage of the initial
        weights.

    Raises:
        DPVisionError: as ``new_session``.
    """
    with _joined(config.hardware) as group:
        with together(group, slow="checked", doing="checks the model"):
            _check_paths(config, open_parent)
            plan = make_plan(config.privacy)
            session = _prepare(config, plan, None, open_parent, group)
        _check_same(session)
    return plan, session.store, len(session.rows), session.lineage


@contextlib.contextmanager
def new_session(
    config: RunConfig, root: Path, open_parent: OpenParent = load_checkpoint
) -> Iterator[Session]:
    """Open a session for a new run in folder ``root``.

    Args:
        open_parent: opens the checkpoint named by ``init_from``: a run's folder; with
            ``encoders.starting_weights.open_parent`` also weights of others (``OTHERS_WEIGHTS``).

    Raises:
        DPVisionError: the run is impossible or unsafe; no step was charged.
    """
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(_joined(config.hardware))
        with together(group, slow="checked", doing="checks the model"):
            _check_paths(config, open_parent)
            plan = make_plan(config.privacy)
            session = _prepare(config, plan, None, open_parent, group)
        _check_same(session)
        with together(group):
            if group.is_main:
                made = new_run(
                    root,
                    config,
                    plan,
                    session.store,
                    session.lineage,
                    num_bytes=_space(session),
                    secluded=shaped_in_confidence(session.lineage),
                )
                session.run = stack.enter_context(made)
        yield session


@contextlib.contextmanager
def resumed_session(
    root: Path, hardware: dict[str, Any] | None = None, open_parent: OpenParent = load_checkpoint
) -> Iterator[Session]:
    """Open a session for an existing run: its config and plan, its newest checkpoint, the ledger's
    step count, new keys.

    Args:
        hardware: HardwareConfig fields to change, the only settings that a resumed run may change.
        open_parent: as for ``new_session``; used if the run stopped before its first checkpoint.

    Raises:
        DPVisionError: the run, its ledger or its store do not match.
    """
    asked = hardware or {}
    with contextlib.ExitStack() as stack:
        hardware_now = replace(read_run(root)[1].hardware, **asked)
        group = stack.enter_context(_joined(hardware_now))
        with together(group, slow="checked", doing="checks the model"):
            stopped = Stopped.read(root, asked)
            session = _prepare(stopped.config, stopped.plan, stopped.checkpoint, open_parent, group)
            stopped.require_store(session.store)
        _check_same(session)
        with together(group):
            if group.is_main:
                session.run = stack.enter_context(
                    stopped.resumed(session.store, session.lineage, num_bytes=_space(session))
                )
        yield session


@contextlib.contextmanager
def _joined(hardware: HardwareConfig) -> Iterator[distributed.Group]:
    """Join the run's process group for the duration of the block."""
    try:
        yield distributed.join(hardware.device, hardware.rank_timeout_s)
    finally:
        distributed.leave()


def _check_same(session: Session) -> None:
    """Refuse ranks that differ in anything that the guarantee depends on, before anything is
    charged.
    """
    if session.group.world_size == 1:
        return
    tensors = {
        **state_tensors(session.model),
        **{f"optimizer {name}": value for name, value in session.optimizer.tensors().items()},
        **{f"average {name}": value for name, value in (session.ema or {}).items()},
    }
    facts = facts_of_start(
        session.config,
        session.plan,
        session.store,
        session.rows,
        None if session.words is None else session.words.tokenizer.to_bytes(),
        session.lineage,
        tensors,
        f"{session.updates} updates, {session.saved_steps} steps",
        session.group.device,
    )
    check_same_everywhere(facts, session.group)


def _prepare(
    config: RunConfig,
    plan: DPPlan,
    checkpoint: Checkpoint | None,
    open_parent: OpenParent,
    group: distributed.Group,
) -> Session:
    """Make store, model, optimizer and lineage on this process's device. No collective call: any
    rank may fail here.
    """
    assert config.data.store is not None, "_check_paths refused that"
    store = open_store(Path(config.data.store))
    if config.data.images == "public":
        require_public(store, config.recipe)
    rows = rows_to_draw(store, plan.unit, config.seed)
    check_store(plan, store, rows)
    if plan.unit.draws_people:
        check_people(store)
    if isinstance(config.model, ClassifierConfig):
        check_labels(store, rows, config.model.num_classes, multi_label=config.model.multi_label)
    require_precision(config.hardware.precision, group.device)
    model = make_model(config.model, config.seed)
    lineage: Lineage = []
    parent = (
        open_parent(config.init_from)
        if checkpoint is None and config.init_from is not None
        else None
    )
    if checkpoint is None and parent is None:
        _refuse_untrained_statistics(config, model)
    words = open_words(config, store, rows, checkpoint or parent)
    if checkpoint is not None:
        lineage = checkpoint.manifest["lineage"][:-1]
        load_weights(model, checkpoint)
    elif parent is not None:
        lineage = inherit(
            lineage_of_results(parent.manifest["lineage"], parent.path),
            store,
            plan,
            declaration=config.public_weights,
            allow_weak=config.privacy.allow_weak_guarantee,
            tensors=parent.model.values(),
        )
        check_constants(config, parent)
        start_from(model, config.model, parent)
    loss_fn = loss_function(config)
    if plan.guarantee == "dp" and group.is_main:
        # On one rank only: the result is the same on all, and the float64 copies take several times
        # the memory of the weights.
        check_gates(config, model, loss_fn)
    start = None if plan.guarantee == "dp" else frozenset(contents(model.state_dict().values()))
    model.to(group.device)
    if plan.guarantee == "dp":
        with autocast(config.hardware.precision, group.device):
            # On public records: private ones must not decide which parameters are slow, nor whether
            # the warning about them is logged.
            try:
                example = to_device(example_batch(config), group.device)
                route_of(loss_fn, model, example, StepKey(config.seed, 0))
            except torch.OutOfMemoryError:  # of the few records of the example
                size = config.hardware.physical_batch_size
                raise ConfigError(too_large(size, 0, group.device)) from None
    if group.device.type != "cpu":
        require_fit(config, model, loss_fn, group.device)
    blocks = _compile(config, model, loss_fn, group) if config.hardware.compile else None
    training = Training(
        config,
        plan,
        store,
        rows,
        words,
        model,
        loss_fn,
        group,
        blocks,
        People.of(store) if plan.unit.draws_people else None,
    )
    check_reference_bits(training)
    optimizer = Optimizer(config.optim, model)
    ema = make_ema(model) if config.optim.averages else None
    if checkpoint is not None:
        optimizer.load(checkpoint.optimizer or {})
        if ema is not None and checkpoint.ema is not None:
            ema = {name: value.to(group.device) for name, value in checkpoint.ema.items()}
    updates, saved = (
        (0, None)
        if checkpoint is None
        else (checkpoint.manifest["updates"], checkpoint.manifest["ledger_steps"])
    )
    return Session(
        **vars(training),
        optimizer=optimizer,
        ema=ema,
        lineage=lineage,
        updates=updates,
        saved_steps=saved,
        start=start,
    )


def _refuse_untrained_statistics(config: RunConfig, model: nn.Module) -> None:
    """Refuse BatchNorm without a parent's statistics, since a run does not change them."""
    norms = [name for name, part in model.named_modules() if isinstance(part, _BatchNorm)]
    if norms:
        raise ConfigError(
            f"run: init_from=None with BatchNorm ({norms[0]} and {len(norms) - 1} more), which "
            "keeps the statistics that it starts with; expected trained weights. Pass --init-from "
            "timm:NAME@FILE, or choose an encoder with GroupNorm or LayerNorm (resnetv2_50x1_bit, "
            "convnext_tiny)."
        )


def _compile(
    config: RunConfig, model: nn.Module, loss_fn: LossFn, group: distributed.Group
) -> CompiledBlocks:
    """Compile the model's blocks for full physical batches. Before a private run, compare compiled
    blocks with uncompiled ones.
    """
    size = config.hardware.physical_batch_size
    blocks = compile_blocks(model, size)
    if config.privacy.guarantee == "dp":
        compared = blocks
        if config.hardware.precision != "float32" and size > _COMPARED:
            size = _COMPARED
            compared = compile_blocks(model, size)
        try:
            check_compiled(
                loss_fn,
                model,
                to_device(example_batch(config, size), group.device),
                StepKey(config.seed, 0),
                compared,
            )
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"hardware: compile=True; out of memory on {group.device} while compiled blocks "
                f"are compared with uncompiled ones, on {size} records. Lower "
                "--hardware.physical-batch-size, or leave out --hardware.compile."
            ) from None
    return blocks


def _space(session: Session) -> int:
    """Size of two checkpoints in bytes: weights, their average if there is one, two moments of the
    optimizer.
    """
    copies = 3 + (session.ema is not None)
    return 2 * copies * sum(p.numel() * p.element_size() for p in session.model.parameters())


def _check_paths(config: RunConfig, open_parent: OpenParent) -> None:
    """Refuse missing files, and settings that are not read, before the plan is made: calibrating
    its noise can take half a minute.
    """
    if config.data.store is None:
        raise ConfigError(
            "data: store=None; expected a folder made by `dpvision data import`. Pass --data STORE."
        )
    require_read(config, textures=isinstance(open_store(Path(config.data.store)), TextureStore))
    init_from = config.init_from
    if (
        init_from is not None
        and init_from.startswith(OTHERS_WEIGHTS)
        and open_parent is not load_checkpoint
    ):
        open_parent(init_from)  # raises with the reason
    else:
        require_parent(init_from)
    if isinstance(config.model, CaptionerConfig):
        open_tokenizer(config)
