"""The table of what is fuzzed: seed files, how a case is read, and its limits.

A seed is a folder of variants; a case copies one variant, mutates one to three of its files
(``mutators``) and reads it. A reader returns "read", "counted" (an image left out with its reason)
or raises one of ``REFUSALS``.
"""

import contextlib
import functools
import gzip
import io
import json
import re
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image

from dpvision.cli import main
from dpvision.data.caption_files import CaptionFile
from dpvision.data.decode import (
    BadImage,
    decode,
    in_8_bits,
    largest_undeclared,
    read_image,
    stored_ids,
    stored_size,
)
from dpvision.data.import_labels import LabelRule
from dpvision.data.importer import import_source
from dpvision.data.open import open_store
from dpvision.data.tokenizer import CaptionTokenizer, file_captions, scene_captions, train_tokenizer
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


def _write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _command(*words: object) -> str:
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


def _encoded(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    _pixels(mode).save(file, kind, **options)
    return file.getvalue()


def _images(name: str, *files: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for i, data in enumerate(files):
            _write(folder / str(i) / name, data)

    return write


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
        _encoded("JPEG", exif=_exif()),
        _encoded("JPEG", "L", progressive=True),
        _encoded("JPEG", "CMYK"),
        _encoded("JPEG", quality=100, subsampling=0, restart_marker_blocks=1),
        *sorted(photos, key=len)[:12],
    ]
    _images("a.jpg", *files)(folder)


def _png(folder: Path) -> None:
    modes = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
    files = [_encoded("PNG", mode) for mode in modes]
    _images("a.png", *files, _encoded("PNG", exif=_exif()), _png_16())(folder)


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
        *(_encoded("TIFF", mode) for mode in ("1", "L", "P", "RGB", "RGBA", "CMYK", "I;16", "F")),
        *(
            _encoded("TIFF", mode, compression=packed)
            for mode in ("RGB", "I;16")
            for packed in ("tiff_lzw", "tiff_adobe_deflate", "packbits")
        ),
        _encoded("TIFF", "RGB", compression="jpeg"),
        _encoded("TIFF", "1", compression="group4"),
        _encoded("TIFF", "I;16", big_tiff=True),
    ]
    _images("a.tif", *files)(folder)


def _others(folder: Path) -> None:
    files = {
        "gif": [
            _encoded("GIF", "P"),
            _encoded("GIF", "P", save_all=True, append_images=[_pixels()]),
        ],
        "bmp": [_encoded("BMP"), _encoded("BMP", "P"), _encoded("BMP", "1")],
        "ppm": [
            _encoded("PPM"),
            _encoded("PPM", "L"),
            _encoded("PPM", "1"),
            b"P3 2 1 9 1 2 3 4 5 6",
        ],
        "webp": [_encoded("WEBP"), _encoded("WEBP", "RGBA", lossless=True, exif=_exif())],
        "avif": [_encoded("AVIF")],
        "jp2": [_encoded("JPEG2000"), _encoded("JPEG2000", "L", no_jp2=True)],
    }
    with contextlib.suppress(ImportError):
        import pillow_heif

        file = io.BytesIO()
        pillow_heif.from_pillow(_pixels(size=(64, 64))).save(file)
        files["heic"] = [file.getvalue()]
    for kind, made in files.items():
        for i, data in enumerate(made):
            _write(folder / f"{kind}{i}" / f"a.{kind}", data)


def _webp(folder: Path) -> None:
    more = {"save_all": True, "append_images": [_pixels()]}
    made = [_encoded("WEBP"), _encoded("WEBP", "RGBA", lossless=True, exif=_exif())]
    _images("a.webp", *made, _encoded("WEBP", **more))(folder)


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


