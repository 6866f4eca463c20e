import io
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from dpvision.config import DataConfig
from dpvision.data.importer import import_samples
from dpvision.data.keys import StepKey
from dpvision.data.loader import physical_batches, pictures
from dpvision.data.ordered import ordered_map
from dpvision.data.sources import Sample
from dpvision.data.store import Store
from dpvision.data.transform import CROP_NUMBERS, crop_box, preprocess
from dpvision.errors import DataError

from .pictures import encode, noise, spoil

DATA = DataConfig(views=2)
KEY = StepKey(seed=3, step=17)


def tensors(store: Store, rows, key=KEY, data=DATA, *, size=16, batch=8, workers=2) -> dict[int, torch.Tensor]:
    made = {}
    for part in physical_batches(store, np.asarray(rows), key, data, size, physical_batch_size=batch, workers=workers):
        assert part.image_BVCHW.dtype == torch.float32
        assert part.image_BVCHW.shape[1:] == (data.views, 3, size, size)
        made.update(zip(part.record_id_B.tolist(), part.image_BVCHW, strict=True))
    return made


@pytest.mark.parametrize("batch", [1, 7, 64, 1000])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_records_tensor_is_bitwise_the_same_whatever_goes_with_it(store, batch, workers):
    """Neighbours, order, workers and physical batch size change no bit: the record alone, in its own batch, is the reference."""
    alone = {}
    for row in range(store.num_records):
        alone |= tensors(store, [row], batch=1, workers=1)
    for rows in (np.arange(40), np.arange(40)[::-1], np.random.default_rng(0).permutation(40), np.arange(0, 40, 3)):
        together = tensors(store, rows, batch=batch, workers=workers)
        assert list(together) == store.index["id"][rows].tolist()
        assert all(torch.equal(x, alone[record]) for record, x in together.items())


def test_a_record_looks_the_same_at_any_place_of_any_store_with_its_id(store, tmp_path):
    """The key is the id, not the row: a store with the rows reversed gives the same tensors."""
    before = tensors(store, np.arange(40))
    index = np.array(store.index)
    np.save(store.path / "index.npy", index[::-1])
    after = tensors(Store.open(store.path), np.arange(40))
    assert list(after) == list(before)[::-1]
    assert all(torch.equal(x, before[record]) for record, x in after.items())


def test_views_steps_and_seeds_differ(store):
    base = tensors(store, [3])
    ((record, x),) = base.items()
    assert not torch.equal(x[0], x[1])
    for key in (StepKey(3, 18), StepKey(4, 17)):
        assert not torch.equal(tensors(store, [3], key)[record], x)
    assert torch.equal(tensors(store, [3], data=DataConfig(views=1))[record][0], x[0])


@pytest.mark.parametrize("view", [0, 1])
def test_a_training_picture_is_the_keyed_crop_and_flip_of_its_pixels(store, view):
    data = DataConfig(mean=(0, 0, 0), std=(1 / 255,) * 3, views=2)
    for row in range(10):
        record = store.record(row)
        image = Image.open(io.BytesIO(record.image))
        uniform = KEY.uniform(torch.tensor(record.id), f"crop.{view}", CROP_NUMBERS).tolist()
        box = crop_box(image.height, image.width, uniform, data.crop_scale)
        expected = np.asarray(image.resize((16, 16), Image.Resampling.BICUBIC, box=box))
        if KEY.uniform(torch.tensor(record.id), f"flip.{view}", 1).item() < 0.5:
            expected = expected[:, ::-1]
        got = tensors(store, [row], data=data)[record.id][view].permute(1, 2, 0).round().numpy()
        assert np.array_equal(got, expected)


