"""Fuzz targets that are images: single ones, folders, tars, parquet and DICOM; and what all targets
share.
"""

import contextlib
import io
import json
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image

from dpvision.cli import main
from dpvision.data.decode import (
    BadImage,
    decode,
    in_8_bits,
    largest_undeclared,
    read_image,
    stored_ids,
    stored_size,
)
from dpvision.data.open import open_store
from dpvision.errors import DPVisionError

TESTS = Path(__file__).parents[1]
SHARED = TESTS.parents[1] / "shared" / "data"
for _folder in ("", "statement", "encoders", "data"):
    sys.path.append(str(TESTS / _folder))

REFUSALS = (DPVisionError, BadImage)


class Broken(Exception):
    """A rule of the harness was broken, such as an exit status without a message."""


@dataclass(frozen=True)
class Target:
    """One kind of file."""

    cases: int
    """Of the 10,000."""
    seeds: Callable[[Path], Any]
    """Writes the variants, a folder each."""
    read: Callable[[Path, Random], str]
    """Reads a case; files may be written below its folder."""
    only: str = ".*"
    """Pattern of the files that are mutated, as paths from the variant."""
    seconds: float = 60.0
    memory_mb: int = 1024
    """Most that a case may take on top of what its process has."""


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def command(*words: object) -> str:
    """Run a command; return "read" for exit status 0 or 1, and raise its error for 2."""
    out, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        try:
            status: Any = main([str(word) for word in words])
        except SystemExit as stopped:  # of `verify`: a check failed
            status = stopped.code
    if status not in (0, 1) and not said.getvalue().startswith("error: "):
        raise Broken(f"exit status {status}, {said.getvalue()[:200]!r}")
    if status == 2:
        raise DPVisionError(said.getvalue().removesuffix("\n"))
    return "read"


# images


def _pixels(kind: str = "RGB", size: tuple[int, int] = (40, 28)) -> Image.Image:
    values = np.add.outer(np.arange(size[1]) * 5, np.arange(size[0]) * 3)
    values_HWC = np.stack([values, 2 * values, 255 - values], axis=2).astype(np.uint8)
    if kind == "I;16":
        return Image.fromarray((values * 200).astype(np.uint16))
    if kind == "F":
        return Image.fromarray(values.astype(np.float32))
    return Image.fromarray(values_HWC).convert(kind)


