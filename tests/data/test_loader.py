import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import Compose, RandomHorizontalFlip, RandomResizedCrop
from torchvision.transforms.v2.functional import pil_to_tensor, resized_crop

from dpvision.config import BOS_ID, EOS_ID, PAD_ID, DataConfig
from dpvision.data.importer import import_samples
from dpvision.data.keys import StepKey
from dpvision.data.loader import image_batches, physical_batches
from dpvision.data.open import open_store
from dpvision.data.ordered import ordered_map
from dpvision.data.sources import Sample
from dpvision.data.store import Store
from dpvision.data.texture_store import write_texture_store
from dpvision.data.tokenizer import MIN_VOCAB_SIZE, CaptionReader, check_captions, train_tokenizer
from dpvision.data.transform import CROP_NUMBERS, crop_box, preprocess
from dpvision.devices import host_buffer
from dpvision.errors import DataError
from dpvision.train.step import on_device

from .image_files import encode, noise, spoil

DATA = DataConfig(views=2)
KEY = StepKey(seed=3, step=17)


def tensors(
    store: Store, rows, key=KEY, data=DATA, *, size=16, batch=8, workers=2
) -> dict[int, torch.Tensor]:
    made = {}
    for part in physical_batches(
        store, np.asarray(rows), key, data, size, physical_batch_size=batch, workers=workers
    ):
        assert part.image_BVCHW.dtype == torch.float32
        assert part.image_BVCHW.shape[1:] == (data.views, 3, size, size)
        made.update(zip(part.record_id_B.tolist(), part.image_BVCHW, strict=True))
    return made


@pytest.mark.parametrize("batch", [1, 7, 64, 1000])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_records_tensor_is_bitwise_the_same_whatever_goes_with_it(store, batch, workers):
    """Neighbours, order, workers and physical batch size change no bit: the record alone, in its
    own batch, is the reference.
    """
    alone = {}
    for row in range(store.num_records):
        alone |= tensors(store, [row], batch=1, workers=1)
    for rows in (
        np.arange(40),
        np.arange(40)[::-1],
        np.random.default_rng(0).permutation(40),
        np.arange(0, 40, 3),
    ):
        together = tensors(store, rows, batch=batch, workers=workers)
        assert list(together) == store.index["id"][rows].tolist()
        assert all(torch.equal(x, alone[record]) for record, x in together.items())


def test_a_record_looks_the_same_at_any_place_of_any_store_with_its_id(store, tmp_path):
    """The key is the id, not the row: a store with the rows reversed gives the same tensors."""
    before = tensors(store, np.arange(40))
    index = np.array(store.index)
    np.save(store.path / "index.npy", index[::-1])
    after = tensors(open_store(store.path), np.arange(40))
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
def test_a_training_image_is_the_keyed_crop_and_flip_of_its_pixels(store, view):
    data = DataConfig(mean=(0, 0, 0), std=(1 / 255,) * 3, views=2)
    for row in range(10):
        record = store.record(row)
        image = pil_to_tensor(Image.open(io.BytesIO(record.image)).convert("RGB"))
        uniform = KEY.uniform(torch.tensor(record.id), f"crop.{view}", CROP_NUMBERS).tolist()
        left, top, right, bottom = crop_box(*image.shape[1:], uniform, data.crop_scale)
        expected = resized_crop(
            image,
            top,
            left,
            bottom - top,
            right - left,
            [16, 16],
            InterpolationMode.BICUBIC,
            antialias=True,
        )
        if KEY.uniform(torch.tensor(record.id), f"flip.{view}", 1).item() < 0.5:
            expected = expected.flip(-1)
        assert torch.equal(
            tensors(store, [row], data=data)[record.id][view].round(), expected.float()
        )


def test_half_of_the_images_are_flipped_and_none_when_told_not_to(tmp_path, monkeypatch):
    # The ids of records, and so the flips, depend on the store's key: one fixed draw.
    monkeypatch.setattr("dpvision.data.store_writer.secrets.token_bytes", bytes)
    ramp = np.repeat(np.arange(0, 240, 10, dtype=np.uint8)[None, :, None], 24, 0).repeat(3, 2)
    samples = [
        Sample(
            str(i),
            encode(np.where(np.arange(24)[:, None, None] == 0, i % 250, ramp).astype(np.uint8)),
            {},
        )
        for i in range(240)
    ]
    store = import_samples(samples, tmp_path / "s")

    def flipped(data):
        return sum(
            x[0, 0, 8, 0] > x[0, 0, 8, -1]
            for x in tensors(store, np.arange(store.num_records), data=data, batch=64).values()
        )

    count, n = flipped(DataConfig()), store.num_records
    assert abs(count - n / 2) < 4 * np.sqrt(n) / 2
    assert flipped(DataConfig(horizontal_flip=False)) == 0


