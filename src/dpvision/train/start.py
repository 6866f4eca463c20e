"""From a config to a session ready to train: every check that can refuse comes before the first step is charged."""

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dpvision.checkpoint import Checkpoint, list_checkpoints, load_checkpoint, state_tensors
from dpvision.config import CaptionerConfig, ClassifierConfig, RunConfig
from dpvision.data.declared import count_units, fits, has_units, rounded_up
from dpvision.data.keys import StepKey
from dpvision.data.open import open_store
from dpvision.data.store import Store
from dpvision.dp.clip import LossFn
from dpvision.dp.compiled import CompiledBlocks, compile_blocks
from dpvision.dp.support import check_at_sizes, check_compiled, check_exact, check_separable
from dpvision.errors import OPERATOR_ONLY, CheckpointError, ConfigError, DataError, DPVisionError, PrivacyError
from dpvision.files import write_json
from dpvision.models import make_model
from dpvision.optim.ema import make_ema
from dpvision.optim.optimizer import Optimizer
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.plan import DPPlan, make_plan
from dpvision.train import distributed
from dpvision.train.distributed import together
from dpvision.train.folder import create_run, discard_run, open_run, read_run, require_space
from dpvision.train.lineage import inherit, shaped_in_confidence
from dpvision.train.loop import Session
from dpvision.train.objectives import example_batch, loss_function
from dpvision.train.parent import check_constants, load_weights, start_from
from dpvision.train.same import check_same_everywhere, facts_of_start
from dpvision.train.step import to_device
from dpvision.train.words import open_tokenizer, open_words
from dpvision.weights import Lineage, contents

OpenParent = Callable[[str], Checkpoint]


def check_store(plan: DPPlan, store: Store, rows: np.ndarray) -> None:
    """Refuse a store that is not the declared one: another number of records or units, or units that the plan does not know of.

    Declared numbers are public and may be rounded, so 1% is allowed. Truncated Poisson is accounted for at most N records, and a full
    batch of at most N records has the declared N as its divisor. The message holds private counts: it is for the operator's terminal,
    and stands in no file of the run.

    Args:
        rows: int64 rows that take part (``Store.eligible_rows``).

    Raises:
        DataError: the counts do not fit.
    """
    k, where = plan.max_records_per_unit, f"store: {store.store_id[:8]}"
    if has_units(store) and plan.num_units is None and plan.guarantee == "dp":
        raise DataError(
            f"{where} knows the unit ({store.meta['unit_field']}) of each record, and num_units is not declared; expected it: the "
            "guarantee is for a unit with all its records. Say --privacy.num-units M, and --privacy.max-records-per-unit k to use more "
            "than one record of each. `dpvision data inspect STORE` shows numbers to declare."
        )
    if plan.num_units is not None and not has_units(store):
        raise DataError(
            f"{where} does not know units, and num_units={plan.num_units} is declared; expected a store imported with --unit-from FIELD. "
            "Import it so, or drop --privacy.num-units."
        )
    # How many images a cleared store lacks is private: the number before is the public one.
    num_records = len(rows) if has_units(store) else store.meta.get("cleared_from", len(rows))
    counts = [("dataset_size", num_records, plan.dataset_size, plan.sampling != "poisson", "records")]
    if plan.num_units is not None:
        counts.append(("num_units", count_units(store, rows), plan.num_units, False, "units"))
    if all(fits(count, declared, at_most=at_most) for _, count, declared, at_most, _ in counts):
        return
    found = " and ".join(f"{count} {noun}" for _, count, _, _, noun in counts)
    rule = " and ".join(f"{name}={declared} ({'at most that, ' if at_most else ''}within 1%)" for name, _, declared, at_most, _ in counts)
    say = " ".join(f"--privacy.{name.replace('_', '-')} {rounded_up(count)}" for name, count, *_ in counts)
    among = f" with max_records_per_unit={k}" if plan.num_units is not None else ""
    raise DataError(
        f"{where}: {OPERATOR_ONLY}{found} can take part{among}; expected the declared {rule}. Say {say} (these become public) for a new "
        "plan; where a batch is drawn it may want another size too."
    )


