"""Oracles, zoo and the report's handmade runs on the import path; a tiny private store, and runs on
it of two full batches.
"""

import itertools
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dpvision.config import (
    DataConfig,
    HardwareConfig,
    MAEConfig,
    OptimConfig,
    PrivacyConfig,
    RunConfig,
    ViTConfig,
)
from dpvision.data.store import Store
from dpvision.data.synthetic_store import write_scenes
from dpvision.dp.clip import METHODS
from dpvision.privacy.plan import DPPlan, make_plan
from dpvision.privacy.store_marks import StoreLedgers
from dpvision.train.loop import Session
from dpvision.train.start import new_session

for room in ("oracles", "statement"):
    sys.path.insert(0, str(Path(__file__).parents[1] / room))

NUM_RECORDS = 40
NewRun = Callable[..., AbstractContextManager[Session]]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def catches(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Tell benchmarks/mutants.py what caught each mistake."""
    from .planting import CATCHES  # after the oracles are on the path

    CATCHES.clear()
    yield
    for error in CATCHES:
        record_property("caught_by", error)


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    """Both ways to a clipped sum."""
    return request.param


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A private store of 40 scenes of 16 px."""
    return write_scenes(tmp_path_factory.mktemp("data") / "scenes", NUM_RECORDS, 16, public=False)


@pytest.fixture(scope="session")
def config(scenes: Store) -> RunConfig:
    """Two full batches, which are accounted in closed form, at once; plain SGD, whose step is the
    gradient itself.
    """
    return RunConfig(
        recipe="vip.micro",
        privacy=PrivacyConfig(
            dataset_size=NUM_RECORDS,
            expected_batch_size=NUM_RECORDS,
            sampling="full_batch",
            steps=2,
            max_grad_norm=0.5,
            noise_multiplier=4.0,
        ),
        model=MAEConfig(
            encoder=ViTConfig(image_size=16, patch_size=4, depth=1, width=16, num_heads=2),
            decoder_depth=1,
            decoder_width=16,
            decoder_num_heads=2,
        ),
        data=DataConfig(store=str(scenes.path)),
        optim=OptimConfig(
            name="sgd",
            learning_rate=0.1,
            momentum=0.0,
            weight_decay=0.0,
            schedule="constant",
            ema_decay=0.75,
        ),
        hardware=HardwareConfig(device="cpu", physical_batch_size=16, workers=1),
    )


@pytest.fixture(scope="session")
def poisson_config(config: RunConfig) -> RunConfig:
    """The same with Poisson batches; simulated, so that no time goes into accounting."""
    return replace(
        config,
        privacy=replace(
            config.privacy, sampling="poisson", guarantee="simulated", expected_batch_size=20.0
        ),
    )


@pytest.fixture(scope="session")
def plan(config: RunConfig) -> DPPlan:
    return make_plan(config.privacy)


@pytest.fixture
def new_run(tmp_path: Path, config: RunConfig, scenes: Store) -> NewRun:
    """Opens a session for a run in a fresh folder, on its own copy of the store: a planted mistake
    may spoil the ledgers beside it.
    """
    number = itertools.count()

    def open_run(settings: RunConfig = config) -> AbstractContextManager[Session]:
        folder = tmp_path / f"new{next(number)}"
        shutil.copytree(
            scenes.path, folder / "scenes", ignore=shutil.ignore_patterns("ledger_marks.json")
        )
        StoreLedgers.of(folder / "scenes").register()  # as if imported there
        return new_session(
            replace(settings, data=replace(settings.data, store=str(folder / "scenes"))),
            folder / "run",
        )

    return open_run