@pytest.mark.slow
def test_views_are_distributed_as_torchvisions(tmp_path):
    """Crop and flip as they are seen in the pixels, over 600 steps: two-sample Kolmogorov-Smirnov
    distances (5e-4 quantile).

    Red grows to the right and green downwards, so means tell the place of a view, differences its
    size, and the sign of red's the flip.
    """
    y, x = np.mgrid[:160, :200].astype(np.uint8)
    store = import_samples(
        [Sample("ramps", encode(np.stack([x, y, x], axis=-1)), {})], tmp_path / "s"
    )
    data = DataConfig(mean=(0, 0, 0), std=(1 / 255,) * 3)
    image = pil_to_tensor(Image.open(io.BytesIO(store.read(0))))
    torch.manual_seed(0)
    theirs = Compose(
        [
            RandomResizedCrop(
                32, (0.2, 1.0), interpolation=InterpolationMode.BICUBIC, antialias=True
            ),
            RandomHorizontalFlip(),
        ]
    )

    def seen(x_CHW):
        red, green = x_CHW[0].float(), x_CHW[1].float()
        return [
            red.mean(),
            green.mean(),
            (red[:, -3] - red[:, 2]).mean(),
            (green[-3] - green[2]).mean(),
        ]

    num = 600
    steps = [tensors(store, [0], StepKey(0, step), data, size=32, workers=1) for step in range(num)]
    ours_N4 = np.array([seen(x_VCHW[0]) for made in steps for x_VCHW in made.values()])
    theirs_N4 = np.array([seen(theirs(image)) for _ in range(num)])
    for ours_N, theirs_N in zip(ours_N4.T, theirs_N4.T, strict=True):
        grid = np.concatenate([ours_N, theirs_N])
        distance = (
            np.abs(
                np.searchsorted(np.sort(ours_N), grid, "right")
                - np.searchsorted(np.sort(theirs_N), grid, "right")
            ).max()
            / num
        )
        assert distance < 2.06 * np.sqrt(2 / num)


def test_a_record_that_does_not_decode_is_zero_and_nothing_else_moves(store):
    before = tensors(store, np.arange(12))
    spoil(store, 4)
    (batch,) = physical_batches(
        store, np.arange(12), KEY, DATA, 16, physical_batch_size=12, workers=2
    )
    assert batch.valid_B.tolist() == [row != 4 for row in range(12)]
    assert batch.record_id_B.tolist() == store.index["id"][:12].tolist()
    assert not batch.image_BVCHW[4].any()
    for row in (0, 3, 5, 11):
        assert torch.equal(batch.image_BVCHW[row], before[int(batch.record_id_B[row])])
    seen = [
        int(r)
        for _, row_B, _ in image_batches(store, np.arange(12), 16, DATA, batch_size=5, workers=2)
        for r in row_B
    ]
    assert seen == [row for row in range(12) if row != 4]


def test_bytes_for_a_device_are_the_same_images(store):
    """uint8 batches, normalised afterwards, are the normalised batches, bit for bit; images that do
    not decode are zeros in both.
    """
    spoil(store, 4)
    how = {"physical_batch_size": 5, "workers": 2}
    floats = list(physical_batches(store, np.arange(12), KEY, DATA, 16, **how))
    sent = physical_batches(store, np.arange(12), KEY, DATA, 16, normalised=False, **how)
    assert len(floats) == 3
    for x, (made, rows) in zip(floats, on_device(sent, torch.device("cpu"), DATA), strict=True):
        assert torch.equal(made.image_BVCHW, x.image_BVCHW) and torch.equal(made.valid_B, x.valid_B)
        assert torch.equal(rows.record_id_B, x.record_id_B) and torch.equal(rows.valid_B, x.valid_B)


