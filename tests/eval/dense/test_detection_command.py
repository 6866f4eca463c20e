"""``dpvision evaluate detection``: the whole way, where scores and images go, what a dry run says,
one clear error for wrong input.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from dpvision.checkpoint import save_checkpoint, state_tensors
from dpvision.cli import main
from dpvision.config import MAEConfig, PrivacyConfig, RunConfig, ViTConfig, to_dict
from dpvision.eval.score_file import read_scores
from dpvision.files import write_json
from dpvision.models import make_model

from .coco_shapes import changed, write_shapes

pytest.importorskip("faster_coco_eval", reason="needs the extra `dense`")
torch.set_num_threads(1)
SMALL = [
    "--detection.image-size",
    "32",
    "--detection.epochs",
    "2",
    "--detection.batch-size",
    "4",
    "--detection.warmup-steps",
    "1",
    "--detection.channels",
    "8",
    "--detection.hidden",
    "16",
    "--detection.anchors",
    "16",
    "--detection.proposals",
    "16",
    "--detection.regions",
    "8",
    "--detection.detections",
    "10",
    "--detection.resamples",
    "5",
    "--hardware.physical-batch-size",
    "4",
    "--hardware.workers",
    "1",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("data")
    train, train_images = write_shapes(root / "train", 4)
    test, test_images = write_shapes(root / "test", 5, seed=3)

    def change(given: dict) -> None:
        """The first image has a crowd and an object without mask, the last nothing at all."""
        given["annotations"][0]["iscrowd"] = 1
        del given["annotations"][1]["segmentation"]
        given["annotations"] = given["annotations"][:8]

    return {
        "train": train,
        "train-images": train_images,
        "test": changed(test, change),
        "test-images": test_images,
    }


def argv_of(data: dict[str, Path], **other: Path) -> list[str]:
    return [
        word
        for name, path in (data | {k.replace("_", "-"): v for k, v in other.items()}).items()
        for word in (f"--{name}", str(path))
    ]


def write_run(root: Path, *, guarantee: bool = True) -> str:
    config = RunConfig(
        recipe="vip.micro",
        privacy=PrivacyConfig(
            dataset_size=60, expected_batch_size=20, steps=4, noise_multiplier=2.0
        ),
        model=MAEConfig(
            encoder=ViTConfig(image_size=16, patch_size=8, depth=1, width=16, num_heads=2),
            decoder_depth=1,
            decoder_width=16,
            decoder_num_heads=2,
        ),
    )
    (root / "confidential").mkdir(parents=True)
    base = root if guarantee else root / "confidential"
    manifest = {
        "run_id": "r",
        "ledger_steps": 4,
        "updates": 4,
        "config": to_dict(config),
        "plan": {},
        "ledger_digest": "d",
        "lineage": [
            {
                "store_id": "s",
                "visibility": "private",
                "run_id": "r",
                "guarantee": {"epsilon": 8.0} if guarantee else None,
            }
        ],
    }
    save_checkpoint(
        base / "checkpoints" / "step-00000004", manifest, state_tensors(make_model(config.model, 5))
    )
    write_json(base / "config.json", to_dict(config))
    return str(root)


def said(capsys: pytest.CaptureFixture[str], argv: list[str], status: int = 0) -> str:
    assert main(["evaluate", "detection", *argv]) == status
    out, err = capsys.readouterr()
    return out if status == 0 else err


@pytest.mark.slow
def test_scores_go_to_the_run_to_one_file_and_to_people(
    data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out, image = write_run(tmp_path / "run"), tmp_path / "scores.json", tmp_path / "seen.png"
    argv = [
        run,
        f"random:{run}",
        *argv_of(data),
        "--public",
        "--out",
        str(out),
        "--work",
        str(tmp_path / "work"),
        *SMALL,
    ]
    found = json.loads(said(capsys, [*argv, "--sheet", str(image), "--json"]))
    measures = {(s["name"], s["protocol"].rpartition(", ")[2]): s for s in found["scores"]}
    assert {name for name, _ in measures} == {run, f"random:{run}"}
    # Rectangles in images of 64 x 48 px are small or medium, never large.
    assert {m for _, m in measures} >= {
        "AP box",
        "AP50 box",
        "AP75 box",
        "AP box small",
        "AP mask",
        "AP50 mask",
        "AP75 mask",
    }
    for (_, measure), score in measures.items():
        assert (
            0 <= score["low"] <= score["value"] <= score["high"] <= 1
            and score["visibility"] == "public"
            and score["chance"] == 0
        )
        assert score["n"] == (5 if "box" in measure else 4), (
            "the image with an object without mask does not count for masks"
        )
        assert "2 epochs, batch 4" in score["protocol"] and "channels 8" in score["protocol"]
    kept = read_scores(Path(run) / "scores.json")
    assert {e["name"] for e in kept} == {"encoder"} and {
        (e["train_data"], e["test_data"]) for e in kept
    } == {("instances", "instances-changed")}
    assert len(read_scores(out)) == len(found["scores"]) == 2 * len(kept)
    assert any(
        "1 images have objects without mask and do not count for AP mask" in note
        for note in found["notes"]
    )
    for i in (1, 2):
        assert Image.open(tmp_path / f"seen-{i}.png").width > 300
    # The trainings are kept: scored again, nothing is trained and the scores are the same.
    assert json.loads(said(capsys, [*argv, "--json"]))["scores"] == found["scores"]
    text = said(capsys, argv)
    assert "AP mask" in text and "written to" in text and "no guarantee" not in text


def test_private_images_and_weights_without_a_guarantee_stay_confidential(
    data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, bare = write_run(tmp_path / "run"), write_run(tmp_path / "bare", guarantee=False)
    assert "expected a folder called confidential" in said(
        capsys, [run, *argv_of(data), *SMALL, "--out", str(tmp_path / "o.json")], 2
    )
    for flag, place in (("--sheet", "o.png"), ("--work", "work")):
        assert "depends on private images" in said(
            capsys, [run, *argv_of(data), *SMALL, flag, str(tmp_path / place)], 2
        )
    assert "not printed where others may read" in said(capsys, [run, *argv_of(data), *SMALL])
    said(capsys, [bare, *argv_of(data), *SMALL, "--public"])
    for root in (run, bare):
        assert not (Path(root) / "scores.json").exists()
        assert {
            e["visibility"] for e in read_scores(Path(root) / "confidential" / "scores.json")
        } == {"private"}


def test_a_dry_run_counts_and_times_and_writes_nothing(
    data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    argv = [run, *argv_of(data), *SMALL, "--public", "--work", str(tmp_path / "work"), "--dry-run"]
    facts = json.loads(said(capsys, [*argv, "--json"]))
    assert facts["data"] == {
        "train": {"name": "instances", "images": 4, "classes": 3},
        "test": {"name": "instances-changed", "images": 5, "classes": 3},
    }
    [plan] = facts["plans"]
    assert plan["encoder"] == run and plan["steps"] == 2 and plan["seconds_per_step"] > 0
    assert plan["days"] == pytest.approx(2 / plan["steps_per_day"])
    text = said(capsys, argv)
    assert "Nothing was trained" in text and "steps a day" in text
    assert "do not count for AP mask" in text, "the notes"
    assert not (tmp_path / "work").exists() and not (Path(run) / "scores.json").exists()
    Image.new("RGB", (9, 9)).save(tmp_path / "000.png")
    other = tmp_path / "other"
    other.mkdir()
    for file in data["test-images"].iterdir():
        (other / file.name).write_bytes((tmp_path / "000.png").read_bytes())
    err = said(capsys, [run, *argv_of(data, test_images=other), *SMALL, "--public", "--dry-run"], 2)
    assert "9 x 9 px; expected 64 x 48" in err


def test_wrong_inputs_are_one_clear_error(
    data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "broken.json").write_text("{")
    few = changed(data["test"], lambda given: given["categories"].pop())
    few = changed(few, lambda given: given.update(annotations=[]))
    good = [run, *argv_of(data), *SMALL]
    for argv, message in (
        ([*argv_of(data), *SMALL], "no encoder; expected one or more"),
        (
            [run, *argv_of({k: v for k, v in data.items() if k != "test-images"}), *SMALL],
            "no --test-images; expected COCO's",
        ),
        (["pixels", *argv_of(data), *SMALL], "pixels is not a plain vision transformer"),
        ([str(tmp_path / "nowhere"), *argv_of(data), *SMALL], "nowhere"),
        ([run, *argv_of(data, train=tmp_path / "broken.json"), *SMALL], "not JSON"),
        ([run, *argv_of(data, train_images=tmp_path / "nowhere"), *SMALL], "is not a folder"),
        ([run, *argv_of(data, test_images=data["test"].parent), *SMALL[:0]], "warmup_steps=250"),
        ([run, *argv_of(data, test=few), *SMALL], "expected the same ids and names"),
        (
            [run, *argv_of(data, test=data["train"], test_images=data["train-images"]), *SMALL],
            "4 images are in both training and test",
        ),
        ([*good, "--detection.image-size", "40"], "expected a multiple of 16. Use 32"),
        ([*good, "--detection.jitter", "0", "1"], "expected 0 < low <= high"),
        ([*good, "--detection.warmup-steps", "9"], "expected fewer than the steps"),
        ([*good, "--public", "--sheet", str(tmp_path / "a.txt")], "ends in .png"),
        (
            [*good, "--public", "--out", str(tmp_path / "no" / "a.json")],
            "expected an existing folder",
        ),
    ):
        err = said(capsys, argv, 2)
        assert message in err and "Traceback" not in err, (message, err)


def test_a_missing_library_is_said_with_its_extra(
    data: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("faster_coco_eval")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    err = said(capsys, [write_run(tmp_path / "run"), *argv_of(data), *SMALL], 2)
    assert "pip install '.[dense]'" in err


@pytest.mark.slow
def test_two_processes_say_it_once(data: dict[str, Path], tmp_path: Path) -> None:
    run, out = write_run(tmp_path / "run"), tmp_path / "scores.json"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "dpvision",
        "evaluate",
        "detection",
        run,
    ]
    argv = [
        *command,
        *argv_of(data),
        *SMALL,
        "--public",
        "--json",
        "--out",
        str(out),
        "--work",
        str(tmp_path / "work"),
    ]
    done = subprocess.run(
        argv, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert (
        len(found["scores"])
        == len(read_scores(out))
        == len(read_scores(Path(run) / "scores.json"))
        >= 7
    )
