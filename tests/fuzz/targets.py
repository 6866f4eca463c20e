"""The table of what is fuzzed: seed files, how a case is read, and its limits.

A seed is a folder of variants; a case copies one variant, mutates one to three of its files
(``mutators``) and reads it. A reader returns "read", "counted" (an image left out with its reason)
or raises one of ``REFUSALS``.
"""

import contextlib
import functools
import gzip
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from image_targets import (
    IMAGE_TARGETS,
    SHARED,
    Broken,
    Target,
    command,
    encoded,
    write,
)

from dpvision.data.caption_files import CaptionFile
from dpvision.data.import_labels import LabelRule
from dpvision.data.importer import import_source
from dpvision.data.open import open_store
from dpvision.data.tokenizer import CaptionTokenizer, file_captions, scene_captions, train_tokenizer

# captions, classes and tokenizers


def _coco_json(folder: Path, name: str, file: str, most: int = 6) -> None:
    """Cut one of COCO's files to its first images."""
    found = json.loads((SHARED / "coco_mini" / "annotations" / name).read_bytes())
    found["images"] = found["images"][:most]
    kept = {image["id"] for image in found["images"]}
    found["annotations"] = [a for a in found["annotations"] if a["image_id"] in kept]
    write(folder / file, json.dumps(found).encode())
    for image in found["images"]:
        at = SHARED / "coco_mini" / "images" / "val2017" / image["file_name"]
        write(folder / "images" / image["file_name"], at.read_bytes())


def _captions(folder: Path) -> None:
    _coco_json(folder / "coco", "captions_val2017.json", "captions.json")
    shutil.rmtree(folder / "coco" / "images")
    write(folder / "tabs" / "captions.txt", b"a.jpg#0\tA dog.\na.jpg#1\tA cat.\nb.jpg\tA bird\n")
    write(folder / "csv" / "captions.csv", 'image,caption\na.jpg,"A dog, big"\nb.jpg,Öl\n'.encode())


def _read_captions(folder: Path, rng: Random) -> str:
    (path,) = (p for p in folder.iterdir() if p.name.startswith("captions"))
    found = CaptionFile(path)
    from dpvision.data.captions import find_captions
    from dpvision.data.sample import Sample

    names = dict.fromkeys([*list(found._captions)[:3], "other.jpg"])
    made = [find_captions(s.fields) for s in found.attach(Sample(n, b"x", {}) for n in names)]
    return "counted" if any(m.dropped for m in made) else "read"


def _classes(folder: Path) -> None:
    write(folder / "lines" / "classes.txt", b"cat\ndog\nbird\n")
    write(folder / "list" / "classes.json", b'["cat", "dog", "bird"]')
    write(folder / "table" / "classes.json", b'{"1": "cat", "2": "dog", "30": "bird"}')


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
    write(folder / "0" / "text.txt", lines)
    write(folder / "1" / "text.gz", gzip.compress(lines, mtime=0))


def _read_texts(folder: Path, rng: Random) -> str:
    train_tokenizer(file_captions([p for p in folder.iterdir() if p.is_file()]), 259)
    return "read"


# weights


def _paper(kind: str) -> Callable[[Path], None]:
    def seeds(folder: Path) -> None:
        import paper_files as made
        import torch

        tensors = made.dpcap_file() if kind == "dpcap" else made.mae_file()
        for form in ("safetensors", "pth"):
            (folder / form).mkdir(parents=True)
            if form == "pth":
                torch.save({"model": tensors, "epoch": 3}, folder / form / "w.pth")
            else:
                made.write(folder / form / "w.safetensors", tensors)

    return seeds


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
        write(folder / kind / "hub" / "README.md", b"---\nlicense: mit\n---\ntext\n")
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
        write(folder / name / "hub" / "name.is", name.encode())


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
    return command("verify", run / "statement.json", *more)


def _read_report(folder: Path, rng: Random) -> str:
    return command("report", folder / "run")


def _read_ledger(folder: Path, rng: Random) -> str:
    more = rng.choice(
        ((), (), ("--set-cap", "9", "--cap-delta", "1e-5"), ("--restore-marks",), ("--moved",))
    )
    return command("ledger", folder / "store", *more)


def _store(folder: Path) -> None:
    for i in range(2):
        source = folder / "source"
        write(source / "a" / "1.png", encoded("PNG", "RGB"))
        write(source / "b" / "2.png", encoded("PNG", "L"))
        write(source / "b" / "2.txt", b"a caption")
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
    return command("data", "inspect", folder / "store")


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
        write(folder / name / f"{name}.json", json.dumps(entries).encode())
        (folder / name / "images").mkdir()
        names = set(re.findall(r"[\w.]+\.jpg", json.dumps(entries)))
        names |= {
            f"{int(n):012d}.jpg" for n in re.findall(r'image_id": (\d+)', json.dumps(entries))
        }
        for file in sorted(names):
            for at in (SHARED / "coco_mini" / "images").glob(f"*/{file}"):
                write(folder / name / "images" / file, at.read_bytes())


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
    write(folder / "0" / "declared.json", json.dumps(values).encode())


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
    write(folder / "0" / "statement.json", statement)
    write(folder / "0" / "statement.json.sig", key.sign(statement))
    write(folder / "0" / "public.pem", public)
    private = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    write(folder / "0" / "private.pem", private)


def _read_keys(folder: Path, rng: Random) -> str:
    from dpvision.statement.signature import read_private_key

    if rng.random() < 0.3:
        read_private_key(folder / "private.pem")
        return "read"
    return command("verify", folder / "statement.json", "--public-key", folder / "public.pem")


def _scores(folder: Path) -> None:
    _run(folder)


def _read_scores(folder: Path, rng: Random) -> str:
    from dpvision.eval.score_file import read_class_scores, read_releases, read_scores

    run = folder / "run"
    read_scores(run / "scores.json")
    read_class_scores(run)
    read_releases(run)
    return "read"


TARGETS = {
    **IMAGE_TARGETS,
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