def test_half_of_the_pictures_are_flipped_and_none_when_told_not_to(tmp_path):
    ramp = np.repeat(np.arange(0, 240, 10, dtype=np.uint8)[None, :, None], 24, 0).repeat(3, 2)
    samples = [Sample(str(i), encode(np.where(np.arange(24)[:, None, None] == 0, i % 250, ramp).astype(np.uint8)), {}) for i in range(240)]
    store = import_samples(samples, tmp_path / "s")

    def flipped(data):
        return sum(x[0, 0, 8, 0] > x[0, 0, 8, -1] for x in tensors(store, np.arange(store.num_records), data=data, batch=64).values())

    count, n = flipped(DataConfig()), store.num_records
    assert abs(count - n / 2) < 4 * np.sqrt(n) / 2
    assert flipped(DataConfig(horizontal_flip=False)) == 0


def test_a_record_that_does_not_decode_is_zero_and_nothing_else_moves(store):
    before = tensors(store, np.arange(12))
    spoil(store, 4)
    (batch,) = physical_batches(store, np.arange(12), KEY, DATA, 16, physical_batch_size=12, workers=2)
    assert batch.valid_B.tolist() == [row != 4 for row in range(12)]
    assert batch.record_id_B.tolist() == store.index["id"][:12].tolist()
    assert not batch.image_BVCHW[4].any()
    for row in (0, 3, 5, 11):
        assert torch.equal(batch.image_BVCHW[row], before[int(batch.record_id_B[row])])
    seen = [int(r) for _, row_B, _ in pictures(store, np.arange(12), 16, DATA, batch_size=5, workers=2) for r in row_B]
    assert seen == [row for row in range(12) if row != 4]


def test_batches_cover_the_rows_once_with_labels(store):
    rows = np.arange(1, 40, 2)
    batches = list(physical_batches(store, rows, KEY, DATA, 16, physical_batch_size=8, workers=2))
    assert [len(b.valid_B) for b in batches] == [8, 8, 4]
    assert torch.cat([b.label_B for b in batches]).tolist() == [row % 4 for row in rows]
    assert all(b.valid_B.all() for b in batches)
    assert list(physical_batches(store, rows[:0], KEY, DATA, 16, physical_batch_size=8, workers=2)) == []


def test_a_store_without_labels_gives_none(tmp_path):
    store = import_samples([Sample("a", encode(noise(1)), {})], tmp_path / "s")
    (batch,) = physical_batches(store, np.arange(1), KEY, DATA, 16, physical_batch_size=8, workers=1)
    assert batch.label_B is None


def test_rows_outside_the_store_are_refused(store):
    for rows in ([40], [-1]):
        with pytest.raises(DataError, match="expected 0 to 39"):
            list(physical_batches(store, np.array(rows), KEY, DATA, 16, physical_batch_size=8, workers=1))


def test_evaluation_pictures_are_the_preprocessed_files(store):
    transform = preprocess(16, DATA.mean, DATA.std)
    rows = []
    for x_BCHW, row_B, label_B in pictures(store, None, 16, DATA, batch_size=7, workers=2):
        for x, row, label in zip(x_BCHW, row_B.tolist(), label_B.tolist(), strict=True):
            assert np.array_equal(x.numpy(), transform(Image.open(io.BytesIO(store.read(row)))))
            assert label == row % 4
            rows.append(row)
    assert rows == list(range(40))


def test_threads_end_and_errors_come_out_when_the_reader_leaves_early(store):
    before = threading.active_count()
    batches = physical_batches(store, np.arange(40), KEY, DATA, 16, physical_batch_size=2, workers=3)
    next(batches)
    batches.close()
    assert threading.active_count() == before


def test_ordered_map_keeps_order_bounds_what_is_ahead_and_passes_errors():
    taken = []

    def items():
        for i in range(50):
            taken.append(i)
            yield i

    results = ordered_map(lambda i: i * i, items(), workers=3, ahead=5)
    for n, value in enumerate(results):
        assert value == n * n
        assert len(taken) <= n + 6
    with pytest.raises(ZeroDivisionError):
        list(ordered_map(lambda i: 1 // (i - 3), range(9), workers=2, ahead=2))
