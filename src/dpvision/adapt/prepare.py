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
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpvision.adapt.frequency import frequency_decay
from dpvision.adapt.person_rows import PersonImages
from dpvision.adapt.rate import enough_steps, with_rate
from dpvision.adapt.recommend import WIDEST, recommend_head
from dpvision.adapt.release import full_batch_noise
from dpvision.checkpoint import load_checkpoint
from dpvision.config import FrozenEncoderConfig, HeadConfig, ModelConfig, PrivacyConfig, RunConfig
from dpvision.config.head_presets import PRESETS, with_candidate, with_steps
from dpvision.config.resolve import require_read
from dpvision.data.declared import count_units, has_units, rounded_up
from dpvision.data.open import open_store
from dpvision.data.store import Store
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.feature_file import rows_of_pass
from dpvision.encoders.identity import check_alone, check_places
from dpvision.encoders.open import open_encoder
from dpvision.errors import OPERATOR_ONLY, ConfigError, DataError
from dpvision.models.timm_cache import find_timm_weights
from dpvision.privacy.plan import DPPlan, ask_selection, default_delta, draft_plan, make_plan
from dpvision.runs.lineage import inherit
from dpvision.runs.store_checks import check_labels, check_people, check_store, rows_to_draw
from dpvision.train import distributed

_UNDECLARED = 1
"""Placeholder in recipes for a dataset size that the operator has to declare."""
_NEEDED = {"feature_covariance": 2}
"""Smallest number of releases of each head; 1 for heads not listed."""


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
    """The encoder's lineage."""
    device: torch.device

    @property
    def model(self) -> HeadConfig:
        assert isinstance(self.config.model, HeadConfig)
        return self.config.model

    @property
    def releases_needed(self) -> int:
        """Smallest number of releases from which this head can be trained."""
        return _NEEDED.get(self.model.head, 1)


def prepare(config: RunConfig, plan: DPPlan | None = None) -> Prepared:
    """Open the store and encoder of ``config``, fill in its defaults, make the plan, and check
    everything.

    Args:
        plan: the plan of a resumed run; if None, a new one is made.

    Raises:
        ConfigError: the encoder is unknown, has no weights, or mixes images of a batch; a number is
            not declared; settings conflict, or would not be read.
        DataError: the store, its size or its labels do not fit.
        PrivacyError: the plan or the encoder's lineage is refused.
        CheckpointError: the encoder cannot be read.
    """
    model = _check_asked(config)
    if plan is None:
        require_read(config)
    assert (
        config.data.store is not None
        and model.num_classes is not None
        and model.encoder.spec is not None
    )
    store = open_store(config.data.store)
    unit = config.privacy.unit
    row_N = rows_to_draw(store, unit, config.seed)
    _check_declared(config.privacy, store, row_N)
    device = distributed.join(config.hardware.device).device
    encoder, pooling, width = open_alone(model.encoder, device)
    if plan is None:
        config, plan = planned(config, encoder, pooling, width)
    else:
        config = settle(config, encoder, pooling, width)
    if not model.candidates:
        optim = with_rate(config.optim, plan, bounded=not encoder.standard_rows)
        config = replace(config, model=_with_decay(config.model, encoder, plan), optim=optim)
    if plan.guarantee == "dp" and encoder.family != "fixed":
        check_places(
            encoder,
            pooling,
            rows_of_pass(encoder, config.hardware.physical_batch_size, device),
            device,
        )
    check_store(plan, store, row_N)
    if unit.draws_people:
        check_people(store)
    check_labels(store, row_N, model.num_classes, multi_label=model.multi_label)
    lineage = encoder_lineage(config, encoder, store, plan)
    return Prepared(config, plan, store, *rows_and_labels(config, store), encoder, lineage, device)


def open_alone(cfg: FrozenEncoderConfig, device: torch.device) -> tuple[Encoder, str, int]:
    """Open the encoder that a config names, and return it with its pooling and feature dimension.

    Raises: as ``open_public`` and ``check_alone``.
    """
    encoder = open_public(cfg, device)
    return encoder, *check_alone(encoder, cfg.pooling, device)


def planned(
    config: RunConfig, encoder: Encoder, pooling: str, width: int
) -> tuple[RunConfig, DPPlan]:
    """Return the config with its head and its number of steps, and the plan of its run.

    A head without a number of steps gets its own; ``many_steps`` as many full batches as the rate's
    rule wants for this encoder (``rate.enough_steps``), except with a given noise multiplier, where
    each further step would cost epsilon.

    Raises: as ``settle`` and ``make_plan``.
    """
    chosen = settle(config, encoder, pooling, width)
    plan, model, cfg = head_plan(chosen), chosen.model, config.privacy
    assert isinstance(model, HeadConfig)
    ruled = (
        cfg.steps is None
        and config.optim.learning_rate is None
        and cfg.sampling == "full_batch"
        and cfg.noise_multiplier is None
    )
    if ruled and not encoder.standard_rows and model.head == "many_steps" and not model.candidates:
        chosen = replace(
            chosen, privacy=replace(cfg, steps=enough_steps(plan, config.optim.momentum))
        )
        plan = head_plan(chosen)
    return chosen, plan


