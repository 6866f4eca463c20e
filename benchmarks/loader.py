"""Training images per second of one core: the loader now, the loader as it was with Pillow's
resize, and bare JPEG decoding.

    python benchmarks/loader.py [--quick] [--size PX] [--images N] [--rounds N] [--threads N]
    [--json FILE]

Cases are stores of JPEG photographs, named by the median of their shorter sides, and of procedural
textures. The variants read the same records with the same keys, turn about in every round. "cpu_us"
is microseconds of CPU time of all threads for an image, which what else the machine does changes
less than the clock; "images_per_core_s" is its inverse; "speedup" is "before" over "now" in the
same round.

"python": records of 8 px at 8 px, so that hardly more than Python is left. Its cpu_us bounds the
time that an image holds the interpreter lock, and one over it the images per second that any number
of threads can make. "threads N": images per second by the clock with N threads, and the ratio to
one thread in the same round.
"""

import argparse
import io
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from common import ROOT, row, write_result
from PIL import Image

from dpvision.config import DataConfig
from dpvision.data.decode import decode
from dpvision.data.importer import import_samples, import_source
from dpvision.data.keys import StepKey
from dpvision.data.loader import physical_batches
from dpvision.data.ordered import ordered_map
from dpvision.data.sources import Sample
from dpvision.data.store import Store
from dpvision.data.texture_store import write_texture_store
from dpvision.data.transform import CROP_NUMBERS, crop_box, cut
from dpvision.devices import keep_freed_memory

SHARED = ROOT.parent / "shared" / "data"
SOURCES = {
    "flickr": SHARED / "flickr8k" / "val-000000.tar",
    "imagenet": SHARED / "imagenet1k_sample" / "all.parquet",
    "coco": SHARED / "coco_mini" / "images" / "val2017",
}
BATCH, CHUNK = 128, 64
Load = Callable[[Store, np.ndarray, StepKey, int, int], Iterator[Any]]
"""(store, rows, key, image size, threads) -> batches."""


def now(store: Store, rows: np.ndarray, key: StepKey, size: int, threads: int) -> Iterator[Any]:
    return physical_batches(
        store, rows, key, DataConfig(), size, physical_batch_size=BATCH, workers=threads
    )