def check_labels(store: Store, rows: np.ndarray, num_classes: int, *, multi_label: bool = False) -> None:
    """Refuse a store that a classifier cannot be trained on.

    Labels are private where the pictures are: the message is for whoever holds them, and stands in no file of the run. During a step
    nothing is raised (``models.classifier.losses``).

    Args:
        rows: int64 rows that take part.
        multi_label: a record may have several.

    Raises:
        DataError: the store has one label a record and several are expected, or the reverse; a record has none (no answer: an empty list
            is one) and the import did not say --unknown-classes unlabelled; one is no class of the model, or they tell no two records
            apart.
    """
    where = f"store: {store.path}"
    if store.multi_label != multi_label:
        got, rule = ("several labels", "one") if store.multi_label else ("one label", "several")
        change = "Say --model.multi-label (a network: with --model.loss sigmoid)" if store.multi_label else "Drop --model.multi-label"
        raise DataError(f"{where} has {got} a record; expected {rule} with multi_label={multi_label}. {change}, or import other labels.")
    missing = int((~store.labelled[rows]).sum())
    # With the operator's word at the import such a record takes part, and its contribution is exactly zero.
    if missing > 0 and (missing == len(rows) or not store.meta.get("may_be_unlabelled")):
        one, but = ("a list", " Write [] for none of the classes.") if multi_label else ("one", "")
        raise DataError(
            f"{where}: {OPERATOR_ONLY}{missing} of {len(rows)} records have no label; expected {one} each. "
            f"Import with --label-from FIELD.{but}"
        )
    place_M, class_M = store.classes(rows)
    if (outside := len(np.unique(place_M[class_M >= num_classes]))) > 0:
        raise DataError(
            f"{where}: {OPERATOR_ONLY}label={int(class_M.max())} in {outside} records is outside the range; "
            f"expected 0 to {num_classes - 1}. Say --model.num-classes {int(class_M.max()) + 1}, or import with the right classes."
        )
    count_K = np.bincount(class_M, minlength=num_classes)
    if multi_label and len(rows) and ((count_K == 0) | (count_K == len(rows))).all():
        raise DataError(f"{where}: {OPERATOR_ONLY}every record has the same labels; expected some that differ. Correct the labels.")
    if not multi_label and len(rows) and count_K.max() == len(rows):
        raise DataError(
            f"{where}: {OPERATOR_ONLY}one class only, label={int(class_M[0])}; expected two or more. Add pictures of another class."
        )


def check_run(config: RunConfig, open_parent: OpenParent = load_checkpoint) -> tuple[DPPlan, Store, int, Lineage]:
    """Every check of a new run without making it (``--dry-run``).

    Args:
        open_parent: as for ``new_session``.

    Returns:
        The plan, the store, the number of records that would take part, and the lineage of the weights that it would start from.

    Raises:
        DPVisionError: what ``new_session`` would raise.
    """
    with _joined(config) as group:
        with together(group):
            _check_paths(config, open_parent)
            plan = make_plan(config.privacy)
            session = _prepare(config, plan, None, open_parent, group)
        _check_same(session)
    return plan, session.store, len(session.rows), session.lineage


@contextlib.contextmanager
def new_session(config: RunConfig, root: Path, open_parent: OpenParent = load_checkpoint) -> Iterator[Session]:
    """A session for a new run in folder ``root``.

    Args:
        open_parent: opens what ``init_from`` names: a run's folder; with ``encoders.parent.open_parent`` also timm:NAME.

    Raises:
        DPVisionError: anything that makes the run impossible or unsafe; no step has been charged then.
    """
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(_joined(config))
        with together(group):
            _check_paths(config, open_parent)
            plan = make_plan(config.privacy)
            session = _prepare(config, plan, None, open_parent, group)
        _check_same(session)
        with together(group):
            if group.is_main:
                _begin(session, root, stack)
        yield session


def _begin(session: Session, root: Path, stack: contextlib.ExitStack) -> None:
    """Make the run's folder and its ledger, closed again by ``stack``; rank 0 only."""
    require_space(root, 2 * _checkpoint_bytes(session))
    config, plan, store = session.config, session.plan, session.store
    about = {
        "store_id": store.store_id, "store_visibility": store.visibility, "results_visibility": store.results_visibility,
        "guarantee": plan.guarantee,
    }  # fmt: skip
    secluded = store.visibility == "private" or shaped_in_confidence(session.lineage)
    session.folder = create_run(root, config, about, wholly_confidential=plan.guarantee != "dp" and secluded)
    stack.callback(session.folder.close)
    try:
        write_json(session.folder.base / "plan.json", plan.to_dict())
        session.ledger = stack.enter_context(_open_ledger(session, session.folder.run_id, resume=False))
    except DPVisionError:
        discard_run(session.folder)  # refused, by the owner's cap say: the name stays free
        raise


