"""The range of 16-bit images that an import declares travels with the store and its runs: files are
read for prediction as in training.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import dpvision
from dpvision.checkpoint import find_checkpoint, read_manifest
from dpvision.cli import main
from dpvision.data.image_files import find_images
from dpvision.data.importer import import_source
from dpvision.data.open import open_store
from dpvision.data.split import split_store
from dpvision.errors import DataError
from dpvision.eval.captions.caption_images import caption_files
from dpvision.eval.captions.open_captioner import open_captioner

from ..captioners import train_captioner, write_run
from ..data.image_files import png, write_folder
from ..data.test_pixels import raw_png

pytestmark = pytest.mark.usefixtures("gates_once")

NUM, MOST = 12, 4095


@pytest.fixture(autouse=True)
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Class folders of 12 bits in 16-bit files, and a store for which their range is declared."""
    monkeypatch.chdir(tmp_path)
    write_folder(Path("scans"), {f"{i % 2}/{i}.png": _scan(i) for i in range(NUM)})
    import_source("scans", "store", window=(0, MOST))


def _scan(i: int) -> bytes:
    return raw_png(np.random.default_rng(i).integers(0, MOST + 1, (32, 32)), 16)


def _run(argv: str) -> None:
    assert main(argv.split()) == 0


def _read_as_stored(preprocess) -> None:
    """The files, as paths, bytes and open images, are read as the store was."""
    store = open_store("store")
    for row in range(NUM):
        record = store.record(row)
        expected, file = preprocess(record.image), Path("scans", record.key)
        assert np.array_equal(preprocess(file), expected) and np.array_equal(
            preprocess(file.read_bytes()), expected
        )
        assert not np.array_equal(preprocess(file, window=(0, 65535)), expected), (
            "declared here, it rules"
        )


def test_a_head_reads_files_by_the_range_of_its_store() -> None:
    _run(
        f"adapt --data store --encoder pixels --num-classes 2 --dataset-size {NUM} --epsilon 1 "
        "--name a --quiet"
    )
    assert read_manifest(find_checkpoint("runs/a"))["window"] == [0, MOST]
    _read_as_stored(dpvision.load_classifier("runs/a").preprocess)


SIZES = (
    "--model.encoder.depth 1 --model.encoder.width 32 --model.encoder.num-heads 2 "
    "--privacy.steps 2 --hardware.physical-batch-size 8"
)
DECODER = "--model.decoder-depth 1 --model.decoder-width 16 --model.decoder-num-heads 2"


def test_an_encoder_and_its_features_read_files_by_the_range_of_its_store() -> None:
    declared = f"--privacy.dataset-size {NUM} --privacy.expected-batch-size 4 --name a --quiet"
    _run(f"train vip.micro_random_start --data store {declared} {SIZES} {DECODER}")
    _read_as_stored(dpvision.load("runs/a").preprocess)
    Path("confidential").mkdir()
    _run("embed runs/a store confidential/store.npz")
    _run("embed runs/a scans confidential/files.npz")
    stored, files = (np.load(f"confidential/{name}.npz") for name in ("store", "files"))
    store = open_store("store")
    row_of = {store.record(row).key: row for row in range(NUM)}
    assert np.allclose(
        files["features"], stored["features"][[row_of[key] for key in files["key"]]], atol=1e-6
    )
    import_source("scans", "dark")
    assert main(["embed", "runs/a", "dark", "confidential/dark.npz"]) == 2


def test_a_captioner_reads_files_by_the_range_of_its_store() -> None:
    run = write_run(Path("runs/cap"), train_captioner(1), guarantee={"epsilon": 8.0})
    manifest = find_checkpoint(run) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"window": [0, MOST]}))
    captioner, store = open_captioner(run), open_store("store")
    of_files = caption_files(captioner, find_images(["scans"], window=captioner.window).samples)
    of_store = caption_files(captioner, find_images(["store"], window=captioner.window).samples)
    said = {Path(one.name).name: one.captions for one in of_files}
    assert (
        said == {Path(one.name).name: one.captions for one in of_store}
        and len(said) == store.num_records
    )
    import_source("scans", "dark")
    with pytest.raises(
        DataError, match=r"dark has images of 16 bits without a declared range.*--window 0 4095"
    ):
        find_images(["dark"], window=captioner.window)


def test_parts_of_a_store_keep_its_range() -> None:
    for part in split_store("store", "a", "b", 0.5):
        assert part.window == (0, MOST) and not part.undeclared_range


def test_a_store_whose_range_was_not_declared_is_refused_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import_source("scans", "dark")
    write_folder(Path("plain"), {f"{i % 2}/{i}.png": png(i) for i in range(NUM)})
    import_source("plain", "eight")
    import_source("scans", "other", window=(0, 4000))
    adapt = (
        f"adapt --data {{}} --encoder pixels --num-classes 2 --dataset-size {NUM} --epsilon 1 "
        "--dry-run --test {}"
    )
    for trained, test, words in [
        ("store", "dark", "dark has images of 16 bits without a declared range"),
        ("dark", "store", "store was imported with the range 0 to 4095"),
        ("store", "eight", None),
        ("eight", "store", None),
        ("eight", "dark", None),
        ("store", "other", None),
    ]:
        for command in (
            adapt.format(trained, test),
            f"evaluate pixels --train {trained} --test {test} --protocols ridge --against none",
        ):
            assert main(command.split()) == (0 if words is None else 2), command
            assert words is None or words in capsys.readouterr().err