def _read_image(folder: Path, rng: Random) -> str:
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
    _command("data", "import", source, store, "--json", "--workers", "1", *options)
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
            _write(root / f"{name}.png", _encoded("PNG", ("RGB", "L", "P")[i]))
        _write(root / "a.txt", "A café.\n".encode())
        _write(root / "b.json", json.dumps({"captions": ["one", "two"], "label": 3}).encode())
        rows = [{"file_name": f"{n}.png", "label": n, "who": n * 2} for n in "abc"]
        if variant == "csv":
            lines = ["file_name,label,who", *(",".join(row.values()) for row in rows)]
            _write(root / "metadata.csv", "\n".join(lines).encode())
        else:
            _write(root / "metadata.jsonl", "\n".join(map(json.dumps, rows)).encode())
    for name in ("cat", "dog"):
        _write(
            folder / "classes" / "in" / name / "a.jpg",
            _encoded("JPEG", ("L", "RGB")[name == "dog"]),
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
        _write(at / "x.png", _encoded("PNG", "1"))
    elif kind == 3:
        at.symlink_to("..", target_is_directory=True)
    else:
        _write(at, rng.choice((b"", b"\0" * 5000, _encoded("JPEG"))))


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
                    f"{i}.png": _encoded("PNG", ("RGB", "L", "P")[i]),
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

    images = [_encoded("PNG", mode) for mode in ("RGB", "L", "P", "RGBA")]
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
            _write(folder / variant / "in" / f"{i}.dcm", data)
    _write(folder / "b" / "in" / "DICOMDIR", b"\0" * 128 + b"DICM" + bytes(40))


def _read_series(folder: Path, rng: Random) -> str:
    options = rng.choice((
        (), ("--series", "Modality=CT"), ("--frames", "middle"),
        ("--unit-from", "SeriesInstanceUID"), ("--unmatched", "own-person"),
        ("--series", "PatientID=one", "--unmatched", "drop"),
    ))  # fmt: skip
    return _imported(folder, folder / "in", *options)


# captions, classes and tokenizers


def _coco_json(folder: Path, name: str, file: str, most: int = 6) -> None:
    """Cut one of COCO's files to its first images."""
    found = json.loads((SHARED / "coco_mini" / "annotations" / name).read_bytes())
    found["images"] = found["images"][:most]
    kept = {image["id"] for image in found["images"]}
    found["annotations"] = [a for a in found["annotations"] if a["image_id"] in kept]
    _write(folder / file, json.dumps(found).encode())
    for image in found["images"]:
        at = SHARED / "coco_mini" / "images" / "val2017" / image["file_name"]
        _write(folder / "images" / image["file_name"], at.read_bytes())


def _captions(folder: Path) -> None:
    _coco_json(folder / "coco", "captions_val2017.json", "captions.json")
    shutil.rmtree(folder / "coco" / "images")
    _write(folder / "tabs" / "captions.txt", b"a.jpg#0\tA dog.\na.jpg#1\tA cat.\nb.jpg\tA bird\n")
    _write(
        folder / "csv" / "captions.csv", 'image,caption\na.jpg,"A dog, big"\nb.jpg,Öl\n'.encode()
    )


def _read_captions(folder: Path, rng: Random) -> str:
    (path,) = (p for p in folder.iterdir() if p.name.startswith("captions"))
    found = CaptionFile(path)
    from dpvision.data.captions import find_captions
    from dpvision.data.sample import Sample

    names = dict.fromkeys([*list(found._captions)[:3], "other.jpg"])
    made = [find_captions(s.fields) for s in found.attach(Sample(n, b"x", {}) for n in names)]
    return "counted" if any(m.dropped for m in made) else "read"


def _classes(folder: Path) -> None:
    _write(folder / "lines" / "classes.txt", b"cat\ndog\nbird\n")
    _write(folder / "list" / "classes.json", b'["cat", "dog", "bird"]')
    _write(folder / "table" / "classes.json", b'{"1": "cat", "2": "dog", "30": "bird"}')


def _read_classes(folder: Path, rng: Random) -> str:
    for path in folder.glob("classes.*"):
        LabelRule(classes=path).read()
        if path.suffix == ".json" and path.read_bytes()[:1] == b"{":
            from dpvision.eval.dense.semantic_data import load_classes

            load_classes(path)
    return "read"


def _bpe(folder: Path) -> None:
    train_tokenizer(scene_captions(200), 300).save(folder / "0" / "tokenizer.json")


def _wordpiece(folder: Path) -> None:
    from paper_files import write_vocabulary

    (folder / "0").mkdir(parents=True)
    write_vocabulary(folder / "0" / "vocab.txt", ["a", "dog", "##s", "."], 140)


def _read_tokenizer(folder: Path, rng: Random) -> str:
    (path,) = (p for p in folder.iterdir() if p.suffix in (".txt", ".json"))
    made = CaptionTokenizer.load(path)
    ids = made.encode("A dog's café <eos> 犬\ud800\0", 40)
    made.decode(ids), made.pieces("two dogs"), made.decode([-1, 2**40, 5])
    if not 0 <= ids.min() <= ids.max() < made.vocab_size:
        raise Broken(f"ids {ids.min()} to {ids.max()} of {made.vocab_size}")
    return "read"


def _texts(folder: Path) -> None:
    lines = b"a dog runs\na cat sits on a dog\n" * 30
    _write(folder / "0" / "text.txt", lines)
    _write(folder / "1" / "text.gz", gzip.compress(lines, mtime=0))


def _read_texts(folder: Path, rng: Random) -> str:
    train_tokenizer(file_captions([p for p in folder.iterdir() if p.is_file()]), 259)
    return "read"


# weights


def _paper(kind: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        import paper_files as made
        import torch

        tensors = made.dpcap_file() if kind == "dpcap" else made.mae_file()
        for form in ("safetensors", "pth"):
            (folder / form).mkdir(parents=True)
            if form == "pth":
                torch.save({"model": tensors, "epoch": 3}, folder / form / "w.pth")
            else:
                made.write(folder / form / "w.safetensors", tensors)

    return write


def _read_paper(kind: str) -> Callable[[Path, Random], str]:
    def read(folder: Path, rng: Random) -> str:
        from dpvision.encoders.open import open_encoder
        from dpvision.encoders.papers import paper_checkpoint

        (path,) = (p for p in folder.iterdir() if p.stem == "w")
        paper_checkpoint(kind, f"{path}@heads=3,2")
        return _looked(open_encoder(f"{kind}:{path}@heads=3,2"))

    return read


def _looked(encoder: Any) -> str:
    """Take features of one image, as ``embed`` does."""
    import torch

    with torch.no_grad():
        size = encoder.image_size
        made = encoder.poolings(torch.zeros(1, 3, size, size))
    if not made:
        raise Broken("no features")
    return "read"


def _hub(folder: Path) -> None:
    import hub_folders as hub

    for kind in ("vit", "convnext", "clip"):
        hub.write_folder(folder / kind / "hub", kind)
        _write(folder / kind / "hub" / "README.md", b"---\nlicense: mit\n---\ntext\n")
    shutil.rmtree(folder / "clip" / "hub" / "tokenizer.json", ignore_errors=True)


def _read_hub(folder: Path, rng: Random) -> str:
    from dpvision.encoders.open import open_encoder

    return _looked(open_encoder(f"hf:{folder / 'hub'}"))


def _timm(folder: Path) -> None:
    import timm
    import torch

    torch.manual_seed(0)
    for name in ("test_vit", "test_resnet"):
        model = timm.create_model(name, num_classes=3)
        timm.models.save_for_hf(model, folder / name / "hub", safe_serialization=True)
        _write(folder / name / "hub" / "name.is", name.encode())


def _read_timm(folder: Path, rng: Random) -> str:
    from dpvision.encoders.open import open_encoder

    name, hub = (folder / "hub" / "name.is").read_text(), folder / "hub"
    file = hub if rng.random() < 0.5 else hub / "model.safetensors"
    return _looked(open_encoder(f"timm:{name}@{file}"))


def _onnx(folder: Path) -> None:
    import torch
    from onnx import TensorProto, helper, numpy_helper, save

    torch.manual_seed(0)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["map"], strides=[2, 2]),
        helper.make_node("Relu", ["map"], ["c"]),
        helper.make_node("ReduceMean", ["c"], ["vector"], axes=[2, 3], keepdims=0),
    ]
    for i, outside in enumerate((False, True)):
        graph = helper.make_graph(
            nodes,
            "graph",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", 3, 16, 16])],
            [helper.make_tensor_value_info("vector", TensorProto.FLOAT, ["b", 12])],
            [numpy_helper.from_array(torch.randn(12, 3, 3, 3).numpy(), "w")],
        )
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=9)
        helper.set_model_props(
            made, {"dpvision.mean": "[0.5, 0.5, 0.5]", "dpvision.image_size": "16"}
        )
        (folder / str(i)).mkdir(parents=True)
        save(made, folder / str(i) / "a.onnx", save_as_external_data=outside, location="w.data",
             size_threshold=0)  # fmt: skip


