"""The store that the texture generator stands behind is a store like any other, and training sees
new looks.
"""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dpvision.cli import main
from dpvision.config import DataConfig
from dpvision.data.inspect import contact_sheet, inspect_store, texture_sheet
from dpvision.data.keys import StepKey
from dpvision.data.loader import _texture_batches, image_batches, physical_batches
from dpvision.data.open import open_store
from dpvision.data.split import split_store
from dpvision.data.store import Store
from dpvision.data.synthetic_store import write_textures
from dpvision.data.texture_store import write_texture_store
from dpvision.errors import ConfigError, DataError
from dpvision.synthetic.textures import VERSION, textures

DATA = DataConfig(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_texture_store(
        tmp_path_factory.mktemp("textures") / "store", 500, first=1000, size_px=24
    )


def test_records_are_the_numbered_textures(store: Store) -> None:
    again = open_store(store.path)
    assert (
        again.store_id == store.store_id
        and again.visibility == "public"
        and again.num_records == 500
    )
    image = np.asarray(Image.open(io.BytesIO(again.read(7))))
    assert np.array_equal(image, textures(torch.tensor([1007]), 24)[0].permute(1, 2, 0).numpy())
    assert again.record(7).id == 1007 and np.array_equal(again.eligible_rows(1, 0), np.arange(500))


def test_written_files_are_the_same_images(store: Store, tmp_path: Path) -> None:
    files = write_textures(tmp_path / "files", 20, 24, first=1000)
    for row in range(20):
        key = files.record(row).key
        number = int(key.removeprefix("texture-"))
        assert np.array_equal(
            np.asarray(Image.open(io.BytesIO(files.read(row)))),
            np.asarray(Image.open(io.BytesIO(store.read(number - 1000)))),
        )


def test_training_sees_a_new_look_in_each_step_and_view(store: Store) -> None:
    rows = np.array([3, 5, 400])
    data = replace(DATA, views=2)

    def batch(step: int, rows: np.ndarray, size: int = 8) -> torch.Tensor:
        made = physical_batches(
            store, rows, StepKey(0, step), data, 32, physical_batch_size=size, workers=2
        )
        return torch.cat([b.image_BVCHW for b in made])

    x = batch(0, rows)
    assert (
        x.shape == (3, 2, 3, 32, 32)
        and torch.equal(x, batch(0, rows))
        and torch.equal(x, batch(0, rows, size=1))
    )
    assert torch.equal(batch(0, rows[1:]), x[1:]), "a record's look depends on the record alone"
    assert not torch.equal(batch(1, rows), x) and not torch.equal(x[:, 0], x[:, 1])
    seen = (
        textures(
            torch.tensor([1003]),
            32,
            instance_N=StepKey(0, 0).bits(torch.tensor([1003]), "look.1", 1)[:, 0],
        )[0]
        / 255
    )
    assert torch.allclose(x[0, 1], seen, atol=1e-6)


def test_images_made_on_a_device_are_those_made_by_threads(store: Store) -> None:
    """The way that a GPU takes, run on the CPU: same records, same pixels, whatever the physical
    batch.
    """
    rows, key, data = np.arange(0, 90, 4), StepKey(3, 2), replace(DataConfig(), views=2)
    threads = list(physical_batches(store, rows, key, data, 24, physical_batch_size=10, workers=2))
    device = list(
        _texture_batches(
            store,
            [rows[i : i + 10] for i in range(0, len(rows), 10)],
            key,
            data,
            24,
            torch.device("cpu"),
        )
    )
    assert len(threads) == len(device) == 3
    for a, b in zip(threads, device, strict=True):
        assert (
            torch.equal(a.record_id_B, b.record_id_B)
            and torch.equal(a.valid_B, b.valid_B)
            and b.label_B is None
        )
        torch.testing.assert_close(a.image_BVCHW, b.image_BVCHW, rtol=1e-5, atol=1e-5)


def test_the_rest_of_the_program_takes_it_as_a_store(store: Store) -> None:
    x, row, label = next(image_batches(store, np.arange(4), 24, DATA, batch_size=4, workers=1))
    assert x.shape == (4, 3, 24, 24) and row.tolist() == [0, 1, 2, 3] and label.tolist() == [-1] * 4
    few = write_texture_store(store.path.parent / "few", 40, size_px=24)
    assert inspect_store(few)["num_records"] == 40 and contact_sheet(few, 8).size[0] > 0
    assert texture_sheet(5, 16, first=3).size == (5 * 18 - 2, 16)


def test_what_cannot_be_is_refused(store: Store, tmp_path: Path) -> None:
    for num, first in ((0, 0), ((1 << 28) + 1, 0), (5, -1), (5, 10**20)):
        with pytest.raises(DataError, match="expected"):
            write_texture_store(tmp_path / "new", num, first=first)
    for first in (-1, 10**20):
        with pytest.raises(DataError, match=f"first={first}; expected 0 or more"):
            write_textures(tmp_path / "new", 5, 24, first=first)
        with pytest.raises(DataError, match=f"first={first}; expected 0 or more"):
            texture_sheet(5, 24, first=first)
    with pytest.raises(ConfigError, match=f"instance=-{10**20}; expected a number between"):
        texture_sheet(5, 24, instance=-(10**20))
    assert not (tmp_path / "new").exists(), "nothing is written first"
    with pytest.raises(DataError, match="exists"):
        write_texture_store(store.path, 5)
    with pytest.raises(DataError, match="textures"):
        split_store(store.path, store.path.parent / "a", store.path.parent / "b", 0.5)


@pytest.mark.parametrize(
    ("sheet", "num", "most"), [("s.webp", 630 * 12 + 1, "16,383"), ("s.JPG", 10_000, "65,500")]
)
def test_a_sheet_larger_than_its_format_is_refused_before_any_image_is_made(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sheet: str,
    num: int,
    most: str,
) -> None:
    monkeypatch.setattr("dpvision.data.inspect.textures", lambda *a, **kw: pytest.fail("rendered"))
    size_px = 24 if sheet == "s.webp" else 96
    assert (
        main(
            [
                "synth",
                "--sheet",
                str(tmp_path / sheet),
                "--sheet-num",
                str(num),
                "--size-px",
                str(size_px),
            ]
        )
        == 2
    )
    assert (
        f"expected at most {most} px a side" in capsys.readouterr().err
        and not (tmp_path / sheet).exists()
    )


def test_textures_of_another_generator_are_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    text = (store.path / "store.json").read_text()
    (tmp_path / "old" / "store.json").write_text(
        text.replace(f'"generator_version": {VERSION}', '"generator_version": 0')
    )
    with pytest.raises(DataError, match="Make the store again"):
        open_store(tmp_path / "old")
