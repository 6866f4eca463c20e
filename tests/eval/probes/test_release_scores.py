"""The release of scores on private images: what one person moves, the noise, the charge, and what
is refused.
"""

import hashlib
import io
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made import key
from PIL import Image
from scipy import stats
from sklearn.datasets import load_digits

from dpvision.checkpoint import load_checkpoint
from dpvision.cli import main
from dpvision.data.importer import import_samples
from dpvision.data.open import open_store
from dpvision.data.person_names import PersonRule
from dpvision.data.sources import Sample
from dpvision.data.store import Store
from dpvision.dp.noise import privatize
from dpvision.encoders.calibration import Calibration, save_calibration
from dpvision.encoders.classifier import ImageClassifier, load_classifier
from dpvision.errors import CheckpointError, ConfigError, DataError, DPVisionError, PrivacyError
from dpvision.eval import score_file
from dpvision.eval.class_scores import ALL
from dpvision.eval.noisy_counts import NUM_BINS
from dpvision.eval.probes import release_scores as release
from dpvision.eval.probes.release_scores import (
    OTHER,
    clipped_counts,
    noisy_counts,
    release_plan,
    release_scores,
)
from dpvision.eval.score_file import RELEASED, read_releases, scored_in_confidence
from dpvision.files import write_json
from dpvision.privacy import gaussian
from dpvision.privacy.account import set_cap, store_account
from dpvision.statement.released_scores import text

from ...adapt.runs_of_heads import head_config, run_head, write_digits
from ..labelled import write_store

CLASSES = 10
TABLES = {"sex": ("F", "M", OTHER), "site": ("n", OTHER)}
PERSONS, IMAGES = 60, 150


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("release")
    return run_head(head_config(write_digits(root / "train", 0, 500), "one_step"), root / "run")


@pytest.fixture
def test_store(tmp_path: Path) -> Store:
    """Digits of 60 persons, who have 1 to 4 images."""
    return digits(tmp_path / "stores" / "test")


def digits(path: Path, *, public: bool = False) -> Store:
    pixels, labels = load_digits(return_X_y=True)
    grey = (pixels[1000 : 1000 + IMAGES].reshape(-1, 8, 8, 1) * 15.9).astype(np.uint8)
    person = [f"p{i}" for i in range(PERSONS)] + [f"p{i // 3}" for i in range(IMAGES - PERSONS)]
    names = [str(label) for label in labels[1000 : 1000 + IMAGES]]
    return write_store(path, list(grey.repeat(3, axis=3)), names, person, public=public)


SHARED = [("a", 0), ("a", 1), ("b", 0), ("b", 2), ("c", 1), ("c", 3)]


def png(level: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (level, level, level)).save(file, "PNG")
    return file.getvalue()


def released(run: Path, store: Store, epsilon: float = 4.0, **more: Any) -> dict[str, Any]:
    declared = {"dataset_size": IMAGES, "num_units": PERSONS} | more
    return release_scores(run, store, epsilon, **declared)


def contribution(cell_NA: np.ndarray, unit_N: np.ndarray) -> np.ndarray:
    """The sum over units, all tables together."""
    plan = release_plan(1.0, 100, 50)
    total = clipped_counts(cell_NA, unit_N, TABLES, CLASSES, plan)
    return np.concatenate([total.grads[name].numpy() for name in TABLES])


def check_a_person_moves_the_sum_by_one_at_most() -> None:
    """Persons with one image, with many in one cell, and with many spread over all cells, some
    without a score; each of them removed in turn.
    """
    rng = np.random.default_rng(0)
    sizes = [len(groups) * CLASSES**2 * NUM_BINS for groups in TABLES.values()]
    images = [1, 2, 40, 40, 300]
    unit_N = rng.permutation(np.repeat(np.arange(len(images)), images)) * 7
    cell_NA = np.stack([rng.integers(-1, size, len(unit_N)) for size in sizes], axis=1)
    cell_NA[unit_N == 0] = (3, 4)
    cell_NA[unit_N == 14] = (3, 4)
    cell_NA[cell_NA.min(axis=1) < 0] = -1
    whole = contribution(cell_NA, unit_N)
    for unit, num in zip(np.unique(unit_N), images, strict=True):
        moved = whole - contribution(cell_NA[unit_N != unit], unit_N[unit_N != unit])
        assert np.linalg.norm(moved) <= 1, f"a person of {num} images moves the sum by more than 1"
        alone = contribution(cell_NA[unit_N == unit], unit_N[unit_N == unit])
        np.testing.assert_array_equal(moved, alone)
        if unit in (0, 14):
            assert np.linalg.norm(moved) == pytest.approx(1, abs=1e-6)


