"""Stores of digits, for the commands that train heads."""

from pathlib import Path

import pytest

from dpvision.data.store import Store

from ..adapt.runs_of_heads import write_digits


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_digits(tmp_path_factory.mktemp("public") / "test", 900, 1000, public=True)


@pytest.fixture
def mine(tmp_path: Path) -> Store:
    return write_digits(tmp_path / "stores" / "mine", 0, 200)