def test_batches_cover_the_rows_once_with_labels(store):
    rows = np.arange(1, 40, 2)
    batches = list(physical_batches(store, rows, KEY, DATA, 16, physical_batch_size=8, workers=2))
    assert [len(b.valid_B) for b in batches] == [8, 8, 4]
    assert torch.cat([b.label_B for b in batches]).tolist() == [row % 4 for row in rows]
    assert all(b.valid_B.all() for b in batches)
    assert (
        list(physical_batches(store, rows[:0], KEY, DATA, 16, physical_batch_size=8, workers=2))
        == []
    )


def test_a_store_without_labels_gives_none(tmp_path):
    store = import_samples([Sample("a", encode(noise(1)), {})], tmp_path / "s")
    (batch,) = physical_batches(
        store, np.arange(1), KEY, DATA, 16, physical_batch_size=8, workers=1
    )
    assert batch.label_B is None


def test_rows_outside_the_store_are_refused(store):
    for rows in ([40], [-1]):
        with pytest.raises(DataError, match="expected 0 to 39"):
            list(
                physical_batches(
                    store, np.array(rows), KEY, DATA, 16, physical_batch_size=8, workers=1
                )
            )


def test_evaluation_images_are_the_preprocessed_files(store):
    transform = preprocess(16, DATA.mean, DATA.std)
    rows = []
    for x_BCHW, row_B, label_B in image_batches(store, None, 16, DATA, batch_size=7, workers=2):
        for x, row, label in zip(x_BCHW, row_B.tolist(), label_B.tolist(), strict=True):
            assert np.array_equal(x.numpy(), transform(Image.open(io.BytesIO(store.read(row)))))
            assert label == row % 4
            rows.append(row)
    assert rows == list(range(40))


def test_threads_end_and_errors_come_out_when_the_reader_leaves_early(store):
    before = threading.active_count()
    batches = physical_batches(
        store, np.arange(40), KEY, DATA, 16, physical_batch_size=2, workers=3
    )
    next(batches)
    batches.close()
    assert threading.active_count() == before


INTERRUPTED = """
import signal, sys
from pathlib import Path
from dpvision.data.ordered import ordered_map

signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist ignores it
files = [Path(sys.argv[1], name) for name in "abcd"]
list(ordered_map(Path.read_bytes, files, workers=2, ahead=4, processes=True))
"""


def test_an_interrupt_of_the_main_process_alone_ends_the_others(tmp_path):
    """Each may be in the middle of a file that takes hours."""
    for name in "abcd":
        os.mkfifo(tmp_path / name)
    main = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)], stderr=subprocess.PIPE
    )
    held, end = dict[str, int](), time.monotonic() + 300
    while len(held) < 2:  # a pipe can be opened for writing once somebody reads it
        assert time.monotonic() < end and main.poll() is None
        for name in {"a", "b"} - held.keys():
            with contextlib.suppress(OSError):
                held[name] = os.open(tmp_path / name, os.O_WRONLY | os.O_NONBLOCK)
        time.sleep(0.01)
    main.send_signal(signal.SIGINT)
    try:
        said = main.communicate(timeout=60)[1]  # it waits for the pipes otherwise
    finally:
        for descriptor in held.values():
            os.close(descriptor)
        main.kill()
    assert b"KeyboardInterrupt" in said
    for name in "cd":
        with pytest.raises(OSError):
            os.open(tmp_path / name, os.O_WRONLY | os.O_NONBLOCK)


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


def test_images_are_filled_into_the_buffers_that_a_gpu_reads(store, monkeypatch):
    """A double of pinned memory: the loader asks for it, with the device, fills it and hands out
    that memory, not a copy. Only images of a batch are asked for.
    """
    made = []

    def double(shape, dtype, device):
        made.append((torch.full(shape, 99, dtype=dtype), device.type))
        return made[-1][0]

    rows, options = np.arange(20), {"physical_batch_size": 8, "workers": 2}
    expected = list(physical_batches(store, rows, KEY, DATA, 16, **options))
    monkeypatch.setattr("dpvision.data.loader.host_buffer", double)
    batches = list(physical_batches(store, rows, KEY, DATA, 16, device="cuda", **options))
    assert {kind for _, kind in made} == {"cuda"} and len(made) == len(batches)
    for batch, other, (buffer, _) in zip(batches, expected, made, strict=True):
        assert batch.image_BVCHW.data_ptr() == buffer.data_ptr()
        assert torch.equal(batch.image_BVCHW, other.image_BVCHW)


