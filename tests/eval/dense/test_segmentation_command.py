"""``dpvision evaluate segmentation``: the whole way, where scores go, what a dry run says, and one
clear error for wrong input.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dpvision.checkpoint import save_checkpoint, state_tensors
from dpvision.cli import main
from dpvision.config import MAEConfig, PrivacyConfig, RunConfig, ViTConfig, to_dict
from dpvision.eval.score_file import read_scores
from dpvision.files import write_json
from dpvision.models import make_model

from .semantic_shapes import write_shapes

torch.set_num_threads(1)
SMALL = [
    "--segmentation.crop-size",
    "16",
    "--segmentation.epochs",
    "3",
    "--segmentation.batch-size",
    "4",
    "--segmentation.warmup-steps",
    "1",
    "--segmentation.channels",
    "16",
    "--segmentation.learning-rate",
    "3e-3",
    "--hardware.physical-batch-size",
    "2",
    "--hardware.workers",
    "1",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("data")
    train, test = write_shapes(root / "train", 4), write_shapes(root / "test", 5, first=50)
    argv = [
        "--train",
        train / "images",
        "--train-masks",
        train / "masks",
        "--test",
        test / "images",
        "--test-masks",
        test / "masks",
    ]
    return [*map(str, [*argv, "--classes", train / "classes.json"]), "--ignore-ids", "0", "255"]


def write_run(root: Path, *, guarantee: bool = True) -> str:
    encoder = ViTConfig(image_size=16, patch_size=4, depth=2, width=16, num_heads=2)
    config = RunConfig(
        recipe="vip.micro",
        privacy=PrivacyConfig(
            dataset_size=60, expected_batch_size=20, steps=4, noise_multiplier=2.0
        ),
        model=MAEConfig(encoder=encoder, decoder_depth=1, decoder_width=16, decoder_num_heads=2),
    )
    lineage = {
        "store_id": "s",
        "visibility": "private",
        "run_id": "r",
        "guarantee": {"epsilon": 8.0} if guarantee else None,
    }
    manifest = {
        "run_id": "r",
        "ledger_steps": 4,
        "updates": 4,
        "config": to_dict(config),
        "plan": {},
        "ledger_digest": "d",
        "lineage": [lineage],
    }
    base = root if guarantee else root / "confidential"
    (root / "confidential").mkdir(parents=True)
    save_checkpoint(
        base / "checkpoints" / "step-00000004",
        manifest,
        state_tensors(make_model(config.model, seed=5)),
    )
    write_json(base / "config.json", to_dict(config))
    return str(root)


@pytest.fixture
def run(tmp_path: Path) -> str:
    return write_run(tmp_path / "run")


def _json(capsys: pytest.CaptureFixture[str], argv: list[str]) -> dict:
    status = main(["evaluate", "segmentation", *argv, *SMALL, "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out)


def test_two_encoders_are_trained_scored_drawn_and_written(
    data: list[str], run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, sheet, work = tmp_path / "scores.json", tmp_path / "sheet.png", tmp_path / "work"
    argv = [
        run,
        f"random:{run}",
        *data,
        "--public",
        "--out",
        str(out),
        "--sheet",
        str(sheet),
        "--work",
        str(work),
        "--num-shown",
        "2",
    ]
    found = _json(capsys, argv)
    assert {s["name"] for s in found["scores"]} == {run, f"random:{run}"} and len(
        found["scores"]
    ) == 6
    for score in found["scores"]:
        assert (
            score["visibility"] == "public"
            and score["n"] == 5
            and score["low"] <= score["value"] <= score["high"]
        )
    assert set(found["class_iou"][run]) == {"background", "disc", "square"}
    mean = np.mean(list(found["class_iou"][run].values()))
    assert next(
        s["value"] for s in found["scores"] if s["name"] == run and ", mIoU," in s["protocol"]
    ) == pytest.approx(mean)
    kept = read_scores(Path(run) / "scores.json")
    assert (
        {e["name"] for e in kept} == {"encoder"} and len(kept) == 3 and len(read_scores(out)) == 6
    )
    assert {(e["train_data"], e["test_data"]) for e in kept} == {("train/masks", "test/masks")}
    assert Image.open(sheet).size[0] == 4 * 248 + 8
    assert len(list(work.glob("*/training.safetensors"))) == 2
    assert _json(capsys, argv)["scores"] == found["scores"], (
        "from the work folder, without training again"
    )


def test_two_untrained_encoders_keep_their_scores_apart(
    data: list[str], run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both call themselves "random weights"; entries of a file of scores are told apart by name."""
    other, out = write_run(tmp_path / "other"), tmp_path / "scores.json"
    specs = [f"random:{run}", f"random:{other}"]
    _json(capsys, [*specs, *data, "--public", "--out", str(out)])
    kept = read_scores(out)
    assert len(kept) == 6 and {entry["name"] for entry in kept} == set(specs)


def test_people_read_a_table(data: list[str], run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "segmentation", run, *data, "--public", *SMALL]) == 0
    out = capsys.readouterr().out
    assert (
        "mIoU" in out
        and "pixel accuracy" in out
        and "5 test images, 3 classes, public" in out
        and "UPerNet of 16 channels" in out
    )