def with_planned_steps(config: RunConfig) -> RunConfig:
    """Return the config of a head with the number of steps that a run with it has.

    Raises: as ``prepare``, for all but the store.
    """
    model = _check_asked(config)
    chosen, _ = planned(
        config, *open_alone(model.encoder, distributed.join(config.hardware.device).device)
    )
    return replace(config, privacy=replace(config.privacy, steps=chosen.privacy.steps))


def rows_and_labels(
    config: RunConfig, store: Store
) -> tuple[np.ndarray, np.ndarray, PersonImages | None]:
    """Return the fields ``row_N``, ``label`` and ``people`` of ``Prepared``."""
    cfg, model = config.privacy, config.model
    assert isinstance(model, HeadConfig) and model.num_classes is not None
    people = (
        PersonImages.chosen(store, cfg.max_records_per_unit, config.seed)
        if cfg.unit.draws_people
        else None
    )
    row_N = (
        store.eligible_rows(cfg.max_records_per_unit, config.seed)
        if people is None
        else people.row_M
    )
    labelled = row_N if people is None else people.label_row_P
    return (
        row_N,
        store.targets(labelled, model.num_classes) if model.multi_label else store.labels[labelled],
        people,
    )


def settle(config: RunConfig, encoder: Encoder, pooling: str, width: int) -> RunConfig:
    """Return the config with the encoder's own settings, a head for 'auto', and the head's own
    settings where it has none.

    Raises:
        ConfigError: 'auto' without a target epsilon, or a head that does not fit the feature
            dimension, the steps or the other settings.
    """
    model = config.model
    assert isinstance(model, HeadConfig) and model.num_classes is not None
    frozen = replace(model.encoder, pooling=pooling, image_size=encoder.image_size, width=width)
    # Standardised rows have their centre already.
    model = replace(model, encoder=frozen, centre="none" if encoder.standard_rows else model.centre)
    asked, config = (
        config,
        replace(config, model=model, data=replace(config.data, mean=encoder.mean, std=encoder.std)),
    )
    if model.candidates:
        config = with_steps(config)
        for name in model.candidates:
            _check_head(with_candidate(config, name), width)
        return config
    if model.head == "auto":
        privacy = config.privacy
        if (
            privacy.guarantee == "dp"
            and privacy.target_epsilon is None
            and privacy.target_unit_epsilon is None
        ):
            raise ConfigError(
                f"adapt: head='auto' with noise_multiplier={privacy.noise_multiplier}; expected "
                "a target epsilon to choose by. Give --epsilon, or choose a head with --head."
            )
        epsilon = math.inf if privacy.target_epsilon is None else privacy.target_epsilon
        if privacy.target_unit_epsilon is not None:
            epsilon = draft_plan(with_steps(config).privacy).epsilon or math.inf
        head, reason = recommend_head(
            privacy.unit.sampled_from,
            model.num_classes or 0,
            epsilon,
            width,
            _delta(privacy),
            people=privacy.unit.draws_people,
        )
        model = replace(model, head=head, reason=reason)
        require_read(
            replace(asked, model=replace(model, encoder=replace(frozen, width=0), reason=None))
        )
        config = replace(
            config, optim=config.optim if head == "many_steps" else PRESETS[head].optim
        )
    config = with_steps(replace(config, model=model.settled()))
    _check_head(config, width)
    return config


def _with_decay(model: ModelConfig, encoder: Encoder, plan: DPPlan) -> HeadConfig:
    """Return the head's config with a frequency decay. If it has none, set the rule's, or 1 if the
    rule does not apply.
    """
    assert isinstance(model, HeadConfig)
    if model.frequency_decay is not None:
        if encoder.order_D is None and model.frequency_decay != 1:
            raise ConfigError(
                f"adapt: frequency_decay={model.frequency_decay} with {encoder.name}, whose "
                "features have no frequencies; expected none. Leave out --model.frequency-decay."
            )
        return model
    return replace(
        model,
        frequency_decay=frequency_decay(plan)
        if encoder.order_D is not None and model.head == "many_steps"
        else 1.0,
    )


