"""``dpvision evaluate captioner``: every test from the command line, where its scores go, and one
clear error for wrong input.
"""

import json
from pathlib import Path

import pytest

from dpvision.cli import main
from dpvision.data.synthetic_store import write_scenes
from dpvision.eval.score_file import read_scores

from ..eval.captions import captioners


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("stores")
    write_scenes(root / "test", 24, 16)
    write_scenes(root / "private", 24, 16, first=900, public=False)
    return {name: str(root / name) for name in ("test", "private")}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return captioners.write_captioner_run(tmp_path / "run")


def _json(capsys: pytest.CaptureFixture[str], argv: list[str]) -> dict:
    status = main(["evaluate", "captioner", *argv, "--workers", "1", "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out)


@pytest.mark.slow
def test_every_test_on_a_store_and_on_scenes_with_controls_and_chance(
    stores: dict[str, str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores.json"
    argv = [
        str(run),
        "--store",
        stores["test"],
        "--zero-shot",
        "store",
        "--order",
        "--captions",
        "--scenes",
        "40",
        "--out",
        str(out),
    ]
    found = _json(capsys, argv)
    of: dict[str, set[str]] = {}
    for score in found["scores"]:
        of.setdefault(score["protocol"].split(",")[0], set()).add(score["name"])
        assert (
            score["visibility"] == "public"
            and score["low"] <= score["value"] <= score["high"]
            and score["chance"] >= 0
        )
    both = {"captioner", "random weights"}
    assert of["zero-shot"] == of["CIDEr-D"] == both
    assert of["scene composition"] == of["order test"] == both | {"captioner, other images"}
    assert sum("zero-shot" in s["protocol"] for s in found["scores"]) == 4, (
        "two ways, two who answer"
    )
    kept = read_scores(run / "scores.json")
    assert len(kept) == len(found["scores"]) == len(read_scores(out)) and {
        e["train_data"] for e in kept
    } == {"nothing"}
    assert {e["test_data"] for e in kept} == {"test", "scenes 1000000000 to 1000000039, 16 px"}
    assert any("captions left out" in note for note in found["notes"])
    assert _json(capsys, argv)["scores"] == found["scores"] and len(read_scores(out)) == len(kept)


def test_people_read_a_table_with_cider_times_a_hundred(
    stores: dict[str, str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "evaluate",
                "captioner",
                str(run),
                "--store",
                stores["test"],
                "--captions",
                "--scenes",
                "30",
                "--against",
                "none",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "chance" in out and "50.0%" in out and "CIDEr-D, greedy captions" in out
    value = next(
        e["value"] for e in read_scores(run / "scores.json") if e["protocol"].startswith("CIDEr")
    )
    assert f"{100 * value:.1f}" in out


def test_private_scores_stay_confidential(
    stores: dict[str, str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "evaluate",
        "captioner",
        str(run),
        "--store",
        stores["private"],
        "--order",
        "--against",
        "none",
    ]
    assert main([*argv, "--out", str(tmp_path / "scores.json")]) == 2
    assert "expected a folder called confidential in its path" in capsys.readouterr().err
    assert main(argv) == 0
    assert "not printed where others may read" in capsys.readouterr().out
    assert not (run / "scores.json").exists() and {
        e["visibility"] for e in read_scores(run / "confidential" / "scores.json")
    } == {"private"}


def test_scores_of_weights_without_a_guarantee_are_private(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = captioners.write_captioner_run(tmp_path / "bare", guarantee=False)
    scores = _json(capsys, [str(run), "--scenes", "30"])["scores"]
    assert {s["name"]: s["visibility"] for s in scores} == {
        "captioner": "private",
        "captioner, other images": "private",
        "random weights": "public",
    }


def test_benchmark_files_count_as_private_unless_said_otherwise(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    for i in (1, 2):
        Image.new("RGB", (20, 30), (90 * i, 10, 10)).save(tmp_path / f"{i:012d}.jpg")
    entries = [
        {
            "subset": subset,
            "filename": f"{i:012d}.jpg",
            "caption": f"a red {what}",
            "negative_caption": f"a blue {what}",
        }
        for i in (1, 2)
        for subset, what in (("replace_att", "ring"), ("swap_att", "star"))
    ]
    file = tmp_path / "sugarcrepe.json"
    file.write_text(json.dumps(entries))
    argv = [str(run), "--sugarcrepe", str(file), "--images", str(tmp_path)]
    assert {s["visibility"] for s in _json(capsys, argv)["scores"]} == {"private"}
    assert {s["visibility"] for s in _json(capsys, [*argv, "--public"])["scores"]} == {"public"}
    file.write_text(json.dumps([*entries, entries[0] | {"filename": f"{3:012d}.jpg"}]))
    assert main(["evaluate", "captioner", *argv]) == 2
    assert "--allow-missing" in capsys.readouterr().err
    scores = _json(capsys, [*argv, "--allow-missing", "--public"])["scores"]
    assert all("1 items without their image left out" in s["protocol"] for s in scores)


def test_wrong_input_gets_one_clear_error(
    stores: dict[str, str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = str(captioners.write_captioner_run(tmp_path / "bare", with_tokenizer=False))
    trained_here = str(
        captioners.write_captioner_run(tmp_path / "same", store=Path(stores["test"]))
    )
    store, labels = ["--store", stores["test"]], tmp_path / "labels.txt"
    labels.write_text("disc\nsquare, disc\n")
    for argv, words in [
        ([str(run)], "no test; expected one or more"),
        ([str(run), "--zero-shot", "store"], "expected images with labels for --zero-shot"),
        ([str(run), "--captions"], "no store; expected images"),
        ([str(run), "--order"], "expected images with captions for --order"),
        ([str(run), *store, "--zero-shot", "imagenet"], "labels: 'imagenet'"),
        ([str(run), *store, "--zero-shot", str(labels)], "has 2 classes; expected 8"),
        ([str(run), *store, "--zero-shot", "store", "--method", "tree"], "method='tree'"),
        ([str(run), *store, "--zero-shot", "store", "--limit", "0"], "limit=0"),
        (
            [str(run), *store, "--order", "--against", "hog"],
            "against='hog'; expected random, other",
        ),
        (
            [str(run), *store, "--order", "--fit", "stretch"],
            "fit='stretch'; expected squash or crop",
        ),
        ([str(run), *store, "--captions", "--beams", "0"], "beams=0"),
        ([str(run), "--scenes", "0"], "scenes=0"),
        ([str(run), "--scenes", "20", "--batch-size", "0"], "batch_size=0"),
        ([str(run), "--sugarcrepe", str(labels)], "expected the COCO images of --sugarcrepe"),
        ([str(run), "--sugarcrepe", str(labels), "--images", str(tmp_path)], "not JSON"),
        ([str(run), "--aro", str(tmp_path)], "has neither visual_genome_relation.json"),
        ([bare, "--scenes", "20"], "has no tokenizer.json"),
        (
            [trained_here, *store, "--order"],
            "shares records with the store that the run was trained on",
        ),
        ([stores["test"], "--scenes", "20"], "checkpoint: none in"),
    ]:
        status = main(["evaluate", "captioner", *argv])
        err = capsys.readouterr().err
        assert status == 2 and "Traceback" not in err, (argv, err)
        assert words in " ".join(err.split()), (argv, err)
