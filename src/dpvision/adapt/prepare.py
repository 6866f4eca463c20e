"""Prepare a private head's run from its config. Every check that can refuse the run comes before
the first charge.

The choices made here (head, features, plan) depend on public numbers only: declared ones, and the
encoder's output on public noise. Messages about labels and the store's size are for the operator
and are written to no file.

Legend: N records, D feature dimension, K classes.
"""

import math
import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dpvision.adapt import defaults
from dpvision.adapt.fit import kind_of
from dpvision.adapt.person_rows import PersonImages
from dpvision.adapt.public_statistics import open_public, public_entry
from dpvision.config import FrozenEncoderConfig, HeadConfig, PrivacyConfig, RunConfig
from dpvision.config.resolve import require_read, with_candidate, with_head, with_steps
from dpvision.data.declared import count_units, has_units, rounded_up
from dpvision.data.open import open_store
from dpvision.data.store import Store
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.feature_file import rows_of_pass
from dpvision.encoders.feature_precision import in_precision
from dpvision.encoders.identity import check_places
from dpvision.encoders.open import open_frozen
from dpvision.errors import OPERATOR_ONLY, ConfigError, DataError
from dpvision.privacy import gaussian
from dpvision.privacy.plan import DPPlan, ask_selection, default_delta, draft_plan, make_plan
from dpvision.runs.lineage import inherit
from dpvision.runs.store_checks import check_labels, check_people, check_store, rows_to_draw
from dpvision.train import distributed

_UNDECLARED = 1
"""Placeholder in recipes for a dataset size that the operator has to declare."""


@dataclass(frozen=True)
class Prepared:
    """Everything a head's run needs. Nothing has been charged and no image has been read."""

    config: RunConfig
    """Without 'auto', and with the encoder's actual pooling, image size and width."""
    plan: DPPlan
    store: Store
    row_N: np.ndarray
    """Sorted int64 rows of the store that take part: those whose features are computed."""
    label: np.ndarray
    """int64 (N,), or uint8 (N, K) for multi-label records; where people are drawn, of P people."""
    people: PersonImages | None
    """Where people are drawn, whose the rows are."""
    encoder: Encoder
    lineage: list[dict[str, Any]]
    """The encoder's lineage, and the public store's."""
    device: torch.device
    public: Store | None
    """Public images that standardise the features."""

    @property
    def model(self) -> HeadConfig:
        assert isinstance(self.config.model, HeadConfig)
        return self.config.model

    @property
    def extractor(self) -> Encoder:
        """The encoder as it computes the features, in the precision of the config."""
        return in_precision(self.encoder, self.model.encoder.precision)


def prepare(config: RunConfig, plan: DPPlan | None = None) -> Prepared:
    """Open the store and encoder of ``config``, fill in its defaults, make the plan, and check
    everything.

    Args:
        plan: the plan of a resumed run; if None, a new one is made.

    Raises:
        ConfigError: the encoder is unknown, has no weights, mixes images of a batch, or takes no
            public store; a number is not declared; settings conflict, or would not be read.
        DataError: the store, its size or its labels do not fit.
        PrivacyError: the plan, the encoder's lineage or the public store is refused.
        CheckpointError: the encoder cannot be read.
    """
    # The settings.
    model, cfg = _check_asked(config), config.privacy
    device = distributed.join(config.hardware.device).device
    if plan is None:
        require_read(config)
    assert config.data.store is not None and model.num_classes is not None
    # The store. Where people are drawn, all their images count until one is chosen.
    store = open_store(config.data.store)
    row_N = np.asarray(rows_to_draw(store, cfg.unit, config.seed))
    if cfg.dataset_size == _UNDECLARED:
        raise _undeclared(store, row_N)
    # The encoder, then the head, its plan, and what follows from the plan.
    asked = model.encoder
    if plan is not None and asked.precision == "auto":  # a run from before there was another
        asked = replace(asked, precision="float32")
    encoder, frozen = open_frozen(asked, device)
    config, plan = planned(config, encoder, frozen, plan)
    config = _with_rules(config, encoder, plan)
    public_path = model.features.public_store
    public = None if public_path is None else open_public(public_path, store)
    if public is not None and encoder.standard_rows:
        raise ConfigError(
            f"adapt: public_store={public_path} with {encoder.name}, whose features are "
            "standardised already; expected another encoder. Leave out --public-store."
        )
    # What may refuse this encoder and this plan on this store.
    if plan.guarantee == "dp" and encoder.family != "fixed":
        rows = rows_of_pass(encoder, config.hardware.physical_batch_size, device)
        check_places(in_precision(encoder, frozen.precision), frozen.pooling or "", rows, device)
    lineage = inherit(
        [*encoder.lineage, *([] if public is None else [public_entry(public, store)])],
        store,
        plan,
        declaration=config.public_weights,
        allow_weak=cfg.allow_weak_guarantee,
        tensors=encoder.tensors(),
    )
    check_store(plan, store, row_N)
    if cfg.unit.draws_people:
        check_people(store)
    check_labels(store, row_N, model.num_classes, multi_label=model.multi_label)
    # Whose features are computed, and their labels.
    people, labelled = None, row_N
    if cfg.unit.draws_people:
        people = PersonImages.chosen(store, cfg.max_records_per_unit, config.seed)
        row_N, labelled = people.row_M, people.label_row_P
    num, several = model.num_classes, model.multi_label
    label = store.targets(labelled, num) if several else store.labels[labelled]
    return Prepared(config, plan, store, row_N, label, people, encoder, lineage, device, public)