def _read_onnx(folder: Path, rng: Random) -> str:
    from dpvision.encoders.open import open_encoder

    node = rng.choice(("vector", "map"))
    return _looked(open_encoder(f"onnx:{node}@{folder / 'a.onnx'}"))


# runs, stores, statements


def _run(folder: Path) -> None:
    import runs as made

    from dpvision.statement.statement import write_statement

    root = folder / "0"
    made.make_store(root / "store")
    run = made.make_run(root / "run", root / "store", privacy=made.PRIVACY, charged=6)
    (run / "scores.json").write_text(json.dumps(made.PUBLIC_SCORES))
    write_statement(run)


def _read_checkpoint(folder: Path, rng: Random) -> str:
    from dpvision.checkpoint import load_checkpoint
    from dpvision.encoders.open import open_encoder

    run = folder / "run"
    load_checkpoint(run)
    return _looked(open_encoder(run, ema=rng.random() < 0.1))


def _resigned(folder: Path) -> None:
    """Write the digest of changed weights into the manifest: the author of a run can."""
    import hashlib

    for manifest in folder.glob("run/checkpoints/*/manifest.json"):
        weights = manifest.with_name("model.safetensors")
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            values = json.loads(manifest.read_bytes())
            values["tensors"]["model.safetensors"] = hashlib.sha256(
                weights.read_bytes()
            ).hexdigest()
            manifest.write_text(json.dumps(values))