def test_a_person_moves_the_sum_by_one_at_most() -> None:
    check_a_person_moves_the_sum_by_one_at_most()


@pytest.mark.parametrize("images", ["one image", "many alike", "many"])
def test_stores_with_and_without_a_person_differ_by_one_at_most(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: str
) -> None:
    """From import to file, with the same noise: two tables, of which one person has all cells that
    change.
    """
    monkeypatch.setattr(release, "check_store", lambda *_: None)  # 59 persons are not 60
    pixels, labels = load_digits(return_X_y=True)
    num = {"one image": 1, "many alike": 30, "many": 60}[images]
    rows = np.full(num, 1700) if images == "many alike" else np.arange(1700, 1700 + num)
    grey = pixels[np.r_[1600:1640, rows]].reshape(-1, 8, 8, 1) * 15.9
    # Of a person's images that are alike, each has another byte.
    grey[40:, 0, 0, 0] += np.arange(num) / 4
    shown = list(grey.astype(np.uint8).repeat(3, axis=3))
    names = [str(label) for label in labels[np.r_[1600:1640, rows]]]
    table = tmp_path / "groups.csv"
    sexes = ["F", "M", "?"]
    lines = [f"k{i},{sexes[i % 3]},{'n' if i % 2 else ''}" for i in range(len(shown))]
    table.write_text("\n".join(["file_name,sex,site", *lines]))
    found = []
    for of_all in (len(shown), 40):
        person = [f"p{i // 2}" for i in range(40)] + ["removed"] * num
        store = write_store(
            tmp_path / str(of_all) / "test",
            shown[:of_all],
            names[:of_all],
            person[:of_all],
            public=False,
        )
        entry = release_scores(
            run,
            store,
            1.0,
            dataset_size=100,
            num_units=21,
            declared={"sex": ("F", "M"), "site": ("n",)},
            groups=table,
            noise_key=key(),
        )
        counts = [np.array(one["counts"]).ravel() for one in entry["tables"]]
        found.append(np.concatenate(counts) / np.sqrt(2))
    moved = np.linalg.norm(found[0] - found[1])
    assert 0 < moved <= 1 + 1e-3, "released counts are rounded to four decimals"
    if images == "one image":
        assert moved == pytest.approx(1, abs=1e-3)


def test_each_image_is_in_one_cell_and_a_person_counts_as_one() -> None:
    cell_NA = np.array([[0, 0], [0, 0], [1, 1], [2, 0], [-1, -1]])
    unit_N = np.array([5, 5, 5, 6, 6])
    total = clipped_counts(cell_NA, unit_N, TABLES, CLASSES, release_plan(1.0, 100, 50))
    sex = total.grads["sex"].numpy() * np.sqrt(2)
    np.testing.assert_allclose(sex[:4], [2 / 3, 1 / 3, 1, 0], atol=1e-6)
    assert total.num_records == 2


def test_the_noise_has_the_stated_deviation_and_the_counts_are_those_of_persons() -> None:
    plan = release_plan(1.0, IMAGES, PERSONS)
    assert plan.noise_std == pytest.approx(gaussian.noise_for(1.0, 1e-3), rel=1e-8)
    assert plan.unit_epsilon == pytest.approx(1.0, rel=1e-6) and plan.unit_epsilon <= 1
    cell_NA, unit_N = np.zeros((PERSONS, 2), dtype=np.int64), np.arange(PERSONS)
    total = clipped_counts(cell_NA, unit_N, TABLES, CLASSES, plan)
    noisy = privatize(total, plan, 0, key(), dtype=total.grads["sex"].dtype)
    for one in noisy_counts(noisy.grads, TABLES, CLASSES, plan):
        assert one.noise_std == pytest.approx(plan.noise_std * np.sqrt(2))
        rest = one.count_GKKJ.ravel() / one.noise_std
        assert abs(rest[0] - PERSONS / one.noise_std) < 5
        assert stats.kstest(rest[1:], "norm").pvalue > 1e-3


