"""Runs to export, and their exports, made once."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dpvision.export.write import Exported, Format, export

from .models_to_export import HEADS, NEEDS, Copies, Made, make_exportable, make_head


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
        else:  # with its own store: a statement lists the other runs on a store
            runs[name] = make_exportable(root / f"{len(runs)}" / "run", name)
        return runs[name]

    return run


@pytest.fixture(scope="session")
def copied(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Copies:
    root = tmp_path_factory.mktemp("exports")
    done: dict[tuple[str, str], Exported] = {}

    def copy(name: str, to: Format, folder: Path) -> Exported:
        if to in NEEDS:
            pytest.importorskip(NEEDS[to], reason=f"{NEEDS[to]} is of an extra")
        if (name, to) not in done:
            done[name, to] = export(made(name), to, root / f"export-{len(done)}")
        shutil.copytree(done[name, to].folder, folder)
        return replace(done[name, to], folder=folder)

    return copy