def _read_signed_checkpoint(folder: Path, rng: Random) -> str:
    _resigned(folder)
    return _read_checkpoint(folder, rng)


def _read_verify(folder: Path, rng: Random) -> str:
    run = folder / "run"
    more = rng.choice(((), ("--run", run), ("--run", run, "--store", folder / "store")))
    return _command("verify", run / "statement.json", *more)


def _read_report(folder: Path, rng: Random) -> str:
    return _command("report", folder / "run")


def _read_ledger(folder: Path, rng: Random) -> str:
    more = rng.choice(
        ((), (), ("--set-cap", "9", "--cap-delta", "1e-5"), ("--restore-marks",), ("--moved",))
    )
    return _command("ledger", folder / "store", *more)


def _store(folder: Path) -> None:
    for i in range(2):
        source = folder / "source"
        _write(source / "a" / "1.png", _encoded("PNG", "RGB"))
        _write(source / "b" / "2.png", _encoded("PNG", "L"))
        _write(source / "b" / "2.txt", b"a caption")
        store = folder / str(i) / "store"
        import_source(source, store, public=i == 0, labels=LabelRule(classes=("a", "b")))
        shutil.rmtree(source)


def _read_store(folder: Path, rng: Random) -> str:
    store = open_store(folder / "store")
    for row in range(min(store.num_records, 3)):
        store.record(row)
        store.key(row)
    store.captions_many(np.arange(min(store.num_records, 3)))
    store.has_captions(np.arange(min(store.num_records, 3)))
    return _command("data", "inspect", folder / "store")


# annotations, declarations, keys


def _boxes(folder: Path) -> None:
    _coco_json(folder / "0", "instances_val2017.json", "instances.json", 4)
    path = folder / "0" / "instances.json"
    found = json.loads(path.read_bytes())
    found["annotations"] = found["annotations"][:12]
    size = found["images"][0]
    coded = {"size": [size["height"], size["width"]], "counts": [size["height"] * size["width"]]}
    one = found["annotations"][0] | {"id": 999, "iscrowd": 1, "segmentation": coded}
    found["annotations"].append(one | {"image_id": size["id"]})
    path.write_text(json.dumps(found))


def _read_boxes(folder: Path, rng: Random) -> str:
    from dpvision.eval.dense.coco_data import load_coco

    found = load_coco(folder / "instances.json", folder / "images", allow_missing=True)
    for image in found.images:
        image.read()
        for thing in image.objects:
            image.mask(thing)
    return "counted" if found.notes else "read"


def _choices(folder: Path) -> None:
    for name in ("sugarcrepe", "negclip_pairs"):
        text = (SHARED / "coco_mini" / "annotations" / f"{name}.json").read_bytes()
        found = json.loads(text)
        entries = found[:8] if isinstance(found, list) else dict(list(found.items())[:8])
        _write(folder / name / f"{name}.json", json.dumps(entries).encode())
        (folder / name / "images").mkdir()
        names = set(re.findall(r"[\w.]+\.jpg", json.dumps(entries)))
        names |= {
            f"{int(n):012d}.jpg" for n in re.findall(r'image_id": (\d+)', json.dumps(entries))
        }
        for file in sorted(names):
            for at in (SHARED / "coco_mini" / "images").glob(f"*/{file}"):
                _write(folder / name / "images" / file, at.read_bytes())


def _read_choices(folder: Path, rng: Random) -> str:
    from dpvision.eval.captions.choice_files import negclip_test, sugarcrepe_test

    make = sugarcrepe_test if (folder / "sugarcrepe.json").exists() else negclip_test
    (path,) = folder.glob("*.json")
    found = make(path, folder / "images", visibility="public", allow_missing=True)
    for place in range(min(4, len(getattr(found.images, "paths", ())))):
        found.images.read(place)
    return "read"