def test_a_dry_run_says_what_would_be_done_and_trains_nothing(
    data: list[str], run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _json(
        capsys, [run, *data[:-3], "--public", "--dry-run", "--work", str(tmp_path / "work")]
    )
    assert found["data"]["train"] == {"name": "train/masks", "images": 4, "classes": 4}
    plan = found["plans"][0]
    assert plan["steps"] == 3 and plan["steps_per_day"] == pytest.approx(
        86400 / plan["seconds_per_step"]
    )
    assert "is called 'unlabeled' and counts" in found["notes"][0]
    assert not (Path(run) / "scores.json").exists() and not (tmp_path / "work").exists()
    assert main(["evaluate", "segmentation", run, *data, "--public", "--dry-run", *SMALL]) == 0
    assert "Nothing was trained." in capsys.readouterr().out


def test_private_images_and_weights_without_a_guarantee_stay_confidential(
    data: list[str], run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["evaluate", "segmentation", run, *data, *SMALL]
    for flag, place in (
        ("--out", "s.json"),
        ("--sheet", "s.png"),
        ("--sheet", "confidential/../s.png"),
        ("--work", "work"),
        ("--work", "confidential/../work"),
    ):
        assert main([*argv, flag, str(tmp_path / place)]) == 2
        assert "expected a folder called confidential in its path" in capsys.readouterr().err
    assert main([*argv, "--work", str(tmp_path / "confidential")]) == 0
    assert "not printed where others may read" in capsys.readouterr().out
    assert not (Path(run) / "scores.json").exists()
    assert {e["visibility"] for e in read_scores(Path(run) / "confidential" / "scores.json")} == {
        "private"
    }
    bare = write_run(tmp_path / "bare", guarantee=False)
    scores = _json(capsys, [bare, f"random:{bare}", *data, "--public"])["scores"]
    assert {s["name"]: s["visibility"] for s in scores} == {
        bare: "private",
        f"random:{bare}": "public",
    }


def test_a_class_255_with_a_name_counts_unless_it_is_told_to_be_ignored(
    data: list[str], run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = list(data[:10])
    for place in (3, 7):  # masks
        folder = tmp_path / str(place)
        folder.mkdir()
        for mask in Path(data[place]).iterdir():
            ids = np.array(Image.open(mask))
            Image.fromarray(np.where(ids == 90, 255, ids).astype(np.uint8)).save(folder / mask.name)
        named[place] = str(folder)
    named[9] = str(tmp_path / "classes.json")
    Path(named[9]).write_text('{"7": "background", "21": "disc", "255": "square"}')
    for ignored, count in (([], 3), (["--ignore-ids", "255"], 2)):
        made = _json(capsys, [run, *named, *ignored, "--public", "--dry-run"])
        assert {part["classes"] for part in made["data"].values()} == {count}


def test_wrong_input_gets_one_clear_error(
    data: list[str], run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = dict(zip(data[:10:2], data[1:10:2], strict=True))

    def but(**changed: str) -> list[str]:
        return [
            part
            for name, value in (
                flags | {f"--{k.replace('_', '-')}": v for k, v in changed.items()}
            ).items()
            for part in (name, value)
        ]

    ignoring = ["--ignore-ids", "0", "255"]
    (tmp_path / "empty").mkdir()
    for argv, words in [
        ([], "no encoder"),
        ([run], "--train, --train-masks, --test, --test-masks, --classes missing"),
        ([run, *data[:2]], "--train-masks, --test, --test-masks, --classes missing"),
        ([run, *data, "--ade20k", "x"], "--ade20k with --train"),
        ([run, "--ade20k", str(tmp_path)], "expected ADEChallengeData2016"),
        (["hog", *data], "not a plain vision transformer"),
        (["nothing", *data], "encoder: 'nothing'"),
        ([run, *but(train=str(tmp_path / "none")), *ignoring], "is not a folder"),
        ([run, *but(train_masks=str(tmp_path / "empty")), *ignoring], "has none (png)"),
        ([run, *but(test=str(tmp_path / "empty")), *ignoring], "has none"),
        ([run, *but(classes=str(tmp_path / "none.json")), *ignoring], "No such file"),
        (
            [run, *but(test=flags["--train"], test_masks=flags["--train-masks"]), *ignoring],
            "4 images are in both training and test",
        ),
        (
            [run, *data, "--segmentation.crop-size", "18"],
            "expected a multiple of encoder's patch, 4 px",
        ),
        ([run, *data, "--segmentation.warmup-steps", "1500"], "expected fewer than the steps"),
        ([run, *data, "--hardware.physical-batch-size", "1"], "--segmentation.norm group"),
        ([run, *data, "--hardware.precision", "float16"], "without a GPU"),
        ([run, *data, "--segmentation.epochs", "0"], "epochs=0"),
        ([run, *data, "--num-shown", "0"], "num_shown=0"),
        ([run, *data, "--sheet", str(tmp_path / "s.jpg")], "ends in .png"),
        ([run, *data, "--sheet", str(tmp_path / "none" / "s.png")], "in an existing folder"),
        ([run, *data, "--out", str(tmp_path / "s.txt")], "ends in .json"),
        ([run, *data, "--work", data[-4]], "expected a folder"),
    ]:
        status = main(["evaluate", "segmentation", *argv[:1], *SMALL, *argv[1:], "--public"])
        err = capsys.readouterr().err
        assert status == 2 and words in err and "Traceback" not in err, (argv, err)
    assert not (Path(run) / "scores.json").exists()
