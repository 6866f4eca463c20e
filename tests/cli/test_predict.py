"""``dpvision predict``, ``dpvision calibrate`` and ``dpvision evaluate --per-class``: what they
print, write and refuse.
"""

import csv
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import roc_auc_score

from dpvision.cli import main
from dpvision.config import MAEConfig, ViTConfig
from dpvision.data.split import split_store
from dpvision.data.store import Store
from dpvision.encoders.classifier import load_classifier
from dpvision.encoders.predict import predict
from dpvision.errors import DataError
from dpvision.eval.probes.records import units

from ..adapt.lineage_runs import untrained_run
from ..adapt.runs_of_heads import head_config, run_head, write_digits
from ..encoders.test_classifier import write_run

pytestmark = pytest.mark.usefixtures("gates_once")


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_digits(tmp_path_factory.mktemp("stores") / "private", 0, 400)


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_digits(tmp_path_factory.mktemp("stores") / "public", 400, 700, public=True)


@pytest.fixture(scope="module")
def head(private: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_head(head_config(private, "many_steps"), tmp_path_factory.mktemp("runs") / "head")


@pytest.fixture
def run(head: Path, tmp_path: Path) -> Path:
    return shutil.copytree(head, tmp_path / "head")


@pytest.fixture
def photos(public: Store, tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for row in range(6):
        (folder / f"{row}.png").write_bytes(public.read(row))
    (folder / "torn.png").write_bytes(public.read(7)[:50])
    (folder / "notes.txt").write_text("x")
    frames = [Image.open(folder / f"{row}.png") for row in (0, 1, 2)]
    frames[0].save(folder / "moving.gif", save_all=True, append_images=frames[1:])
    grey = np.asarray(frames[0].convert("L")).astype(np.uint16) * 257
    Image.fromarray(grey).save(folder / "deep.png")
    return folder


def _ok(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[str, str]:
    assert main([str(word) for word in argv]) == 0
    return capsys.readouterr()


def _refused(capsys: pytest.CaptureFixture[str], words: str, *argv: object) -> None:
    assert main([str(word) for word in argv]) == 2
    err = capsys.readouterr().err
    assert words in err and "; expected" in err and "Traceback" not in err, err


def test_a_line_for_each_image_and_the_unreadable_are_named(
    run: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = _ok(capsys, "predict", run, photos)
    lines = dict(line.removeprefix(f"{photos}/").split(": ") for line in out.splitlines())
    assert set(lines) == {*(f"{row}.png" for row in range(6)), "deep.png", "moving.gif"}
    assert lines["deep.png"] == lines["moving.gif"] == lines["0.png"], "the same pixels"
    assert err.startswith("operator only: 2 could not be read: ")
    assert "torn.png (damaged)" in err and "notes.txt (not an image)" in err
    found = json.loads(_ok(capsys, "predict", run, photos, "--json")[0])
    assert found["visibility"] == "private" and found["temperature"] == 1
    assert {one["problem"] for one in found["unreadable"]} == {"damaged", "not an image"}
    one = found["predictions"][0]
    (name,) = one["classes"]
    assert one["probabilities"][name] == max(one["probabilities"].values())
    assert f"{name} {one['probabilities'][name]:.3f}" in lines.values()


def test_what_does_not_print_in_a_name_is_escaped(
    run: Path, photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier = load_classifier(run)
    classifier.class_names = tuple(f"\x1b[{k}m\u202e" for k in range(10))
    monkeypatch.setattr("dpvision.encoders.classifier.load_classifier", lambda *_, **__: classifier)
    image = (photos / "0.png").rename(photos / "\x1b[31m.png")
    out, _ = _ok(capsys, "predict", run, image)
    assert out[:-1].isprintable() and re.search(r"\\x1b\[31m\.png: \\x1b\[\dm\\u202e ", out)


def test_a_table_of_private_images_needs_a_confidential_folder(
    run: Path, photos: Path, public: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _refused(
        capsys, "predict: csv='out.csv' would hold", "predict", run, photos, "--csv", "out.csv"
    )
    out, lost = tmp_path / "confidential" / "out.csv", tmp_path / "no" / "confidential" / "out.csv"
    _refused(capsys, "expected an existing folder", "predict", run, photos, "--csv", lost)
    said = _ok(capsys, "predict", run, photos, "--csv", out)[0]
    assert "predictions for 8 images" in said and "keep the file where the images are" in said
    assert out.parent.stat().st_mode & 0o777 == 0o700, "the folder is made, closed to others"
    with out.open(newline="") as file:
        rows = {row["image"]: row for row in csv.DictReader(file)}
    assert len(rows) == 10 and rows[f"{photos}/torn.png"]["problem"] == "damaged"
    leak = out.parent / ".." / "leak.csv"
    _refused(capsys, "would hold", "predict", run, photos, "--csv", leak)
    free, public_out = tmp_path / "free.csv", tmp_path / "public.csv"
    _ok(capsys, "predict", run, photos, "--csv", free, "--release-private-outputs")
    assert free.read_text() == out.read_text()
    said = _ok(capsys, "predict", run, public.path, "--csv", public_out)[0]
    assert "keep the file" not in said and len(public_out.read_text().splitlines()) == 301


def test_what_cannot_be_done_is_one_clear_error(
    run: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    for words, *argv in (
        ("no images", run, tmp_path / "empty"),
        ("no images", run),
        ("nothing there", run, tmp_path / "nowhere"),
        ("neither a file nor a folder", run, tmp_path / "pipe.png"),
        ("1 could not be read", run, photos / "notes.txt"),
        ("no such folder", tmp_path / "nowhere", photos),
        ("ends in .csv", run, photos, "--csv", tmp_path / "out.txt"),
        ("batch_size=0", run, photos, "--batch-size", 0),
        ("one of", run, photos, "--encoder", "hog"),
        ("has no averaged weights", run, photos, "--ema"),
    ):
        if words == "one of":  # another encoder than the head's
            assert main(["predict", *map(str, argv)]) == 2
            assert "expected" in capsys.readouterr().err
        else:
            _refused(capsys, words, "predict", *argv)
    vit = ViTConfig(image_size=8, patch_size=2, depth=1, width=16, num_heads=2)
    mae = write_run(tmp_path / "mae", MAEConfig(encoder=vit))
    _refused(capsys, "model kind 'mae'", "predict", mae, photos)


def test_an_encoder_that_moved_is_given_by_name(
    private: Store, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guarantee = {"epsilon": 2.0, "epsilon_rdp": 2.1, "delta": 1e-5, "steps": 4}
    parent = untrained_run(tmp_path / "parent", "private", guarantee)
    run = run_head(head_config(private, "prototypes", spec=str(parent)), tmp_path / "run")
    before = _ok(capsys, "predict", run, photos)[0]
    parent.rename(tmp_path / "moved")
    assert main(["predict", str(run), str(photos)]) == 2
    assert "Give its location with encoder=SPEC" in capsys.readouterr().err
    moved = tmp_path / "moved"
    assert _ok(capsys, "predict", run, photos, "--encoder", moved)[0] == before


def test_calibration_is_used_from_then_on(
    run: Path,
    private: Store,
    public: Store,
    photos: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _refused(capsys, "is private; expected a public store", "calibrate", run, private.path)
    _refused(capsys, "recall=0.5 with a run", "calibrate", run, public.path, "--recall", 0.5)
    before = json.loads(_ok(capsys, "predict", run, photos, "--json")[0])
    said = _ok(capsys, "calibrate", run, public.path, "--workers", 1)[0]
    assert f"calibration in {run}/calibration.json, from 300 public images of public" in said
    made = json.loads((run / "calibration.json").read_text())
    after = json.loads(_ok(capsys, "predict", run, photos, "--json")[0])
    assert after["temperature"] == made["temperature"] != 1
    for old, new in zip(before["predictions"], after["predictions"], strict=True):
        assert old["classes"] == new["classes"] and old["probabilities"] != new["probabilities"]
        assert sum(new["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    assert json.loads(_ok(capsys, "calibrate", run, public.path, "--json")[0])["rule"] is None


def test_figures_that_a_calibration_on_the_same_images_makes_better_are_marked(
    run: Path, public: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = shutil.copytree(public.path, tmp_path / "whole")
    halves = tmp_path / "fit", tmp_path / "test"
    split_store(store, *halves, 0.5)
    scores, marks = run / "class_scores.json", ("Brier score", "calibration error")
    for fitted, tested, here in (
        (halves[0], halves[0], True),
        (halves[0], halves[1], False),
        (store, halves[1], True),
        (halves[0], store, True),
    ):
        _ok(capsys, "calibrate", run, fitted)
        said = _ok(capsys, "evaluate", run, "--test", tested, "--per-class")[0]
        assert ("so these are no test figures" in said) == here
        for row in json.loads(scores.read_text())[tested.name]["rows"]:
            for name in marks:
                assert (
                    (f"{name}, fitted here" in row["figures"]) == here != (name in row["figures"])
                )
            assert "AUROC" in row["figures"]
        scores.unlink()
    _ok(capsys, "evaluate", run, "--test", store, "--per-class")
    _ok(capsys, "report", run)
    assert "Brier score, fitted here" in (page := (run / "report.html").read_text())
    assert "so these are no test figures" in page


def test_training_images_imported_again_as_public_are_refused(
    run: Path, private: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = write_digits(tmp_path / "again", 399, 420, public=True).path
    words = f"operator only: 1 of its images are among those of {private.path}"
    _refused(capsys, words, "calibrate", run, again)
    _refused(capsys, words, "evaluate", run, "--test", again)
    _refused(capsys, words, "report", run, "--public-store", again)
    names = "calibration.json", "scores.json", "statement.json", "report.html"
    assert not any((run / name).exists() for name in names)
    moved = private.path.rename(tmp_path / "gone")
    _ok(capsys, "evaluate", run, "--test", again)
    moved.rename(private.path)


def test_figures_of_confidential_weights_are_not_printed_to_a_log(
    private: Store, public: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_head(head_config(private, "many_steps", epsilon=None), tmp_path / "run")
    out = _ok(capsys, "calibrate", run, public.path, "--workers", 1)[0]
    path = run / "confidential" / "calibration.json"
    assert out == f"calibration in {path}, whose figures are confidential\n" and path.exists()
    _refused(capsys, "predictions on private", "predict", run, public.path, "--csv", "out.csv")


@pytest.fixture
def table(public: Store, tmp_path: Path) -> Path:
    file = tmp_path / "table.csv"
    rows = [f"{public.key(i)},{'FM'[i % 2]},{i % 3 or ''}" for i in range(300)]
    file.write_text("\n".join(["file_name,sex,site", *rows, "another.png,F,1"]) + "\n")
    return file


def test_figures_of_classes_are_those_of_predict_and_lie_beside_the_scores(
    run: Path, public: Store, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["evaluate", str(run), "--test", str(public.path), "--per-class"]
    assert main([*line, "--by", "sex,site", "--groups", str(table)]) == 0
    out = capsys.readouterr().out
    assert "AUROC" in out and "sex=F" in out and "site=(none)" in out and "site=2" in out
    found = json.loads((run / "class_scores.json").read_text())["public"]
    assert (run / "class_scores.png").read_bytes().startswith(b"\x89PNG")
    assert (found["images"], found["units"]) == (300, len(np.unique(units(public))))
    made = predict(run, public.path)
    probability = np.array([one.probabilities for one in made])
    rows = {(row["name"], row["group"]): row for row in found["rows"]}
    for k, name in enumerate(found["class_names"]):
        for group, inside in (("all", np.ones(300, bool)), ("sex=M", np.arange(300) % 2 == 1)):
            expected = roc_auc_score(public.labels[inside] == k, probability[inside, k])
            got = rows[name, group]["figures"]["AUROC"]["value"]
            assert got == pytest.approx(expected, abs=1e-4)  # float32, features in other passes


def test_private_figures_of_classes_go_to_confidential_and_are_not_printed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private = write_digits(tmp_path / "held", 700, 800)
    line = ["evaluate", str(run), "--test", str(private.path), "--per-class"]
    assert main(line) == 0
    out = capsys.readouterr().out
    assert "AUROC" not in out and "confidential/class_scores.json" in out
    assert "held" in json.loads((run / "confidential" / "class_scores.json").read_text())
    assert not (run / "class_scores.json").exists() and not (run / "class_scores.png").exists()
    assert main([*line, "--show-confidential"]) == 0
    assert "AUROC" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--by", "sex"], "without --per-class"),
        (["--per-class", "--by", "sex"], "one of --by and --groups"),
        (["--per-class", "--groups", "TABLE"], "one of --by and --groups"),
        (["--per-class", "--specificity", "1"], "specificity=1"),
        (["--per-class", "--by", "age", "--groups", "TABLE"], "no age among the columns"),
        (["--per-class", "--by", "sex", "--groups", "nowhere.csv"], "No such file"),
        (["--per-class", "--by", "sex", "--groups", "SHORT"], "no row for 299 of 300 images"),
        (["--per-class", "--by", "sex", "--groups", "OTHERS"], "no row for 300 of 300 images"),
        (["--per-class", "--by", "sex", "--groups", "TWICE"], "that differ"),
        (["--per-class", "--by", "n", "--groups", "MANY"], "300 values; expected at most 50"),
        (["--per-class", "--train", "STORE"], "expected the own heads"),
    ],
)
def test_wrong_input_of_classes_gets_one_clear_error(
    run: Path,
    public: Store,
    table: Path,
    words: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = public.key(0)
    keys = [public.key(i) for i in range(300)]
    for name, text in (
        ("SHORT", f"key,sex\n{first},F\n"),
        ("OTHERS", "file_name,sex\nP1/scan.dcm,F\nP2/scan.dcm,M\n"),
        ("TWICE", f"key,sex\n{first},F\n{first},M\n"),
        ("MANY", "key,n\n" + "".join(f"{key},{i}\n" for i, key in enumerate(keys))),
    ):
        (table.parent / name).write_text(text)
    places = {"TABLE": str(table), "STORE": str(public.path)}
    places |= {name: str(table.parent / name) for name in ("SHORT", "OTHERS", "TWICE", "MANY")}
    line = ["evaluate", str(run), "--test", str(public.path)]
    assert main([*line, *(places.get(word, word) for word in words)]) == 2
    err = capsys.readouterr().err
    assert problem in err and "expected" in err and "Traceback" not in err, err


def rows_of(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.open()))


def probabilities(rows: list[dict[str, str]]) -> np.ndarray:
    names = [name for name in rows[0] if name.startswith("probability:")]
    return np.array([[float(row[name]) for name in names] for row in rows])


def test_persons_of_an_earlier_run_do_not_stay_beside_a_new_table(run: Path, photos: Path) -> None:
    out = photos.parent / "confidential" / "all.csv"
    (photos / "metadata.csv").write_text("file_name,patient\n0.png,Ann\n")
    for more, known in ((["--unit-from", "patient"], True), ([], False)):
        assert main(["predict", str(run), str(photos), *more, "--csv", str(out)]) == 0
        assert out.exists() and out.with_name("all-persons.csv").exists() == known


def test_a_person_has_the_mean_of_their_images_probabilities(
    run: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a folder by its table, and of a store imported from it; the unreadable image does not
    count, and the image without a person has no row among the persons.
    """
    persons = {"0.png": "Ann", "1.png": "=Bob", "2.png": "Ann", "3.png": " Ann", "4.png": ""}
    persons |= {"5.png": "Cy", "torn.png": "Dee", "deep.png": "Cy", "moving.gif": "Cy"}
    lines = [f"{name},{person}" for name, person in persons.items()]
    (photos / "metadata.csv").write_text("\n".join(["file_name,patient", *lines]))
    out = photos.parent / "confidential" / "all.csv"
    asked = ["predict", str(run), str(photos), "--unit-from", "patient", "--csv", str(out)]
    assert main(asked) == 0
    beside = out.with_name("all-persons.csv")
    said = capsys.readouterr().out
    assert f"for 4 persons in {beside}, each with the mean probability of their images" in said
    assert "operator only: 1 image without a person" in said
    images = {row["image"].rpartition("/")[2]: row for row in rows_of(out)}
    found = {row["person"]: row for row in rows_of(beside)}
    assert {name: row["images"] for name, row in found.items()} == {
        "Ann": "3",
        "'=Bob": "1",
        "Cy": "3",
        "Dee": "0",
    }
    assert found["Ann"]["first_image"].endswith("0.png")
    assert found["Dee"]["problem"] == "no readable image" and found["Dee"]["predicted"] == ""
    mean = probabilities([images["0.png"], images["2.png"], images["3.png"]]).mean(axis=0)
    np.testing.assert_allclose(probabilities([found["Ann"]])[0], mean, rtol=1e-7)
    names = [name.removeprefix("probability:") for name in found["Ann"] if ":" in name]
    assert found["Ann"]["predicted"] == names[int(mean.argmax())]
    assert found["'=Bob"]["predicted"] == images["1.png"]["predicted"]

    store = str(photos.parent / "stores" / "people")
    (photos / "torn.png").unlink()
    more = ["--unit-from", "patient", "--unmatched", "own-person", "--shared-images", "first"]
    assert main(["data", "import", str(photos), store, *more]) == 0
    capsys.readouterr()
    assert main(["predict", str(run), store, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    (ann,) = [one for one in made["persons"] if one["first_image"].endswith("0.png")]
    assert ann["images"] == 3
    np.testing.assert_allclose(list(ann["probabilities"].values()), mean, rtol=1e-6)
    assert "Ann" not in json.dumps(made)


def test_persons_of_private_images_stay_confidential_and_wrong_fields_are_refused(
    run: Path, photos: Path, public: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    table = photos / "metadata.csv"
    table.write_text("file_name,patient\n" + "".join(f"{i}.png,p{i}\n" for i in range(6)))
    out = photos.parent / "confidential" / "all.csv"
    for places, more, words in (
        ([photos], ["--unit-from", "patient", "--csv", "all.csv"], "folder called confidential"),
        ([photos], ["--unit-from", "doctor", "--csv", str(out)], "no image has it"),
        ([public.path], ["--unit-from", "patient"], "a store has the persons of its import"),
    ):
        assert main(["predict", str(run), *map(str, places), *more]) == 2
        error = capsys.readouterr().err
        assert words in error and "Traceback" not in error
    table.write_text("file_name,patient\n0.png,PAT-0001\n1.png,pat-0001\n2.png,PAT_0001\n")
    asked = str(photos), "--unit-from", "patient"
    words = (
        "predict: --unit-from patient: operator only: 1 persons spelled in several ways (PAT-0001"
    )
    _refused(capsys, words, "predict", run, *asked, "--csv", out)
    with pytest.raises(DataError, match="PAT-0001 = PAT_0001 = pat-0001"):
        predict(run, asked[0], unit_from="patient")
    assert not out.exists() and not out.with_name("all-persons.csv").exists()