def test_memory_is_pinned_for_a_gpu_only(monkeypatch):
    asked = []
    monkeypatch.setattr("torch.empty", lambda *a, pin_memory, **k: asked.append(pin_memory))
    for device in ("cpu", "cuda"):
        host_buffer((2, 3), torch.uint8, torch.device(device))
    assert asked == [False, True]


# --- captions
# --------------------------------------------------------------------------------------------------

READER = CaptionReader(train_tokenizer(["one two"], MIN_VOCAB_SIZE), 12)


def captioned(tmp_path, *captions: list[str], name: str = "captioned") -> Store:
    """Record i has captions[i]."""
    samples = [
        Sample(f"k{i}", encode(noise(i, 8, 8)), {"captions": own}) for i, own in enumerate(captions)
    ]
    return import_samples(samples, tmp_path / name)


def spoken(store: Store, rows, key=KEY, views=2, *, batch=8, workers=2) -> dict[int, list[str]]:
    """Captions by record id, one for each view."""
    made = {}
    data = DataConfig(views=views)
    for part in physical_batches(
        store,
        np.asarray(rows),
        key,
        data,
        8,
        physical_batch_size=batch,
        workers=workers,
        captions=READER,
    ):
        assert part.token_BVL.dtype == torch.int64 and part.token_BVL.shape == (
            len(part.valid_B),
            views,
            12,
        )
        for record, token_VL in zip(
            part.record_id_B.tolist(), part.token_BVL.tolist(), strict=True
        ):
            made[record] = [READER.tokenizer.decode(token_L) for token_L in token_VL]
    return made


@pytest.mark.parametrize("batch", [1, 7, 1000])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_records_captions_are_the_same_whatever_goes_with_it(tmp_path, batch, workers):
    """Neighbours with none, one or many captions, order, workers and batch move none of a
    record's.
    """
    store = captioned(tmp_path, *[[f"{i} of {j}" for j in range(i * 7 % 6)] for i in range(30)])
    alone = {}
    for row in range(30):
        alone |= spoken(store, [row], views=3, batch=1, workers=1)
    assert len({tuple(own) for own in alone.values()}) > 20
    for rows in (
        np.arange(30),
        np.arange(30)[::-1],
        np.random.default_rng(0).permutation(30),
        np.arange(0, 30, 3),
    ):
        together = spoken(store, rows, views=3, batch=batch, workers=workers)
        assert together == {record: alone[record] for record in together}


def test_a_records_captions_are_drawn_by_its_id_not_its_place(tmp_path):
    store = captioned(tmp_path, *[[f"{i} of {j}" for j in range(6)] for i in range(20)])
    before = spoken(store, np.arange(20))
    np.save(store.path / "index.npy", np.array(store.index)[::-1])
    after = spoken(open_store(store.path), np.arange(20))
    assert after == before and list(after) == list(before)[::-1]


def test_tokens_change_no_bit_of_the_images(store):
    before = tensors(store, np.arange(40))
    for part in physical_batches(
        store, np.arange(40), KEY, DATA, 16, physical_batch_size=9, workers=2, captions=READER
    ):
        assert part.valid_B.all() and part.label_B is not None
        for record, x in zip(part.record_id_B.tolist(), part.image_BVCHW, strict=True):
            assert torch.equal(x, before[record])
    (plain, *_) = physical_batches(
        store, np.arange(40), KEY, DATA, 16, physical_batch_size=9, workers=2
    )
    assert plain.token_BVL is None


def test_each_caption_of_a_record_is_drawn_equally_often(tmp_path):
    """Chi-square over steps: 16.3 and more has a chance below one in a thousand at 3 degrees of
    freedom or fewer.
    """
    store = captioned(tmp_path, ["only"], ["a", "b"], ["a", "b", "c", "d"])
    num = 3000
    counts: list[dict[str, int]] = [{}, {}, {}]
    for step in range(num):
        token_BVL, _ = READER.read(store, np.arange(3), StepKey(0, step), 1)
        for count, token_VL in zip(counts, token_BVL, strict=True):
            said = READER.tokenizer.decode(token_VL[0])
            count[said] = count.get(said, 0) + 1
    assert counts[0] == {"only": num}
    for count, n in ((counts[1], 2), (counts[2], 4)):
        assert len(count) == n
        assert sum((c - num / n) ** 2 / (num / n) for c in count.values()) < 16.3


