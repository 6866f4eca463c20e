"""Handwritten digits as private images, and configs of heads on encoders that need no file."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from dpvision.adapt.session import adapt, new_head_session
from dpvision.config import FrozenEncoderConfig, HeadConfig, RunConfig
from dpvision.config.resolve import with_head
from dpvision.data.store import Store
from dpvision.recipes import transfer_heads

from ..eval.labelled import write_store


def write_digits(path: Path, start: int, stop: int, *, public: bool = False) -> Store:
    """scikit-learn's handwritten digits of 8 px as grey images."""
    pixels, labels = load_digits(return_X_y=True)
    grey = (pixels[start:stop].reshape(-1, 8, 8, 1) * 15.9).astype(np.uint8)
    return write_store(
        path,
        list(grey.repeat(3, axis=3)),
        [str(label) for label in labels[start:stop]],
        public=public,
    )


def head_config(
    store: Store, head: str | None = None, *, spec: str = "pixels", epsilon: float | None = 4.0
) -> RunConfig:
    """A head of ``store``'s records; None: 'auto'. Without epsilon: without a guarantee."""
    config = transfer_heads.auto()
    count = store.num_records
    privacy = replace(
        config.privacy,
        dataset_size=count,
        expected_batch_size=count,
        target_epsilon=epsilon,
        guarantee="none" if epsilon is None else "dp",
    )
    model = HeadConfig(encoder=FrozenEncoderConfig(spec=spec, image_size=8), num_classes=10)
    config = replace(
        config, privacy=privacy, model=model, data=replace(config.data, store=str(store.path))
    )
    config = replace(config, hardware=replace(config.hardware, device="cpu", workers=1))
    return config if head is None else with_head(config, head)


def run_head(config: RunConfig, root: Path) -> Path:
    """Train the head of a config in a new run."""
    with new_head_session(config, root) as session:
        adapt(session)
    return root
