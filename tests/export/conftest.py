"""Runs to export, made once."""

from pathlib import Path

import pytest

from .models_to_export import Made, make_exportable


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("exportable")
    runs: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in runs:
            runs[name] = make_exportable(root / f"run-{len(runs)}", name)
        return runs[name]

    return run
