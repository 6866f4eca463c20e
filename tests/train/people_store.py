"""A store of people with 1 to 9 images each, and a config that draws them; used by the mutants
too.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpvision.config import (
    DataConfig,
    HardwareConfig,
    MAEConfig,
    OptimConfig,
    PrivacyConfig,
    RunConfig,
    ViTConfig,
)
from dpvision.data.import_labels import LabelRule
from dpvision.data.importer import import_samples
from dpvision.data.open import open_store
from dpvision.data.people import People
from dpvision.data.person_names import PersonRule
from dpvision.data.sources import Sample
from dpvision.data.store import SHARED_KEPT, Store
from dpvision.privacy.stream import Key
from dpvision.train.loop import Session
from dpvision.train.step import step_sum

from ..data.image_files import png

SIZES = (1, 1, 2, 2, 3, 3, 4, 5, 6, 9)
"""Images of each person."""
PEOPLE, NUM_IMAGES = len(SIZES), sum(SIZES)


def people_store(folder: Path, unlabelled: int = 0) -> Store:
    """A private store of ten people; the images of a person have different labels.

    Args:
        unlabelled: images of the last person, of nine, with a class that was not declared.
    """
    samples = []
    for p, size in enumerate(SIZES):
        for i in range(size):
            label = "other" if p == PEOPLE - 1 and i < unlabelled else f"class {(p + i) % 3}"
            samples.append(
                Sample(
                    f"{p}-{i}", png(100 * p + i, 16, 16), {"person": f"person {p}", "label": label}
                )
            )
    classes = LabelRule(classes=tuple(f"class {k}" for k in range(3)), unknown_classes="unlabelled")
    return import_samples(samples, folder, people=PersonRule("person"), labels=classes)


def shared_store(samples: list[Sample], folder: Path, **options: Any) -> Store:
    """A store as earlier versions imported it: an image of two people was kept for the first,
    without the operator's choice.
    """
    store = import_samples(
        samples, folder, people=PersonRule("person", shared_images="first"), **options
    )
    meta = {name: value for name, value in store.meta.items() if name != SHARED_KEPT}
    (folder / "store.json").write_text(json.dumps(meta))
    return open_store(folder)


def people_config(store: Store) -> RunConfig:
    return RunConfig(
        recipe="vip.micro",
        privacy=PrivacyConfig(
            dataset_size=NUM_IMAGES,
            num_units=PEOPLE,
            expected_batch_size=4,
            steps=4,
            max_grad_norm=0.5,
            noise_multiplier=2.0,
            sampling_unit="person",
            max_records_per_unit=2,
            allow_weak_guarantee=True,
        ),
        model=MAEConfig(
            encoder=ViTConfig(image_size=16, patch_size=4, depth=1, width=16, num_heads=2),
            decoder_depth=1,
            decoder_width=16,
            decoder_num_heads=2,
        ),
        data=DataConfig(store=str(store.path)),
        optim=OptimConfig(
            name="sgd", learning_rate=0.1, momentum=0.0, weight_decay=0.0, schedule="constant"
        ),
        hardware=HardwareConfig(device="cpu", physical_batch_size=7, workers=1),
    )


def without(people: People | None, place: int) -> People:
    """The same people, less one."""
    assert people is not None
    kept = np.delete(np.arange(len(people)), place)
    parts = [slice(people.start_P[p], people.start_P[p + 1]) for p in kept]
    sizes = np.diff(people.start_P)[kept]
    return replace(
        people,
        id_P=people.id_P[kept],
        start_P=np.append(0, np.cumsum(sizes)),
        row_N=np.concatenate([people.row_N[part] for part in parts]),
        record_id_N=np.concatenate([people.record_id_N[part] for part in parts]),
    )


def sums(session: Session, number: int = 0, draw_key: Key | None = None) -> tuple[Tensor, Tensor]:
    """The clipped sum of a step as one float64 vector, and the norms before the clip."""
    total = step_sum(
        number,
        replace(session, plan=session.plan.another_run()),
        draw_key or Key.for_tests(b"d" * 32),
    )[0]
    return torch.cat(
        [total.grads[name].double().flatten() for name in sorted(total.grads)]
    ), total.norms_B