def test_the_release_is_the_same_figures_as_a_table_of_each_image(
    run: Path, test_store: Store
) -> None:
    """At an epsilon of 20 the noisy counts are near those of the classifier, image by image."""
    entry = released(run, test_store, 20.0)
    (table,) = entry["tables"]
    classifier = load_classifier(run)
    expected = np.zeros((CLASSES, CLASSES))
    unit_N, label_N = np.asarray(test_store.index["unit"]), test_store.labels
    for row in range(IMAGES):
        x_BCHW = classifier.preprocess(test_store.read(row))[None]
        best = int(classifier(torch.from_numpy(x_BCHW)).argmax())
        name = test_store.label_names[label_N[row]] if test_store.label_names else label_N[row]
        at = classifier.class_names.index(str(name))
        expected[at, best] += 1 / (unit_N == unit_N[row]).sum()
    found = np.array(table["counts"])[0].sum(axis=2)
    std = table["noise_std"] * np.sqrt(NUM_BINS)
    assert np.abs(found - expected).max() < 5 * std and expected.sum() == pytest.approx(PERSONS)
    np.testing.assert_allclose(found, entry["confusion"], atol=1e-3)
    assert (run / RELEASED).exists() and "unit" not in entry
    assert test_store.path.name not in (run / RELEASED).read_text()


def test_groups_are_the_declared_ones_and_all_others_are_one(
    run: Path, test_store: Store, tmp_path: Path
) -> None:
    rows = [f"k{i},{'F' if i % 2 else 'not said'}" for i in range(IMAGES)]
    table = tmp_path / "groups.csv"
    table.write_text("\n".join(["file_name,sex", *rows]))
    entry = released(run, test_store, 20.0, declared={"sex": ("F", "M")}, groups=table)
    assert entry["tables"][0]["groups"] == ["F", "M", OTHER]
    size = {row["group"]: row["count"] for row in entry["rows"] if row["name"] == ALL}
    assert size.keys() == {ALL, "sex=F", "sex=M", f"sex={OTHER}"}
    assert abs(size["sex=M"]) < 60 and abs(size["sex=F"] - PERSONS / 2) < 60
    assert "not said" not in json.dumps(entry)


def test_errors_that_name_a_private_image_or_label_are_for_the_operator(
    run: Path, test_store: Store, tmp_path: Path
) -> None:
    table = tmp_path / "groups.csv"
    table.write_text("file_name,sex\nk7,F\nk7,M\n")
    with pytest.raises(DataError, match=r"evaluate: operator only: .* rows of k7 that differ"):
        released(run, test_store, declared={"sex": ("F", "M")}, groups=table)
    grey = [np.full((8, 8, 3), i, np.uint8) for i in range(3)]
    bad = write_store(tmp_path / "stores" / "bad", grey, ["1", "2", "17"], public=False)
    with pytest.raises(DataError, match=r"own_head: operator only: .* has label=17"):
        released(run, bad, dataset_size=3, num_units=None)


def charged(store: Store) -> list[int]:
    return [one.steps for one in store_account(store.path).runs]