def encoded(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    _pixels(mode).save(file, kind, **options)
    return file.getvalue()


def _images(name: str, *files: bytes) -> Callable[[Path], None]:
    def seeds(folder: Path) -> None:
        for i, data in enumerate(files):
            write(folder / str(i) / name, data)

    return seeds


def _exif() -> Any:
    found = Image.Exif()
    found[0x0112], found[0x010F] = 6, "maker"
    return found


def _decodes(path: Path) -> bool:
    with contextlib.suppress(BadImage):
        return bool(path.stat().st_size < 100_000 and decode(path.read_bytes()).size)
    return False


def _jpeg(folder: Path) -> None:
    photos = [p.read_bytes() for p in sorted(SHARED.glob("messy_photos/*.jp*g")) if _decodes(p)]
    files = [
        encoded("JPEG", exif=_exif()),
        encoded("JPEG", "L", progressive=True),
        encoded("JPEG", "CMYK"),
        encoded("JPEG", quality=100, subsampling=0, restart_marker_blocks=1),
        *sorted(photos, key=len)[:12],
    ]
    _images("a.jpg", *files)(folder)


def _png(folder: Path) -> None:
    modes = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
    files = [encoded("PNG", mode) for mode in modes]
    _images("a.png", *files, encoded("PNG", exif=_exif()), _png_16())(folder)


def _png_16() -> bytes:
    """A PNG of 16-bit colour with a transparent colour."""
    import struct
    import zlib

    rows = b"".join(b"\0" + bytes(range(0, 6 * 20)) for _ in range(10))

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    head = struct.pack(">IIBBBBB", 20, 10, 16, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"tRNS", bytes(6)) + chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + parts + chunk(b"IEND", b"")


def _tiff(folder: Path) -> None:
    files = [
        *(encoded("TIFF", mode) for mode in ("1", "L", "P", "RGB", "RGBA", "CMYK", "I;16", "F")),
        *(
            encoded("TIFF", mode, compression=packed)
            for mode in ("RGB", "I;16")
            for packed in ("tiff_lzw", "tiff_adobe_deflate", "packbits")
        ),
        encoded("TIFF", "RGB", compression="jpeg"),
        encoded("TIFF", "1", compression="group4"),
        encoded("TIFF", "I;16", big_tiff=True),
    ]
    _images("a.tif", *files)(folder)


def _others(folder: Path) -> None:
    files = {
        "gif": [
            encoded("GIF", "P"),
            encoded("GIF", "P", save_all=True, append_images=[_pixels()]),
        ],
        "bmp": [encoded("BMP"), encoded("BMP", "P"), encoded("BMP", "1")],
        "ppm": [
            encoded("PPM"),
            encoded("PPM", "L"),
            encoded("PPM", "1"),
            b"P3 2 1 9 1 2 3 4 5 6",
        ],
        "webp": [encoded("WEBP"), encoded("WEBP", "RGBA", lossless=True, exif=_exif())],
        "avif": [encoded("AVIF")],
        "jp2": [encoded("JPEG2000"), encoded("JPEG2000", "L", no_jp2=True)],
    }
    with contextlib.suppress(ImportError):
        import pillow_heif

        file = io.BytesIO()
        pillow_heif.from_pillow(_pixels(size=(64, 64))).save(file)
        files["heic"] = [file.getvalue()]
    for kind, made in files.items():
        for i, data in enumerate(made):
            write(folder / f"{kind}{i}" / f"a.{kind}", data)


def _webp(folder: Path) -> None:
    more = {"save_all": True, "append_images": [_pixels()]}
    made = [encoded("WEBP"), encoded("WEBP", "RGBA", lossless=True, exif=_exif())]
    _images("a.webp", *made, encoded("WEBP", **more))(folder)


def _dicom_files() -> list[bytes]:
    import dicom_files as made

    values, uid = (
        (np.arange(600).reshape(20, 30) * 6).astype(np.uint16),
        {"SeriesInstanceUID": "1.2.3"},
    )
    names = ("MR_small_RLE.dcm", "examples_palette.dcm", "CT_small.dcm")
    found = [made.SAMPLES / name for name in names]
    return [
        made.dicom(values, PatientID="one", Modality="CT", **uid),
        made.dicom(
            (values % 256).astype(np.uint8),
            8,
            PatientID="two",
            WindowCenter=90,
            WindowWidth=60,
            **uid,
        ),
        made.dicom(np.stack([values] * 3), num_frames=3, PatientID="one", **uid),
        made.dicom(np.stack([values % 256] * 3, 2).astype(np.uint8), 8, PatientID="x", **uid),
        *(path.read_bytes() for path in found if path.exists()),
    ]


def _dicom(folder: Path) -> None:
    _images("a.dcm", *_dicom_files())(folder)


def read_pixels(folder: Path, rng: Random) -> str:
    """Decode as import, evaluation and masks do; what one refuses, the others may."""
    (path,) = (p for p in folder.iterdir() if p.is_file())
    data, problems = path.read_bytes(), []
    calls: tuple[Callable[[], Any], ...] = (
        lambda: decode(data),
        lambda: largest_undeclared(data),
        lambda: in_8_bits(data, (0, 4095)),
        lambda: stored_size(data),
        lambda: stored_ids(data),
        lambda: read_image(path),
    )
    for call in calls:
        try:
            made = call()
        except BadImage as error:
            problems.append(error)
        else:
            if isinstance(made, np.ndarray) and not made.size:
                raise Broken("no pixels")
    if len(problems) > 3:
        raise problems[0]
    return "read"


def _read_dicom(folder: Path, rng: Random) -> str:
    (path,) = (p for p in folder.iterdir() if p.is_file())
    decode(path.read_bytes())
    return "read"


# sources of an import


def _imported(folder: Path, source: Path, *options: object) -> str:
    store = folder / "out" / "store"
    command("data", "import", source, store, "--json", "--workers", "1", *options)
    about = json.loads((store / "confidential" / "import.json").read_text())
    made = open_store(store)
    for row in range(min(made.num_records, 3)):
        made.record(row)
    missed = about["left_out"] or about["captions_dropped"] or about.get("table_rows_without_file")
    return "counted" if missed else "read"


def _folder(folder: Path) -> None:
    for variant in ("csv", "jsonl"):
        root = folder / variant / "in"
        for i, name in enumerate(("a", "b", "c")):
            write(root / f"{name}.png", encoded("PNG", ("RGB", "L", "P")[i]))
        write(root / "a.txt", "A café.\n".encode())
        write(root / "b.json", json.dumps({"captions": ["one", "two"], "label": 3}).encode())
        rows = [{"file_name": f"{n}.png", "label": n, "who": n * 2} for n in "abc"]
        if variant == "csv":
            lines = ["file_name,label,who", *(",".join(row.values()) for row in rows)]
            write(root / "metadata.csv", "\n".join(lines).encode())
        else:
            write(root / "metadata.jsonl", "\n".join(map(json.dumps, rows)).encode())
    for name in ("cat", "dog"):
        write(
            folder / "classes" / "in" / name / "a.jpg",
            encoded("JPEG", ("L", "RGB")[name == "dog"]),
        )


def _special(root: Path, rng: Random) -> None:
    """Add a link, a pipe or a file of another name to a folder of images."""
    import os

    at = root / rng.choice(
        ("z.png", "z.txt", "z.json", "a.txt", "z.jpg", "z\n.png", "\udcff.png", "z.dcm")
    )
    if at.exists():
        return
    kind = rng.randrange(6)
    if kind == 0:
        os.mkfifo(at)
    elif kind == 1:
        at.symlink_to(
            rng.choice(("/dev/zero", "/dev/null", "/proc/self/environ", "nothing", at.name))
        )
    elif kind == 2:
        at.mkdir()
        write(at / "x.png", encoded("PNG", "1"))
    elif kind == 3:
        at.symlink_to("..", target_is_directory=True)
    else:
        write(at, rng.choice((b"", b"\0" * 5000, encoded("JPEG"))))


def _read_folder(folder: Path, rng: Random) -> str:
    if rng.random() < 0.4:
        _special(folder / "in", rng)
    options = rng.choice(
        ((), ("--unit-from", "who"), ("--require-captions",), ("--max-value", "4095"))
    )
    return _imported(folder, folder / "in", "--public", *options)


def _tars(folder: Path) -> None:
    for k, form in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT)):
        (folder / str(k)).mkdir(parents=True)
        with tarfile.open(folder / str(k) / "a.tar", "w", format=form) as tar:
            for i in range(3):
                members = {
                    f"{i}.png": encoded("PNG", ("RGB", "L", "P")[i]),
                    f"{i}.txt": f"caption {i}".encode(),
                    f"{i}.json": json.dumps({"label": i, "captions": ["x"]}).encode(),
                }
                for name, data in members.items():
                    info = tarfile.TarInfo(name if i else "d" * 120 + "/" + name)
                    if form == tarfile.USTAR_FORMAT:
                        info.name = name
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def _parquets(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    images = [encoded("PNG", mode) for mode in ("RGB", "L", "P", "RGBA")]
    names = json.dumps(
        {"info": {"features": {"label": {"names": ["a", "b"], "_type": "ClassLabel"}}}}
    )
    tables = (
        {"image": images, "label": [0, 1, 0, 1], "caption": ["a", "b", "c", "d"]},
        {
            "image": [{"bytes": data, "path": f"{i}.png"} for i, data in enumerate(images)],
            "label": [0, 1, 1, 0],
            "other": images,
        },
        {"image": images, "label": [[0], [1, 0], [], [1]], "captions": [["a"], [], ["b"], ["c"]]},
    )
    for i, columns in enumerate(tables):
        (folder / str(i)).mkdir(parents=True)
        table = pa.table(columns).replace_schema_metadata({b"huggingface": names.encode()})
        pq.write_table(
            table, folder / str(i) / "a.parquet", compression=("zstd", "none", "snappy")[i]
        )


def _read_packed(folder: Path, rng: Random) -> str:
    (path,) = (p for p in folder.iterdir() if p.suffix in (".tar", ".parquet"))
    more = ("--require-captions",) if rng.random() < 0.2 else ()
    return _imported(folder, path, "--public", *more)


def _series(folder: Path) -> None:
    for i, data in enumerate(_dicom_files()[:4]):
        for variant in ("a", "b"):
            write(folder / variant / "in" / f"{i}.dcm", data)
    write(folder / "b" / "in" / "DICOMDIR", b"\0" * 128 + b"DICM" + bytes(40))


def _read_series(folder: Path, rng: Random) -> str:
    options = rng.choice((
        (), ("--series", "Modality=CT"), ("--frames", "middle"),
        ("--unit-from", "SeriesInstanceUID"), ("--unmatched", "own-person"),
        ("--series", "PatientID=one", "--unmatched", "drop"),
    ))  # fmt: skip
    return _imported(folder, folder / "in", *options)


def _photo(seeds: Callable[[Path], Any], cases: int) -> Target:
    return Target(cases, seeds, read_pixels, seconds=30, memory_mb=2048)


IMAGE_TARGETS = {
    "JPEG": _photo(_jpeg, 1072),
    "PNG": _photo(_png, 700),
    "TIFF, 8 and 16 bits": _photo(_tiff, 1000),
    "WebP": _photo(_webp, 400),
    "GIF, BMP, PPM, AVIF, JPEG 2000, HEIF": _photo(_others, 600),
    "DICOM": Target(700, _dicom, _read_dicom, seconds=30, memory_mb=2048),
    "DICOM series": Target(200, _series, _read_series),
    "folders of images": Target(400, _folder, _read_folder),
    "tars": Target(600, _tars, _read_packed),
    "parquet": Target(400, _parquets, _read_packed, memory_mb=400),
}
