"""Runs to export, made once."""

from pathlib import Path

import pytest

from .models_to_export import HEADS, Made, make_exportable, make_head


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("exportable")
    runs: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in runs:
            place = root / f"run-{len(runs)}"
            if name in HEADS:
                runs[name] = make_head(place, name, run("masked autoencoder (`vip.*`)"))
            else:
                runs[name] = make_exportable(place, name)
        return runs[name]

    return run
