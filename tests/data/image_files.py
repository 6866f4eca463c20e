"""Images and sources made for the tests of the data room."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from dpvision.data.store import Store

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


def noise(seed: int, height: int = 20, width: int = 24) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encode(pixels: np.ndarray, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def png(seed: int, height: int = 20, width: int = 24) -> bytes:
    return encode(noise(seed, height, width))


def write_folder(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def write_tar(path: Path, members: dict[str, bytes], kind: int = tarfile.GNU_FORMAT) -> Path:
    with tarfile.open(path, "w", format=kind) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def js(**fields) -> bytes:
    return json.dumps(fields).encode()


def spoil(store: Store, row: int) -> None:
    """Overwrite the image of a row inside its shard."""
    entry = store.index[row]
    with store.shard_paths[entry["shard"]].open("r+b") as file:
        file.seek(int(entry["offset"]))
        file.write(b"\xff\xd8" + b"x" * (int(entry["size"]) - 2))