def test_views_go_through_all_captions_before_one_comes_again(tmp_path):
    own = [f"c{i}" for i in range(5)]
    store = captioned(tmp_path, own, ["x", "y"], ["single"])
    orders = set()
    for step in range(60):
        five, two, one = spoken(store, np.arange(3), StepKey(1, step), 5).values()
        orders.add(tuple(five))
        assert sorted(five) == own
        assert sorted(two[:2]) == ["x", "y"] and two[2:] == [*two[:2], two[0]]
        assert one == ["single"] * 5
        # the first views are the same however many there are
        assert spoken(store, [0], StepKey(1, step), 2)[int(store.index["id"][0])] == five[:2]
    assert len(orders) > 40


def test_a_record_without_a_caption_has_weight_zero_and_nothing_else_moves(tmp_path):
    captions = [[f"caption {i}"] for i in range(12)]
    whole = spoken(captioned(tmp_path, *captions, name="whole"), np.arange(12))
    captions[4] = []
    store = captioned(tmp_path, *captions)
    (batch,) = physical_batches(
        store, np.arange(12), KEY, DATA, 8, physical_batch_size=12, workers=2, captions=READER
    )
    assert batch.valid_B.tolist() == [row != 4 for row in range(12)]
    assert not batch.image_BVCHW[4].any()
    assert (
        batch.token_BVL[4].tolist() == [[BOS_ID, EOS_ID] + [PAD_ID] * 10] * 2
    )  # a target, so that no mean is over none
    expected = [["", ""] if row == 4 else own for row, own in enumerate(whole.values())]
    assert list(spoken(store, np.arange(12)).values()) == expected
    with pytest.raises(
        DataError, match=r"1 of 12 records have no caption; expected one each\. Import"
    ):
        check_captions(store, np.arange(12))
    check_captions(store, np.array([0, 1, 5]))
    check_captions(store, np.arange(0))


def test_a_damaged_line_takes_out_its_own_record_only(tmp_path):
    store = captioned(tmp_path, ["a"], ["b"], ["c"])
    entry = store.index[1]
    with (store.path / "records.jsonl").open("r+b") as file:
        file.seek(int(entry["caption_offset"]))
        file.write(b"\xff" * int(entry["caption_size"]))
    (batch,) = physical_batches(
        store, np.arange(3), KEY, DATA, 8, physical_batch_size=12, workers=2, captions=READER
    )
    assert batch.valid_B.tolist() == [True, False, True]
    with pytest.raises(DataError, match="1 of 3"):
        check_captions(store, np.arange(3))


def test_a_long_caption_is_cut_before_its_end_mark(tmp_path):
    store = captioned(tmp_path, ["one two three four five six"])
    (batch,) = physical_batches(
        store, np.arange(1), KEY, DATA, 8, physical_batch_size=1, workers=1, captions=READER
    )
    assert batch.token_BVL[0, 0, [0, -1]].tolist() == [BOS_ID, EOS_ID]
    assert spoken(store, [0])[int(store.index["id"][0])] == ["one two th"] * 2


def test_stores_without_any_caption_are_refused(tmp_path):
    textures = write_texture_store(tmp_path / "t", 5)
    with pytest.raises(DataError, match="5 of 5 records have no caption"):
        check_captions(textures, np.arange(5))
    (batch,) = physical_batches(
        textures, np.arange(5), KEY, DATA, 16, physical_batch_size=5, workers=1, captions=READER
    )
    assert not batch.valid_B.any()


def test_having_captions_is_told_without_parsing_as_parsing_tells_it(tmp_path):
    odd = [[], ["]}"], ["["], [], ['"'], ["[]}"], ["é", "b"], []]
    store = captioned(tmp_path, *odd)
    rows = np.random.default_rng(0).permutation(len(odd))
    assert store.has_captions(rows).tolist() == [bool(store.captions(row)) for row in rows.tolist()]
    assert (
        store.captions_many(rows)
        == [store.captions(row) for row in rows.tolist()]
        == [tuple(odd[row]) for row in rows]
    )
