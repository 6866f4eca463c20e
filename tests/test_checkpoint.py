"""Checkpoints: whole or not at all, verified on load, never unpickled."""

import json
from pathlib import Path

import pytest
import torch

from dpvision import files
from dpvision.checkpoint import (
    find_checkpoint,
    keep_newest,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from dpvision.errors import CheckpointError
from dpvision.files import write_json

MANIFEST = {
    "run_id": "r",
    "ledger_steps": 3,
    "updates": 3,
    "config": {},
    "plan": {},
    "ledger_digest": "d",
    "lineage": [],
}


def _save(run: Path, step: int, value: float = 1.0) -> Path:
    return save_checkpoint(
        run / "checkpoints" / f"step-{step:08d}",
        {**MANIFEST, "ledger_steps": step},
        {"w": torch.full((3, 2), value), "b": torch.arange(4)},
        optimizer={"w/exp_avg": torch.zeros(3, 2)},
    )


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    _save(tmp_path, 3, 0.25)
    loaded = load_checkpoint(tmp_path)
    assert loaded.manifest["ledger_steps"] == 3
    assert torch.equal(loaded.model["w"], torch.full((3, 2), 0.25)) and torch.equal(
        loaded.model["b"], torch.arange(4)
    )
    assert (
        loaded.ema is None
        and loaded.optimizer is not None
        and set(loaded.optimizer) == {"w/exp_avg"}
    )


def test_the_newest_complete_checkpoint_is_found_also_under_confidential(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        _save(tmp_path / "confidential", step)
    (tmp_path / "confidential" / "checkpoints" / "step-00000200").mkdir()
    assert find_checkpoint(tmp_path).name == "step-00000100"
    keep_newest(tmp_path / "confidential", 2)
    assert [p.name for p in list_checkpoints(tmp_path / "confidential")] == [
        "step-00000010",
        "step-00000100",
    ]


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_a_flipped_bit_is_refused(tmp_path: Path, file: str) -> None:
    path = _save(tmp_path, 1) / file
    blob = bytearray(path.read_bytes())
    blob[-1] ^= 1
    path.write_bytes(blob)
    with pytest.raises(CheckpointError, match="altered"):
        load_checkpoint(tmp_path)


def test_a_missing_tensor_file_or_manifest_key_is_refused(tmp_path: Path) -> None:
    path = _save(tmp_path, 1)
    (path / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors"):
        load_checkpoint(path)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["lineage"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="lineage"):
        load_checkpoint(path)
    with pytest.raises(CheckpointError, match="none in"):
        load_checkpoint(tmp_path / "elsewhere")


def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_debris(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path, 1, 1.0)

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "sync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        _save(tmp_path, 1, 2.0)
    with pytest.raises(CheckpointError, match="No space left"):
        _save(tmp_path, 2, 2.0)
    with pytest.raises(CheckpointError, match="No space left"):
        write_json(tmp_path / "run.json", {})
    monkeypatch.undo()
    assert torch.equal(load_checkpoint(tmp_path).model["w"], torch.ones(3, 2))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert not (tmp_path / "run.json").exists()


def test_tied_weights_are_saved(tmp_path: Path) -> None:
    shared = torch.randn(4, 4)
    save_checkpoint(tmp_path / "c", MANIFEST, {"a": shared, "b": shared})
    loaded = load_checkpoint(tmp_path / "c").model
    assert torch.equal(loaded["a"], shared) and torch.equal(loaded["b"], shared)
