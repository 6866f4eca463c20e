"""A head's config that draws people, neighbouring stores, and what each kind of head releases of a
store; used by the mutants too.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dpvision.adapt.feature_stream import FeatureStream
from dpvision.adapt.gradient import gradient_sum, sum_at_zero
from dpvision.adapt.heads.prototypes import prototype_sum
from dpvision.adapt.integer_rows import IntegerStream
from dpvision.adapt.moments import moment_sum
from dpvision.adapt.person_rows import PersonImages
from dpvision.adapt.prepare import Prepared
from dpvision.adapt.session import feature_stream
from dpvision.config import RunConfig
from dpvision.data.store import Store

from .runs_of_heads import head_config

C = 0.5


def people_head_config(
    store: Store, head: str | None = "prototypes", **privacy: object
) -> RunConfig:
    """A head that draws the people of ``store``; at most three images each unless ``privacy`` has
    another number.
    """
    config = head_config(store, head)
    people = len(np.unique(store.index["unit"]))
    asked = {
        "num_units": people,
        "sampling_unit": "person",
        "max_records_per_unit": 3,
        "expected_batch_size": people,
        "max_grad_norm": C,
        "target_epsilon": None,
        "target_unit_epsilon": 4.0,
        **privacy,
    }
    return replace(
        config, privacy=replace(config.privacy, **asked), model=replace(config.model, num_classes=3)
    )


def without_person(store: Store, unit: int) -> Store:
    """The neighbour: the same store without a person and all their images. Ids are the same."""
    kept = store.index["unit"] != unit
    return Store(
        store.path,
        {**store.meta, "num_records": int(kept.sum())},
        store.index[kept],
        store.label_sets,
    )


def stream_of(made: Prepared, store: Store) -> FeatureStream:
    """The rows that a head sees, of the store that ``made`` was prepared for or of a neighbour."""
    cfg, people = made.config.privacy, None
    row_N = labelled = store.eligible_rows(cfg.max_records_per_unit, made.config.seed)
    if cfg.sampling_unit == "person":
        people = PersonImages.chosen(store, cfg.max_records_per_unit, made.config.seed)
        row_N, labelled = people.row_M, people.label_row_P
    several, classes = made.model.multi_label, made.model.num_classes or 0
    label = store.targets(labelled, classes) if several else store.labels[labelled]
    return feature_stream(replace(made, store=store, row_N=row_N, label=label, people=people))


def sums(made: Prepared, store: Store) -> dict[str, Tensor]:
    """The clipped sums of every kind of release, each as one float64 vector."""
    stream, plan = replace(stream_of(made, store), constant=0.1), made.plan
    classes, width = stream.num_classes, stream.width
    weight_KE, bias_K = (
        torch.randn(classes, width, generator=torch.Generator().manual_seed(0)),
        torch.zeros(classes),
    )
    found = {
        "gradient at zero": sum_at_zero(stream.blocks(), width, bias_K, "softmax", plan),
        "gradient": gradient_sum(
            IntegerStream(stream).blocks(), weight_KE, bias_K, "sigmoid", plan
        ),
        "moments": moment_sum(stream.blocks(), width, classes, 1.0, 0.6, plan),
        "prototypes": prototype_sum(stream.blocks(), width, classes, 1.0, 0.3, plan),
    }
    return {
        name: torch.cat([total.grads[part].flatten() for part in sorted(total.grads)])
        for name, total in found.items()
    }


def moves(
    made: Prepared, store: Store, units: Sequence[int] | None = None
) -> dict[int, dict[str, float]]:
    """How far each person (of ``units``) moves each of the sums."""
    before, found = sums(made, store), {}
    for unit in np.unique(store.index["unit"]).tolist() if units is None else units:
        after = sums(made, without_person(store, unit))
        found[unit] = {name: float((before[name] - after[name]).norm()) for name in before}
    return found