@contextlib.contextmanager
def resumed_session(root: Path, hardware: dict[str, Any] | None = None, open_parent: OpenParent = load_checkpoint) -> Iterator[Session]:
    """The session of an existing run: its own config and plan, its newest checkpoint, the ledger's count, new keys.

    Args:
        hardware: HardwareConfig fields to change: the only settings that a resumed run may change.
        open_parent: as for ``new_session``; used where the run stopped before its first checkpoint.

    Raises:
        DPVisionError: the run, its ledger or its store do not fit together.
    """
    base, config, about = read_run(root)
    config = replace(config, hardware=replace(config.hardware, **(hardware or {})))
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(_joined(config))
        with together(group):
            plan = _read_plan(base)
            checkpoint = load_checkpoint(base) if list_checkpoints(base) else None
            if checkpoint is not None and checkpoint.manifest["run_id"] != about["run_id"]:
                raise CheckpointError(f"checkpoint: {checkpoint.path} is of another run. Remove it, or correct the folder.")
            session = _prepare(config, plan, checkpoint, open_parent, group)
            if session.store.store_id != about["store_id"]:
                raise DataError(f"store: {config.data.store} is not the store of this run. Put the original back, or start a new run.")
        _check_same(session)
        with together(group):
            if group.is_main:
                _continue(session, root, stack)
        yield session


def _continue(session: Session, root: Path, stack: contextlib.ExitStack) -> None:
    """Open the run's folder and its ledger, closed again by ``stack``; rank 0 only."""
    require_space(root, 2 * _checkpoint_bytes(session))
    session.folder = open_run(root)
    stack.callback(session.folder.close)
    session.ledger = stack.enter_context(_open_ledger(session, session.folder.run_id, resume=True))
    if session.saved_steps is not None and session.saved_steps > session.ledger.steps:
        raise PrivacyError(
            f"ledger: {session.ledger.steps} steps, yet a checkpoint was written after {session.saved_steps}; "
            "expected the newer ledger. Restore the LEDGERS folder that belongs to this store."
        )


@contextlib.contextmanager
def _joined(config: RunConfig) -> Iterator[distributed.Group]:
    """This process among the run's processes, for as long as the block lasts."""
    try:
        yield distributed.join(config.hardware.device)
    finally:
        distributed.leave()


def _check_same(session: Session) -> None:
    """Refuse ranks that do not hold the same of everything that the guarantee rests on, before anything is charged."""
    if session.group.world_size == 1:
        return
    tensors = {
        **state_tensors(session.model),
        **{f"optimizer {name}": value for name, value in session.optimizer.tensors().items()},
        **{f"average {name}": value for name, value in (session.ema or {}).items()},
    }
    facts = facts_of_start(
        session.config, session.plan, session.store, session.rows,
        None if session.words is None else session.words.tokenizer.to_bytes(),
        session.lineage, tensors, f"{session.updates} updates, {session.saved_steps} steps", session.group.device,
    )  # fmt: skip
    check_same_everywhere(facts, session.group)