def head_plan(config: RunConfig) -> DPPlan:
    """Return the plan of a head, of the head's own number of steps if it has none.

    It is ``make_plan``'s, except that full batches get the exact noise (not rounded up to five
    digits) and candidates get the plan of a private selection among them.

    Raises: as ``make_plan``.
    """
    cfg, model = with_steps(config).privacy, config.model
    assert isinstance(model, HeadConfig)
    if model.candidates:
        return make_plan(
            cfg, ask_selection(cfg, mean_runs=model.selection_runs, shape=model.selection_shape)
        )
    target, records = cfg.target_epsilon, 1
    if cfg.unit.is_person and cfg.target_unit_epsilon is not None:
        target, records = cfg.target_unit_epsilon, cfg.unit.clipped
    if cfg.guarantee != "dp" or cfg.sampling != "full_batch" or target is None:
        return make_plan(cfg)
    noise = records * full_batch_noise(target, _delta(cfg), cfg.num_steps)
    return make_plan(
        replace(cfg, target_epsilon=None, target_unit_epsilon=None, noise_multiplier=noise)
    )


def _delta(cfg: PrivacyConfig) -> float:
    return default_delta(cfg.unit.population) if cfg.delta is None else cfg.delta


def open_public(cfg: FrozenEncoderConfig, device: torch.device) -> Encoder:
    """Open the encoder that a config names. A run's encoder is named by its recipe, because a
    statement must not contain paths.

    Raises:
        ConfigError: a timm architecture without weights, or an image size that the encoder does not
            accept. Patches accept any maximum resolution, rounded down to one of theirs.
        CheckpointError: the encoder cannot be read.
    """
    assert cfg.spec is not None
    encoder = open_encoder(cfg.spec, device=device, image_size=cfg.image_size or None)
    kind, _, name = cfg.spec.partition(":")
    if encoder.weights == "random" and kind != "random":
        places = find_timm_weights(name)[1] if kind == "timm" else ["nowhere, without a file"]
        raise ConfigError(
            f"encoder: {cfg.spec} has no weights on this machine (looked for "
            f"{'; '.join(places)}); expected pretrained weights. Nothing is downloaded: use "
            f"{cfg.spec}@FILE, or let timm download them first."
        )
    if cfg.image_size not in (0, encoder.image_size) and not encoder.own_sizes:
        raise ConfigError(
            f"encoder: image_size={cfg.image_size}; expected {encoder.image_size}, the only size "
            f"of {encoder.name}. Leave it out."
        )
    if _is_run(cfg.spec, encoder):
        manifest = load_checkpoint(cfg.spec).manifest
        return replace(
            encoder, name=f"{manifest['config']['recipe']}, run {manifest['run_id'][:8]}"
        )
    return encoder


def encoder_lineage(
    config: RunConfig, encoder: Encoder, store: Store, plan: DPPlan
) -> list[dict[str, Any]]:
    """Return the lineage of the encoder's weights, or what ``config`` declares if they carry none.

    Raises: as ``runs.lineage.inherit``.
    """
    return inherit(
        encoder.lineage,
        store,
        plan,
        declaration=config.public_weights,
        allow_weak=config.privacy.allow_weak_guarantee,
        tensors=encoder.tensors(),
    )


def _is_run(spec: str, encoder: Encoder) -> bool:
    """Return whether ``open_encoder`` loaded a run. Fixed encoders, which need no file, take
    precedence over a folder of the same name.
    """
    return encoder.family != "fixed" and Path(spec).exists()


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


def _check_declared(cfg: PrivacyConfig, store: Store, row_N: np.ndarray) -> None:
    if cfg.dataset_size == _UNDECLARED:
        units = ""
        if has_units(store):
            units = (
                f" --privacy.num-units {rounded_up(count_units(store, row_N))} (docs/data.md, "
                "persons)"
            )
        raise DataError(
            "adapt: dataset_size is not declared; expected the number of records, which becomes "
            f"public: it sets the noise and is printed. {OPERATOR_ONLY}{len(row_N)} can take "
            f"part. Give --dataset-size {rounded_up(len(row_N))}{units}."
        )


def _check_head(config: RunConfig, width: int) -> None:
    model, privacy = config.model, config.privacy
    assert isinstance(model, HeadConfig)
    if model.head == "one_step" and privacy.num_steps != 1:
        raise ConfigError(
            f"adapt: steps={privacy.steps}; expected 1 with head='one_step'. Use "
            "transfer.many_steps for more."
        )
    if privacy.num_steps < (needed := _NEEDED.get(model.head, 1)):
        raise ConfigError(
            f"adapt: steps={privacy.steps}; expected {needed} or more with head={model.head!r}. "
            "Give more --privacy.steps."
        )
    if model.iterate == "ema" and config.optim.ema_decay is None:
        raise ConfigError(
            "adapt: optim.ema_decay=None with iterate='ema'; expected a decay in (0, 1). Give "
            "--optim.ema-decay 0.9."
        )
    if model.head in ("least_squares", "feature_covariance") and width > 2 * WIDEST:
        raise ConfigError(
            f"adapt: feature dimension={width} with head={model.head!r}; expected at most "
            f"{2 * WIDEST}, so that a covariance fits into memory. Use one_step, many_steps or "
            "prototypes, or a smaller encoder, such as hog."
        )
