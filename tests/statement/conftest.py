"""A finished run, made once, and copies of it to alter."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dpvision.config import PrivacyConfig
from dpvision.files import write_json

from .runs import PRIVACY, PUBLIC_SCORES, make_run, make_store


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete private run with public scores; its store is at ``../store``. Not to be changed:
    copy it.
    """
    folder = tmp_path_factory.mktemp("finished")
    make_store(folder / "store")
    run = make_run(folder / "run", folder / "store")
    write_json(run / "scores.json", PUBLIC_SCORES)
    return run


@pytest.fixture
def copy_of(finished_run: Path, tmp_path: Path) -> Callable[[], Path]:
    """Copies the finished run with its store and ledgers, to be altered; the copy's config still
    names the original store.
    """

    def copy() -> Path:
        shutil.copytree(finished_run.parent, tmp_path / "copy")
        return tmp_path / "copy" / "run"

    return copy


@pytest.fixture
def small_privacy() -> PrivacyConfig:
    """Four steps whose epsilon is that of one Gaussian at noise 1.5."""
    return replace(PRIVACY, steps=4, noise_multiplier=3.0)