def before(store: Store, rows: np.ndarray, key: StepKey, size: int, threads: int) -> Iterator[Any]:
    """The loader until November 2026: Pillow's resize, flips of interleaved pixels, and finished
    images joined by the reader's thread.
    """
    data = DataConfig()
    scale = (1 / (255 * np.asarray(data.std))).astype(np.float32)[:, None, None]
    shift = (-np.asarray(data.mean) / np.asarray(data.std)).astype(np.float32)[:, None, None]

    def work(part: np.ndarray) -> np.ndarray:
        record_id = store.index["id"][part].astype(np.int64)
        uniform = key.uniform_numpy(record_id, "crop.0", CROP_NUMBERS).tolist()
        flip = key.uniform_numpy(record_id, "flip.0", 1)[:, 0] < 0.5
        pixels = np.zeros((len(part), size, size, 3), dtype=np.uint8)
        for b, file in enumerate(store.read_many(part)):
            image = Image.fromarray(decode(file))
            pixels[b] = cut(
                image,
                crop_box(image.height, image.width, uniform[b], data.crop_scale),
                size,
                flip[b],
            )
        x = np.empty((len(part), 3, size, size), dtype=np.float32)
        np.multiply(np.moveaxis(pixels, -1, 1), scale, out=x)
        return np.add(x, shift, out=x)

    chunk = min(CHUNK, -(-BATCH // threads))
    parts = [rows[i : i + chunk] for i in range(0, len(rows), chunk)]
    done = ordered_map(work, parts, workers=threads, ahead=threads + 2 * BATCH // chunk)
    while pieces := [piece for _, piece in zip(range(BATCH // chunk), done, strict=False)]:
        yield np.concatenate(pieces)


def cost(
    load: Load, store: Store, rows: np.ndarray, key: StepKey, size: int, threads: int = 1
) -> tuple[float, float]:
    """Seconds by the clock, and of CPU time of all threads, for an image."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in load(store, rows, key, size, threads):
        pass
    return (time.perf_counter() - wall) / len(rows), (time.process_time() - cpu) / len(rows)


def decode_only(
    store: Store, rows: np.ndarray, key: StepKey, size: int, threads: int
) -> Iterator[Any]:
    for file in store.read_many(rows):
        yield simplejpeg.decode_jpeg(file)


def jpeg(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def textures(folder: Path, num: int, size_px: int) -> Store:
    """JPEG files of procedural textures."""
    made = write_texture_store(folder / f"textures{size_px}", num, size_px=size_px)
    files = (jpeg(decode(file)) for file in made.read_many(np.arange(num)))
    return import_samples(
        (Sample(str(i), file, {}) for i, file in enumerate(files)), folder / f"jpeg{size_px}"
    )


def shorter_side(store: Store) -> int:
    sizes = [
        min(simplejpeg.decode_jpeg_header(file)[:2])
        for file in store.read_many(np.arange(min(store.num_records, 200)))
    ]
    return int(np.median(sizes))


def compared(
    name: str, store: Store, loads: dict[str, Load], num: int, rounds: int, size: int
) -> list[dict[str, Any]]:
    found: dict[str, list[float]] = {variant: [] for variant in loads}
    for number in range(-1, rounds):  # the first round fills the caches
        rows = np.random.default_rng(number + 1).permutation(store.num_records)[:num]
        for variant in sorted(loads, reverse=number % 2 == 0):
            _, cpu = cost(loads[variant], store, rows, StepKey(0, number + 1), size)
            if number >= 0:
                found[variant].append(cpu)
    rows_ = [
        row(name, variant, "cpu_us", [1e6 * s for s in values]) for variant, values in found.items()
    ]
    rows_ += [
        row(name, variant, "images_per_core_s", [1 / s for s in values])
        for variant, values in found.items()
    ]
    return [
        *rows_,
        row(
            name,
            "now",
            "speedup",
            [a / b for a, b in zip(found["before"], found["now"], strict=True)],
        ),
    ]


def scaling(
    name: str, store: Store, num: int, rounds: int, size: int, threads: int
) -> list[dict[str, Any]]:
    found: dict[int, list[float]] = {1: [], threads: []}
    for number in range(rounds):
        for count in sorted(found, reverse=number % 2 == 0):
            wall, _ = cost(
                now, store, np.arange(min(num, store.num_records)), StepKey(0, number), size, count
            )
            found[count].append(1 / wall)
    rates = [
        row(name, f"threads {count}", "images_per_s", values) for count, values in found.items()
    ]
    ratios = [many / one for many, one in zip(found[threads], found[1], strict=True)]
    return [*rates, row(name, f"threads {threads}", "ratio", ratios)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="procedural images only, a few rounds")
    parser.add_argument("--size", type=int, default=224, help="image size of the model, px")
    parser.add_argument(
        "--threads",
        type=int,
        help="threads to compare with one, by the clock: needs as many idle cores",
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--images", type=int, default=256, help="images of a round")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    keep_freed_memory()  # as training does
    num, rounds = (32, 2) if args.quick else (args.images, args.rounds)
    three: dict[str, Load] = {"decode": decode_only, "before": before, "now": now}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        stores = {"textures": partial(textures, Path(folder), num, 256)}
        if not args.quick:
            stores |= {
                name: partial(import_source, str(path), Path(folder, name), public=True)
                for name, path in SOURCES.items()
                if path.exists()
            }
        for name, make in stores.items():
            store = make()
            rows += compared(
                f"{name} {shorter_side(store)} px", store, three, num, rounds, args.size
            )
            if name == "textures" and args.threads:
                rows += scaling("textures", store, num, rounds, args.size, args.threads)
        rows += compared("python", textures(Path(folder), 4 * num, 8), three, 4 * num, rounds, 8)
    write_result(
        args.json, "loader", rows, packages=["dpvision", "torch", "pillow", "simplejpeg", "numpy"]
    )


if __name__ == "__main__":
    main()
