"""Runs to export, made once."""

from pathlib import Path

import pytest

from .models_to_export import HEADS, Made, make_exportable, make_head


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("exportable")
    runs: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name in runs:
            return runs[name]
        if name in HEADS:
            mae = run("masked autoencoder (`vip.*`)")
            runs[name] = make_head(root / f"run-{len(runs)}", name, mae)
        else:
            runs[name] = make_exportable(root / f"run-{len(runs)}", name)
        return runs[name]

    return run
