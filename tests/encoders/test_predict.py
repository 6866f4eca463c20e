"""Predictions: their features are those of training, and neither the source nor other images change
them.
"""

import csv
import io
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import dpvision
from dpvision.adapt.prepare import prepare
from dpvision.config import DataConfig
from dpvision.data.image_files import ImageFile, find_images
from dpvision.data.store import Store
from dpvision.encoders.classifier import ImageClassifier, load_classifier
from dpvision.encoders.feature_file import feature_array, rows_of_pass
from dpvision.encoders.predict import (
    PASS,
    Persons,
    Prediction,
    predict_files,
    predictions_writer,
)
from dpvision.errors import ConfigError, DataError

from ..adapt.lineage_runs import untrained_run
from ..adapt.runs_of_heads import head_config, run_head, write_digits

GUARANTEE = {"epsilon": 2.0, "epsilon_rdp": 2.1, "delta": 1e-5, "steps": 4}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_digits(tmp_path_factory.mktemp("stores") / "store", 0, 300)


@pytest.fixture(scope="module", params=["run", "pixels", "hog", "patches"])
def run(request: pytest.FixtureRequest, store: Store, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("runs")
    spec = request.param
    if spec == "run":
        spec = str(untrained_run(folder / "parent", "private", GUARANTEE))
    config = head_config(store, "prototypes", spec=spec)
    return config, run_head(config, folder / "head")


class Recording(nn.Module):
    """Keeps what it is given, and gives it on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x_BD: Tensor) -> Tensor:
        self.seen.append(x_BD.clone())
        return x_BD[:, :10]


def test_features_have_the_bits_that_the_head_was_trained_on(run, store: Store) -> None:
    config, root = run
    made = prepare(config)
    encoder, hardware = made.encoder, config.hardware
    cached_ND = feature_array(
        encoder,
        made.model.encoder.pooling or "",
        made.model.encoder.width,
        store,
        np.arange(store.num_records),
        dataset_size=made.plan.dataset_size,
        batch_size=rows_of_pass(encoder, hardware.physical_batch_size, "cpu"),
        workers=1,
    )
    classifier = load_classifier(root)
    head = classifier.head = Recording()
    anchor = nn.Parameter(torch.zeros(1))  # a module without parameters has no device
    classifier.register_parameter("anchor", anchor)
    found = list(predict_files(classifier, find_images([store.path]).samples))
    assert len(found) == store.num_records == 300
    x_ND = torch.cat(head.seen)[: store.num_records]
    assert torch.equal(
        x_ND.to(torch.from_numpy(np.array(cached_ND)).dtype), torch.tensor(cached_ND)
    )


def test_predictions_depend_neither_on_the_source_nor_on_other_images(
    run, store: Store, tmp_path: Path
) -> None:
    _, root = run
    files = {f"{row}.png": store.read(row) for row in range(40)}
    folder = tmp_path / "photos"
    folder.mkdir()
    with tarfile.open(tmp_path / "some.tar", "w") as tar:
        for name, blob in files.items():
            (folder / name).write_bytes(blob)
            member = tarfile.TarInfo(name)
            member.size = len(blob)
            tar.addfile(member, io.BytesIO(blob))
    image = pa.array([{"bytes": blob, "path": name} for name, blob in files.items()])
    pq.write_table(pa.table({"image": image}), tmp_path / "some.parquet")
    of_store = [one[1:] for one in dpvision.predict(root, store.path)[:40]]
    for place in (tmp_path / "some.tar", tmp_path / "some.parquet"):
        assert [one[1:] for one in dpvision.predict(root, place)] == of_store, place
    classifier = load_classifier(root)
    of_folder = {one.name: one[1:] for one in dpvision.predict(classifier, folder)}
    assert of_folder == {f"{folder}/{row}.png": of_store[row] for row in range(40)}
    alone = dpvision.predict(classifier, [folder / "7.png"])
    assert alone == [Prediction(str(folder / "7.png"), *of_store[7])]
    x_BCHW = torch.from_numpy(np.stack([classifier.preprocess(blob) for blob in files.values()]))
    with torch.no_grad():
        probability_BK = classifier.probabilities(x_BCHW)
    np.testing.assert_allclose([one[1] for one in of_store], probability_BK, atol=1e-5)
    named = [classifier.class_names[k] for k in probability_BK.argmax(1).tolist()]
    assert [one[0] for one in of_store] == [(name,) for name in named]


def _classifier(**settings: object) -> ImageClassifier:
    """The means of the colours of an 8 px image are its scores."""

    class Means(nn.Module):
        def forward(self, x_BCHW: Tensor) -> Tensor:
            return x_BCHW.mean(dim=(2, 3))

    head = nn.Linear(3, 3)
    nn.init.eye_(head.weight), nn.init.zeros_(head.bias)
    return ImageClassifier(
        Means(),
        head,
        **{
            "class_names": ("red", "=green", "blue"),
            "image_size": 8,
            "data": DataConfig(mean=(0.5, 0.5, 0.5), std=(0.1, 0.1, 0.1)),
            "loss": "softmax",
            **settings,  # type: ignore[arg-type]
        },
    )


def _png(*colour: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(file, "PNG")
    return file.getvalue()


FILES = [
    ImageFile("=r.png", _png(255, 0, 0)),
    ImageFile("torn.png", _png(0, 0, 0)[:40]),
    ImageFile("w.png", _png(255, 255, 255)),
    ImageFile("gone", b"", "oversized"),
    ImageFile("gb.png", _png(0, 255, 255)),
]


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_unreadable_files_keep_their_place_and_their_reason(batch_size: int) -> None:
    made = list(predict_files(_classifier(), iter(FILES), batch_size=batch_size, workers=1))
    assert [one.name for one in made] == [file.name for file in FILES]
    assert [one.problem for one in made] == [None, "damaged", None, "oversized", None]
    assert made[0].classes == ("red",) and made[1].classes == () == made[1].probabilities
    with pytest.raises(ConfigError, match="batch_size=0; expected at least 1"):
        list(predict_files(_classifier(), iter(FILES), batch_size=0))


def test_several_labels_are_decided_by_their_thresholds() -> None:
    several = {"loss": "sigmoid", "multi_label": True}
    made = list(predict_files(_classifier(thresholds_K=(0.5, 0.9, 0.999), **several), iter(FILES)))
    assert [one.classes for one in made] == [("red",), (), ("red", "=green"), (), ("=green",)]
    none = list(predict_files(_classifier(**several), iter(FILES)))
    assert {one.classes for one in none} == {()}, "without thresholds nothing is decided"


def test_a_person_has_the_labels_that_any_of_their_images_has() -> None:
    several = {"loss": "sigmoid", "multi_label": True, "thresholds_K": (0.5, 0.9, 0.999)}
    persons = Persons(classifier := _classifier(**several))
    made = list(predict_files(classifier, [one._replace(person="Ann") for one in FILES]))
    for one in made:
        persons.add(one)
    ((ann, num, _),) = persons.predictions()
    of_images = {name for one in made for name in one.classes}
    assert num == 3 and set(ann.classes) == of_images and len(of_images) == 2
    assert ann.probabilities == tuple(
        np.max([one.probabilities for one in made if not one.problem], 0)
    )


def test_scores_that_are_not_finite_are_a_problem_of_the_image() -> None:
    classifier = _classifier()
    with torch.no_grad():
        classifier.head.bias[0] = torch.nan
    assert {one.problem for one in predict_files(classifier, iter(FILES))} == {
        "scores not finite",
        "damaged",
        "oversized",
    }


def test_a_table_has_every_image_and_starts_no_formula(tmp_path: Path) -> None:
    classifier = _classifier(loss="sigmoid", multi_label=True, thresholds_K=(0.5, 0.5, 0.5))
    made = list(predict_files(classifier, iter(FILES)))
    with predictions_writer(classifier, tmp_path / "out.csv") as write:
        for one in made:
            write(one)
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        *("image", "predicted", "problem"),
        *("probability:red", "probability:=green", "probability:blue"),
        *("decision:red", "decision:=green", "decision:blue"),
    ]
    assert [row["image"] for row in rows] == ["'=r.png", "torn.png", "w.png", "gone", "gb.png"]
    assert [row["problem"] for row in rows] == ["", "damaged", "", "oversized", ""]
    assert [row["predicted"] for row in rows] == [
        "red",
        "",
        "red; =green; blue",
        "",
        "'=green; blue",
    ]
    assert [row["decision:blue"] for row in rows] == ["0", "", "1", "", "1"]
    for row, one in zip(rows, made, strict=True):
        read = [float(row[f"probability:{k}"]) for k in classifier.class_names if one.probabilities]
        assert read == pytest.approx(list(one.probabilities), rel=1e-8), "float32 needs nine digits"
    with (
        pytest.raises(DataError, match="expected a writable path"),
        predictions_writer(classifier, tmp_path / "no" / "out.csv"),
    ):
        pass
    with pytest.raises(RuntimeError), predictions_writer(classifier, tmp_path / "out.csv"):
        raise RuntimeError
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 6, "a failure replaces nothing"
    assert list(tmp_path.iterdir()) == [tmp_path / "out.csv"]


def test_the_pass_is_that_of_adapt() -> None:
    encoder = type("Any", (), {"family": "transformer"})
    assert rows_of_pass(encoder, 256, "cpu") == PASS  # type: ignore[arg-type]