def test_the_charge_comes_before_the_first_score(
    run: Path, test_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, before = ImageClassifier.probabilities, []

    def watched(self: ImageClassifier, x_BCHW: Any) -> Any:
        assert len(x_BCHW) == 1, "an image's last bits may depend on the others of its pass"
        if not before:
            before.append(charged(test_store))
        return real(self, x_BCHW)

    monkeypatch.setattr(ImageClassifier, "probabilities", watched)
    released(run, test_store)
    assert before == [[1]]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("charge", [False, True])
def test_a_run_that_is_killed_at_the_charge_scores_nothing(
    run: Path, test_store: Store, monkeypatch: pytest.MonkeyPatch, charge: bool
) -> None:
    """The process ends before the charge is on the disk, or right after it."""
    real = release.Ledger.append

    def killed(self: Any) -> int:
        if charge:
            real(self)
        raise Killed

    def never(*args: Any) -> None:
        raise AssertionError("scored")

    monkeypatch.setattr(release.Ledger, "append", killed)
    monkeypatch.setattr(ImageClassifier, "probabilities", never)
    known = len(read_releases(run))
    with pytest.raises(Killed):
        released(run, test_store)
    assert charged(test_store) == [int(charge)] and len(read_releases(run)) == known


def test_a_second_release_is_charged_again_and_its_total_is_stated(
    run: Path, test_store: Store
) -> None:
    first, second = released(run, test_store, 1.0), released(run, test_store, 1.0)
    assert charged(test_store) == [1, 1]
    assert (first["charged"]["runs"], second["charged"]["runs"]) == (0, 1)
    one = gaussian.noise_for(1.0, 1e-3)
    both = gaussian.epsilon_at(one / np.sqrt(2), 1e-3)
    assert second["charged"]["after"] == pytest.approx(both, rel=1e-3)
    assert first["tables"] != second["tables"]


def test_of_two_releases_at_once_neither_is_lost_and_one_counts_the_other(
    run: Path, test_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is charged just before the first is, and written just before the first is."""
    real_open, real_read = release.Ledger.open, score_file.read_releases
    known, made = len(read_releases(run)), []
    monkeypatch.setattr(release, "read_releases", real_read)

    def opened(*args: Any, **more: Any) -> Any:
        monkeypatch.setattr(release.Ledger, "open", real_open)
        made.append(released(run, test_store, 1.0))
        return real_open(*args, **more)

    monkeypatch.setattr(release.Ledger, "open", opened)
    first = released(run, test_store, 1.0)
    assert (made[0]["charged"]["runs"], first["charged"]["runs"]) == (0, 1)

    def read(root: Path) -> list[dict[str, Any]]:
        monkeypatch.setattr(score_file, "read_releases", real_read)
        found = real_read(root)
        other.start()
        other.join(0.3)
        return found

    other = threading.Thread(target=score_file.add_release, args=(run, first))
    monkeypatch.setattr(score_file, "read_releases", read)
    score_file.add_release(run, first)
    other.join()
    assert len(read_releases(run)) == known + 4


def test_the_entry_and_its_text_name_the_weights_and_the_calibration(
    run: Path, test_store: Store
) -> None:
    checkpoint = load_checkpoint(run)
    digest = hashlib.sha256((checkpoint.path / "model.safetensors").read_bytes()).hexdigest()
    made = Calibration(digest, 2.5, 0.125, None, None, {"name": "public"}, 1.0, 0.5)
    path = save_calibration(checkpoint, made)
    try:
        entry = released(run, test_store)
    finally:
        path.unlink()
    assert (entry["weights"], entry["averaged_weights"]) == (digest, False)
    assert entry["calibration"] == {"temperature": 2.5, "offset": 0.125}
    said = text(entry)
    assert f"of the weights {digest[:12]}, calibrated (temperature 2.5, offset 0.125):" in said
    assert said.endswith(
        "When it was released, no other run had been charged to that store. Later charges are not "
        "counted here."
    )
    again = released(run, test_store)
    assert again["calibration"] is None and ", not calibrated:" in text(again)
    assert "1 other run had been charged to that store: with this release epsilon 6.2" in text(
        again
    )


def test_an_unreadable_image_counts_as_nothing_and_stops_nothing(
    run: Path, test_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one whose probabilities are not finite."""
    real_read, real = Store.read, ImageClassifier.probabilities
    calls = iter(range(IMAGES))

    def read(self: Store, row: int) -> bytes:
        return b"no image" if row < 50 else real_read(self, row)

    def half(self: ImageClassifier, x_BCHW: Any) -> Any:
        return real(self, x_BCHW) * (float("nan") if next(calls) % 2 else 1)

    monkeypatch.setattr(Store, "read", read)
    monkeypatch.setattr(ImageClassifier, "probabilities", half)
    released(run, test_store)


@pytest.mark.parametrize(
    ("epsilon", "more", "error", "words"),
    [
        (float("nan"), {}, ConfigError, "--release nan; expected an epsilon above 0"),
        (0.0, {}, ConfigError, "--release 0.0; expected an epsilon above 0"),
        (21.0, {}, ConfigError, "--release 21.0; expected an epsilon above 0 and at most 20"),
        (1.0, {"dataset_size": None}, DataError, "operator only: give --privacy.dataset-size 150 "),
        (1.0, {"num_units": None}, DataError, "--privacy.num-units 60"),
        (1.0, {"num_units": 50}, DataError, "expected the declared"),
        (1.0, {"delta": 0.5}, PrivacyError, "delta=0.5"),
        (1.0, {"delta": float("nan")}, ConfigError, "delta=nan"),
        (
            1.0,
            {"declared": {"sex": [str(i) for i in range(300)]}},
            ConfigError,
            "150,500 counts in a table; expected at most",
        ),
    ],
)
def test_wrong_numbers_are_refused_before_the_charge(
    run: Path,
    test_store: Store,
    epsilon: float,
    more: dict[str, Any],
    error: type[DPVisionError],
    words: str,
) -> None:
    with pytest.raises(error, match=words):
        released(run, test_store, epsilon, **more)
    assert charged(test_store) == []


def test_a_public_store_needs_no_release(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"may be released as they are\. Drop --release"):
        released(run, digits(tmp_path / "stores" / "test", public=True))


def test_a_store_whose_shared_images_went_to_the_first_person_is_refused(
    run: Path, tmp_path: Path
) -> None:
    """Without that person their images are those of others, whose cells then change too."""
    samples = [Sample(f"{who}{i}", png(i), {"label": "1", "person": who}) for who, i in SHARED]
    people = PersonRule("person", shared_images="first")
    store = import_samples(samples, tmp_path / "stores" / "test", public=False, people=people)
    with pytest.raises(PrivacyError, match=r"import again without --shared-images\.$"):
        released(run, store, dataset_size=4, num_units=3)
    assert charged(store) == []


def test_the_owners_cap_holds_for_releases(run: Path, test_store: Store) -> None:
    set_cap(test_store.path, 1.5, 1e-3)
    released(run, test_store, 1.0)
    with pytest.raises(PrivacyError, match=r"expected at most 1\.5"):
        released(run, test_store, 1.0)
    assert charged(test_store) == [1]


def test_training_images_are_known_after_their_store_has_moved(tmp_path: Path) -> None:
    store = write_digits(tmp_path / "stores" / "train", 0, 200)
    run = run_head(head_config(store, "one_step"), tmp_path / "run")
    with pytest.raises(DataError, match="shares records with the store that the run was trained"):
        released(run, store, dataset_size=200, num_units=None)
    store.path.rename(tmp_path / "stores" / "moved")
    moved = open_store(tmp_path / "stores" / "moved")
    with pytest.raises(DataError, match="which images were trained on cannot be seen otherwise"):
        released(run, moved, dataset_size=200, num_units=None)
    write_digits(tmp_path / "stores" / "train", 200, 400)  # another import in its place
    with pytest.raises(DataError, match="which images were trained on cannot be seen otherwise"):
        released(run, moved, dataset_size=200, num_units=None)
    assert len(charged(moved)) == 1  # the training


def test_weights_without_a_guarantee_are_refused(test_store: Store, tmp_path: Path) -> None:
    store = write_digits(tmp_path / "stores" / "train", 0, 200)
    run = run_head(head_config(store, "one_step", epsilon=None), tmp_path / "run")
    with pytest.raises((PrivacyError, CheckpointError), match="may be released"):
        released(run, test_store)
    assert charged(test_store) == []


def test_confidential_scores_seen_before_are_noted(run: Path, test_store: Store) -> None:
    assert not released(run, test_store)["confidential_scores_first"]
    kept = run / "confidential" / "class_scores.json"
    rows = {"rows": [], "images": 1, "units": 1, "class_names": [], "visibility": "private"}
    write_json(kept, {test_store.path.name: rows})
    assert released(run, test_store)["confidential_scores_first"]
    kept.unlink()


@pytest.mark.parametrize("how", ["checkpoint", "link", "from within"])
def test_confidential_scores_are_known_by_the_stores_id(
    run: Path, test_store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    shutil.rmtree(run / "confidential", ignore_errors=True)
    spec, test = run, test_store.path
    if how == "checkpoint":
        (spec,) = (run / "checkpoints").iterdir()
    elif how == "link":
        test = tmp_path / "another name"
        test.symlink_to(test_store.path)
    else:
        monkeypatch.chdir(test)
        test = Path(".")
    assert not scored_in_confidence(run, test_store)
    assert main(["evaluate", str(spec), "--test", str(test), "--workers", "1"]) == 0
    assert scored_in_confidence(run, test_store)
    (run / "confidential" / "scored_stores.json").write_text("{}")
    with pytest.raises(CheckpointError, match="Restore it as it was written"):
        released(run, test_store)
    shutil.rmtree(run / "confidential")


def test_a_damaged_file_of_releases_is_refused_before_the_charge(
    run: Path, test_store: Store
) -> None:
    released(run, test_store)
    whole = (run / RELEASED).read_text()
    (run / RELEASED).write_text(whole[:-9])
    with pytest.raises(CheckpointError, match="Restore it as it was written"):
        released(run, test_store)
    (run / RELEASED).write_text(whole)
    assert charged(test_store) == [1]