def _declarations(folder: Path) -> None:
    values = {
        "name": "a model", "curators": ["one", "two"], "intended_use": "tests", "region": "EU",
        "publication_date": "2026-11-27", "sector": "Healthcare", "justification": "none",
        "organisation": "a clinic", "confidential_kept_until": "2030",
    }  # fmt: skip
    _write(folder / "0" / "declared.json", json.dumps(values).encode())


def _read_declarations(folder: Path, rng: Random) -> str:
    from dpvision.statement.declarations import read_declared

    read_declared(folder / "declared.json", "export")
    return "read"


def _keys(folder: Path) -> None:
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    public = key.public_key().public_bytes(
        forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo
    )
    statement = b'{"a": 1}'
    _write(folder / "0" / "statement.json", statement)
    _write(folder / "0" / "statement.json.sig", key.sign(statement))
    _write(folder / "0" / "public.pem", public)
    private = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    _write(folder / "0" / "private.pem", private)


def _read_keys(folder: Path, rng: Random) -> str:
    from dpvision.statement.signature import read_private_key

    if rng.random() < 0.3:
        read_private_key(folder / "private.pem")
        return "read"
    return _command("verify", folder / "statement.json", "--public-key", folder / "public.pem")


def _scores(folder: Path) -> None:
    _run(folder)


def _read_scores(folder: Path, rng: Random) -> str:
    from dpvision.eval.score_file import read_class_scores, read_releases, read_scores

    run = folder / "run"
    read_scores(run / "scores.json")
    read_class_scores(run)
    read_releases(run)
    return "read"


def _photo(seeds: Callable[[Path], Any], cases: int) -> Target:
    return Target(cases, seeds, _read_image, seconds=30, memory_mb=2048)


TARGETS = {
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
    "caption files": Target(500, _captions, _read_captions),
    "class files": Target(150, _classes, _read_classes),
    "tokenizer, BPE": Target(300, _bpe, _read_tokenizer),
    "tokenizer, WordPiece": Target(200, _wordpiece, _read_tokenizer),
    "tokenizer's text": Target(30, _texts, _read_texts, seconds=200),
    **{
        f"{kind}:FILE": Target(12, _paper(kind), _read_paper(kind), seconds=200)
        for kind in ("vip", "mae", "dpcap")
    },
    "hf:DIR": Target(200, _hub, _read_hub, only=".*hub/[^/]*(json|safetensors|md)"),
    "timm:NAME@FILE": Target(150, _timm, _read_timm, only=".*(json|safetensors)"),
    "onnx:NODE@FILE": Target(250, _onnx, _read_onnx),
    "run folders, checkpoints": Target(200, _run, _read_checkpoint, only="run/.*"),
    "checkpoints with new digests": Target(
        200, _run, _read_signed_checkpoint, only="run/checkpoints/.*"
    ),
    "statements (verify)": Target(
        300, _run, _read_verify, only="run/(.*/)?(statement|run|config|plan|manifest).json"
    ),
    "runs (report)": Target(12, _run, _read_report, only="run/.*|.*store/.*", seconds=60),
    "ledgers": Target(250, _run, _read_ledger, only="(store|LEDGERS|.*ledger).*"),
    "stores": Target(300, _store, _read_store),
    "scores": Target(100, _scores, _read_scores, only="run/.*scores.*"),
    "COCO boxes and masks": Target(300, _boxes, _read_boxes, only=".*json"),
    "SugarCrepe, NegCLIP": Target(150, _choices, _read_choices, only=".*json"),
    "--declared": Target(150, _declarations, _read_declarations),
    "keys and signatures": Target(150, _keys, _read_keys),
}
SLOW = ("vip:FILE", "mae:FILE", "dpcap:FILE", "hf:DIR", "timm:NAME@FILE", "tokenizer's text",
        "statements (verify)", "runs (report)")  # fmt: skip
"""A case takes more than a few hundredths of a second, or needs another large library."""

NEED_DATA = ("caption files", "COCO boxes and masks", "SugarCrepe, NegCLIP")
"""Their seeds are parts of the files in ``SHARED``."""


@functools.cache
def seed_files(name: str, folder: Path) -> tuple[Path, ...]:
    """Write the seeds of a target once below a folder, and list its variants."""
    place = folder / re.sub(r"\W+", "-", name)
    if not place.exists():
        part = place.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        TARGETS[name].seeds(part)
        part.rename(place)
    return tuple(sorted(place.iterdir()))


def mutable(name: str, case: Path) -> Iterator[Path]:
    """List the files of a case that may be mutated."""
    wanted = re.compile(TARGETS[name].only)
    for path in sorted(case.rglob("*")):
        if path.is_file() and wanted.fullmatch(path.relative_to(case).as_posix()):
            yield path