def planned(
    config: RunConfig, encoder: Encoder, frozen: FrozenEncoderConfig, plan: DPPlan | None = None
) -> tuple[RunConfig, DPPlan]:
    """Return the config with the encoder's settings, its head and its number of steps, and the plan
    of its run, unless that is given.

    A head without a number of steps gets its own; ``many_steps`` as many full batches as the rate's
    rule wants for this encoder (``defaults.enough_steps``), except with a given noise multiplier,
    where each further step would cost epsilon.

    Args:
        frozen: the encoder's own settings, with its feature dimension.

    Raises: as ``settle`` and ``make_plan``.
    """
    chosen, cfg = settle(config, encoder, frozen), config.privacy
    if plan is not None:
        return chosen, plan
    plan = head_plan(chosen)
    assert isinstance(chosen.model, HeadConfig)
    ruled = cfg.steps is None and cfg.sampling == "full_batch" and cfg.noise_multiplier is None
    ruled &= config.optim.learning_rate is None and not chosen.model.choice.candidates
    if ruled and not encoder.standard_rows:
        steps = kind_of(chosen).enough_steps(plan, config.optim)
        if steps > plan.steps:
            chosen = replace(chosen, privacy=replace(cfg, steps=steps))
            plan = head_plan(chosen)
    return chosen, plan


def with_planned_steps(config: RunConfig) -> RunConfig:
    """Return the config of a head with the number of steps that a run with it has.

    Raises: as ``prepare``, for all but the store.
    """
    model, device = _check_asked(config), distributed.join(config.hardware.device).device
    chosen, _ = planned(config, *open_frozen(model.encoder, device))
    return replace(config, privacy=replace(config.privacy, steps=chosen.privacy.steps))


def settle(config: RunConfig, encoder: Encoder, frozen: FrozenEncoderConfig) -> RunConfig:
    """Return the config with the encoder's own settings, a head for 'auto', and the head's own
    settings where it has none.

    Raises:
        ConfigError: 'auto' without a target epsilon, or a head that does not fit the feature
            dimension, the steps or the other settings.
    """
    model, data = config.model, replace(config.data, mean=encoder.mean, std=encoder.std)
    assert isinstance(model, HeadConfig)
    # Standardised rows have their centre already, and public images have their own.
    centred = encoder.standard_rows or model.features.public_store is not None
    centre = "none" if centred else model.features.centre
    model = replace(model, encoder=frozen, features=replace(model.features, centre=centre))
    asked, config = config, replace(config, model=model, data=data)
    if model.choice.candidates:
        config = with_steps(config)
        for name in model.choice.candidates:
            candidate = with_candidate(config, name)
            kind_of(candidate).check(candidate)
        return config
    if model.head == "auto":
        head, reason = _recommended(config, frozen.width)
        chosen = with_head(config, head)
        assert isinstance(chosen.model, HeadConfig)
        require_read(replace(asked, model=chosen.model), before=asked)
        model = replace(chosen.model, choice=replace(model.choice, reason=reason))
        optim = config.optim if head == "many_steps" else chosen.optim
        config = replace(config, model=model, optim=optim)
    config = with_steps(replace(config, model=model.settled()))
    kind_of(config).check(config)
    return config