def _prepare(config: RunConfig, plan: DPPlan, checkpoint: Checkpoint | None, open_parent: OpenParent, group: distributed.Group) -> Session:
    """Store, model, optimizer and lineage, on this process's device. No collective call: any rank may be refused here."""
    assert config.data.store is not None, "_check_paths refused that"
    store = open_store(Path(config.data.store))
    rows = store.eligible_rows(plan.max_records_per_unit, config.seed)
    check_store(plan, store, rows)
    if isinstance(config.model, ClassifierConfig):
        check_labels(store, rows, config.model.num_classes, multi_label=config.model.multi_label)
    model = make_model(config.model, config.seed)
    lineage: Lineage = []
    parent = open_parent(config.init_from) if checkpoint is None and config.init_from is not None else None
    words = open_words(config, store, rows, checkpoint or parent)
    if checkpoint is not None:
        lineage = checkpoint.manifest["lineage"][:-1]
        load_weights(model, checkpoint)
    elif parent is not None:
        lineage = inherit(
            parent.manifest["lineage"], store, plan, declaration=config.public_weights,
            allow_weak=config.privacy.allow_weak_guarantee, tensors=parent.model.values(),
        )  # fmt: skip
        check_constants(config, parent)
        start_from(model, config.model, parent)
    loss_fn = loss_function(config)
    if plan.guarantee == "dp":
        perturbed = _perturb_zeros(model)
        check_separable(loss_fn, perturbed, example_batch(config), StepKey(config.seed, 0))
        check_exact(loss_fn, perturbed, example_batch(config), StepKey(config.seed, 0))
        check_at_sizes(loss_fn, perturbed, example_batch(config, config.hardware.physical_batch_size), StepKey(config.seed, 0))
    start = None if plan.guarantee == "dp" else frozenset(contents(model.state_dict().values()))
    model.to(group.device)
    blocks = _compile(config, model, loss_fn, group) if config.hardware.compile else None
    optimizer = Optimizer(config.optim, model)
    ema = make_ema(model) if config.optim.averages else None
    if checkpoint is not None:
        optimizer.load(checkpoint.optimizer or {})
        if ema is not None and checkpoint.ema is not None:
            ema = {name: value.to(group.device) for name, value in checkpoint.ema.items()}
    updates, saved = (0, None) if checkpoint is None else (checkpoint.manifest["updates"], checkpoint.manifest["ledger_steps"])
    return Session(
        config, plan, store, rows, words, model, loss_fn, group, blocks,
        optimizer=optimizer, ema=ema, lineage=lineage, updates=updates, saved_steps=saved, start=start,
    )  # fmt: skip


def _compile(config: RunConfig, model: nn.Module, loss_fn: LossFn, group: distributed.Group) -> CompiledBlocks:
    """The model's blocks compiled for full physical batches, and compared with the blocks as they are."""
    size = config.hardware.physical_batch_size
    blocks = compile_blocks(model, size)
    if config.privacy.guarantee == "dp":
        check_compiled(loss_fn, model, to_device(example_batch(config, size), group.device), StepKey(config.seed, 0), blocks)
    return blocks


def _checkpoint_bytes(session: Session) -> int:
    """Size of one checkpoint: weights, their average if there is one, two moments of the optimizer."""
    copies = 3 + (session.ema is not None)
    return copies * sum(p.numel() * p.element_size() for p in session.model.parameters())


def _check_paths(config: RunConfig, open_parent: OpenParent) -> None:
    """Refuse what is not there before the plan is made: calibrating its noise can take half a minute."""
    if config.data.store is None:
        raise ConfigError("data: store=None; expected a folder made by `dpvision data import`. Say --data STORE.")
    if not Path(config.data.store).exists():
        open_store(Path(config.data.store))  # says what is missing
    if isinstance(config.model, CaptionerConfig):
        open_tokenizer(config)
    init_from = config.init_from
    if init_from is not None and init_from.startswith("timm:") and open_parent is not load_checkpoint:
        open_parent(init_from)  # says what is missing
    elif init_from is not None and not Path(init_from).exists():
        name = Path(init_from).name
        make = f"Make it with `dpvision train {name}`" if name.startswith("synthetic.") else "Correct --init-from"
        raise CheckpointError(
            f"run: init_from={init_from!r} is not there; expected the run that this one starts from. "
            f"{make}, or say --init-from None for random weights."
        )


def _perturb_zeros(model: nn.Module) -> nn.Module:
    """A copy with small values where a parameter starts as zeros: behind a head of zeros every gradient is zero, any sum of them exact."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in copied.parameters():
            if not parameter.any():
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return copied


def _open_ledger(session: Session, run_id: str, *, resume: bool) -> Ledger:
    assert session.config.data.store is not None
    return Ledger.open(Path(session.config.data.store), run_id, session.plan, resume=resume, lineage=session.lineage)


def _read_plan(base: Path) -> DPPlan:
    try:
        return DPPlan.from_dict(json.loads((base / "plan.json").read_bytes()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"run: {base / 'plan.json'} cannot be read ({error}). Restore it as the run wrote it.") from None