def _recommended(config: RunConfig, width: int) -> tuple[str, str]:
    """Return a head for 'auto', and why."""
    cfg, model = config.privacy, config.model
    assert isinstance(model, HeadConfig)
    epsilon = math.inf if cfg.target_epsilon is None else cfg.target_epsilon
    if cfg.target_unit_epsilon is not None:
        epsilon = draft_plan(with_steps(config).privacy).epsilon or math.inf
    elif cfg.guarantee == "dp" and cfg.target_epsilon is None:
        raise ConfigError(
            f"adapt: head='auto' with noise_multiplier={cfg.noise_multiplier}; expected "
            "a target epsilon to choose by. Give --epsilon, or choose a head with --head."
        )
    return defaults.recommend_head(
        cfg.unit.sampled_from,
        model.num_classes or 0,
        epsilon,
        width,
        _delta(cfg),
        people=cfg.unit.draws_people,
    )


def _with_rules(config: RunConfig, encoder: Encoder, plan: DPPlan) -> RunConfig:
    """Return the config with the learning rate and the frequency decay that follow from the plan,
    where it has none. Candidates get theirs in the selection.
    """
    model = config.model
    assert isinstance(model, HeadConfig)
    if model.choice.candidates:
        return config
    optim = defaults.with_rate(config.optim, plan, bounded=not encoder.standard_rows)
    decay, frequencies = model.features.frequency_decay, encoder.order_D is not None
    if decay is None:
        decay = kind_of(config).frequency_decay(plan) if frequencies else 1.0
    elif decay != 1 and not frequencies:
        raise ConfigError(
            f"adapt: frequency_decay={decay} with {encoder.name}, whose "
            "features have no frequencies; expected none. Leave out --model.frequency-decay."
        )
    features = replace(model.features, frequency_decay=decay)
    return replace(config, model=replace(model, features=features), optim=optim)


def head_plan(config: RunConfig) -> DPPlan:
    """Return the plan of a head, of the head's own number of steps if it has none.

    It is ``make_plan``'s, except that full batches get the exact noise (not rounded up to five
    digits) and candidates get the plan of a private selection among them.

    Raises: as ``make_plan``.
    """
    cfg, model = with_steps(config).privacy, config.model
    assert isinstance(model, HeadConfig)
    if (choice := model.choice).candidates:
        asked = ask_selection(cfg, mean_runs=choice.selection_runs, shape=choice.selection_shape)
        return make_plan(cfg, asked)
    target, records = cfg.target_epsilon, 1
    if cfg.unit.is_person and cfg.target_unit_epsilon is not None:
        target, records = cfg.target_unit_epsilon, cfg.unit.clipped
    if cfg.guarantee != "dp" or cfg.sampling != "full_batch" or target is None:
        return make_plan(cfg)
    assert cfg.steps is not None, "with_steps"
    noise = records * gaussian.full_batch_noise(target, _delta(cfg), cfg.steps)
    return make_plan(
        replace(cfg, target_epsilon=None, target_unit_epsilon=None, noise_multiplier=noise)
    )


def _delta(cfg: PrivacyConfig) -> float:
    return default_delta(cfg.unit.population) if cfg.delta is None else cfg.delta


def _check_asked(config: RunConfig) -> HeadConfig:
    """Refuse a config with missing settings before anything is opened."""
    model = config.model
    if not isinstance(model, HeadConfig):
        raise ConfigError(
            f"adapt: model kind {model.kind!r}; expected 'head'. Use `dpvision train "
            f"{config.recipe}`."
        )
    if (world := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ConfigError(
            f"adapt: WORLD_SIZE={world}; expected 1: one process trains a head, from features "
            "computed once. Start it without torchrun."
        )
    if config.data.store is None:
        raise ConfigError(
            "data: store=None; expected a folder made by `dpvision data import`. Give --data STORE."
        )
    if model.encoder.spec is None:
        raise ConfigError(
            "adapt: no encoder; expected a public one: a run folder, timm:NAME@FILE, "
            "patches+scattering, ... Use --encoder patches+scattering, which needs no file."
        )
    if model.num_classes is None:
        raise ConfigError(
            "adapt: num_classes is not declared; expected the number of classes, which is "
            "public and must not be counted in private data. Give --num-classes K."
        )
    return model


def _undeclared(store: Store, row_N: np.ndarray) -> DataError:
    """Return the error of a run whose number of records is not declared, with what to declare."""
    units = ""
    if has_units(store):
        count = rounded_up(count_units(store, row_N))
        units = f" --privacy.num-units {count} (docs/data.md, persons)"
    return DataError(
        "adapt: dataset_size is not declared; expected the number of records, which becomes "
        f"public: it sets the noise and is printed. {OPERATOR_ONLY}{len(row_N)} can take "
        f"part. Give --dataset-size {rounded_up(len(row_N))}{units}."
    )
