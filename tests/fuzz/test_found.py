"""Defects that the fuzzing found: each file ended in a traceback, or read for ever."""

import io
import json
import re
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from dpvision.checkpoint import load_checkpoint, save_checkpoint
from dpvision.cli import main, one_line
from dpvision.config import OptimConfig, from_dict
from dpvision.data import parquet_files
from dpvision.data.decode import BadImage, decode, largest_undeclared
from dpvision.data.importer import import_source
from dpvision.data.open import open_store
from dpvision.data.tarindex import scan
from dpvision.encoders.hugging_face_images import image_fields
from dpvision.encoders.weights_file import lineage_of_run_around
from dpvision.errors import CheckpointError, ConfigError, DataError
from dpvision.eval.any_of_labels import _read
from dpvision.eval.score_file import read_scores
from dpvision.report.operator_page import _METRICS, _read_metrics
from dpvision.runs.folder import read_run
from dpvision.statement.again import _agree

DEEP = "[" * 100_000


def _image(kind: str, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    values = np.arange(40 * 30, dtype=np.uint16).reshape(40, 30)
    made = Image.fromarray(values) if mode == "I;16" else Image.fromarray(values.astype(np.uint8))
    made.save(file, kind)
    return file.getvalue()


def _tar(path: Path, form: int = tarfile.GNU_FORMAT, **pax: str) -> bytearray:
    with tarfile.open(path, "w", format=form) as tar:
        for name in ("a.png", "b.png"):
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = 600, dict(pax)
            tar.addfile(info, io.BytesIO(bytes(600)))
    return bytearray(path.read_bytes())


def test_a_damaged_image_of_16_bits_is_a_bad_image_at_each_reader():
    for kind in ("PNG", "TIFF"):
        data = _image(kind, "I;16")
        cut = data[: len(data) // 2] if kind == "PNG" else data[:-30]
        with pytest.raises(BadImage):
            largest_undeclared(cut)


def test_a_jpeg_with_a_frame_header_of_two_bytes_is_damaged():
    data = _image("JPEG")
    at = data.index(b"\xff\xc0")
    short = data[: at + 2] + b"\0\2" + data[at + 4 :]
    for file in (short, short[: at + 4]):
        with pytest.raises(BadImage):
            decode(file)


def test_a_member_of_a_tar_whose_size_is_below_zero_is_damaged(tmp_path):
    made = _tar(tmp_path / "a.tar")  # the second header, 1,536 bytes in, pointed back to the first
    made[1536 + 124 : 1536 + 136] = b"-0000003000\0"
    (tmp_path / "a.tar").write_bytes(made)
    with pytest.raises(DataError, match="damaged at byte 1536"):
        scan(tmp_path / "a.tar")


@pytest.mark.parametrize("size", ["-512", "x", "1e9", "9" * 30, "9" * 5000, "٣"])
def test_an_extended_header_with_another_size_than_digits_is_damaged(tmp_path, size):
    _tar(tmp_path / "a.tar", tarfile.PAX_FORMAT, size=size)
    with pytest.raises(DataError, match="damaged extended header"):
        scan(tmp_path / "a.tar")


def test_deep_metadata_of_a_parquet_file_has_no_class_names(tmp_path):
    table = pa.table({"image": [_image("PNG")], "label": [0]})
    pq.write_table(table.replace_schema_metadata({"huggingface": DEEP}), tmp_path / "a.parquet")
    store = import_source(tmp_path / "a.parquet", tmp_path / "store")
    assert store.label_names is None and store.num_records == 1


def test_deep_json_around_weights_and_of_labels_is_not_read(tmp_path):
    for name in ("manifest.json", "run.json", "labels.json"):
        (tmp_path / name).write_text(DEEP)
    assert lineage_of_run_around(tmp_path / "w.safetensors") is None
    with pytest.raises(DataError, match="nested too deeply"):
        _read(tmp_path / "labels.json")


@pytest.mark.parametrize(
    "line", ["[]", '{"key": 3, "captions": []}', '{"captions": []}', "[[", "1"]
)
def test_a_damaged_line_of_a_store_is_named_when_its_record_is_read(tmp_path, line):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(_image("PNG"))
    store = import_source(tmp_path / "in", tmp_path / "store")
    text = tmp_path / "store" / "records.jsonl"
    text.write_text(line.ljust(text.stat().st_size))
    store = open_store(tmp_path / "store")
    assert store.captions_many(np.array([0])) == [()]
    with pytest.raises(DataError, match="row 0 is damaged"):
        store.key(0)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"bbox": [0, 0, 10**400, 5]}, "expected left, top, width, height"),
        ({"image_id": [1]}, "expected an image and a category"),
        ({"category_id": {}}, "expected an image and a category"),
    ],
)
def test_coco_annotations_of_other_types_are_refused(tmp_path, change, said):
    coco = pytest.importorskip("dpvision.eval.dense.coco_data")
    pytest.importorskip("faster_coco_eval", reason="needs the extra dense")
    mark = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 4, 5], "area": 20}
    values = {
        "categories": [{"id": 1, "name": "a"}],
        "images": [{"id": 1, "file_name": "a.png", "height": 40, "width": 30}],
        "annotations": [mark | change],
    }
    (tmp_path / "a.png").write_bytes(_image("PNG"))
    (tmp_path / "a.json").write_text(json.dumps(values))
    with pytest.raises(DataError, match=said):
        coco.load_coco(tmp_path / "a.json", tmp_path)


def test_scores_and_metrics_of_other_types_are_not_shown(tmp_path):
    numbers = {"value": 0.5, "low": 0.4, "high": 0.6, "chance": 0.1, "n": 9}
    texts = dict.fromkeys(("name", "protocol", "train_data", "test_data", "visibility"), "x")
    path = tmp_path / "scores.json"
    path.write_text(json.dumps([texts | numbers]))
    assert read_scores(path) == [texts | numbers]
    for wrong in ({"low": []}, {"name": None}, {"n": "9"}):
        path.write_text(json.dumps([texts | numbers | wrong]))
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_scores(path)
    path.write_text(json.dumps([{k: v for k, v in (texts | numbers).items() if k != "chance"}]))
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_scores(path)

    line = dict.fromkeys(_METRICS, 1.0) | {"loss": None}
    lines = [line, line | {"step_s": "x"}, {"step": 1}, [], DEEP]
    text = "\n".join(one if one == DEEP else json.dumps(one) for one in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert list(_read_metrics(tmp_path / "metrics.jsonl")) == [line]


def test_an_error_is_one_line_that_only_prints(tmp_path, capsys):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": [_image("PNG")]}), path)
    path.write_bytes(path.read_bytes()[:-9] + b"\xff" + path.read_bytes()[-8:])
    cases = [path, tmp_path / "a\nb\x1b[2J\u202e.tar"]
    for source in cases:
        assert main(["data", "import", str(source), str(tmp_path / "store")]) == 2
        said = capsys.readouterr().err
        assert re.fullmatch(r"error: [^\n]*\n", said) and said[:-1].isprintable()
    long = one_line("where: " + "x" * 10**6 + " Do this.")
    assert len(long) <= 4000 and long.startswith("where: ") and long.endswith("Do this.")


def _store(folder: Path) -> Path:
    (folder / "in").mkdir()
    (folder / "in" / "a.png").write_bytes(_image("PNG"))
    import_source(folder / "in", folder / "store", public=True)
    return folder / "store"


@pytest.mark.parametrize(
    "change",
    [
        {"text": None},
        {"text": {"path": "records.jsonl"}},
        {"shards": "x"},
        {"shards": [{"path": 3, "bytes": 1}]},
        {"shards": [{"path": "\0", "bytes": 1}]},
        {"num_records": -1},
        {"num_records": "1"},
        {"label_names": [None]},
        {"window": [1]},
        {"window": 3},
        {"store_id": None},
    ],
)
def test_a_store_with_values_of_another_kind_is_refused(tmp_path, change):
    about = _store(tmp_path) / "store.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | change))
    with pytest.raises(DataError, match="values of another kind"):
        open_store(about.parent)


@pytest.mark.parametrize("header", [b"{'descr': (", b"{'shape': (9", b"\xff" * 20, b"a b c"])
def test_an_index_with_another_header_is_no_index(tmp_path, header):
    index = _store(tmp_path) / "index.npy"
    data = index.read_bytes()
    index.write_bytes(data[:10] + header.ljust(len(data[10:128])) + data[128:])
    with pytest.raises(DataError, match=r"expected the index|rows of"):
        open_store(index.parent)


@pytest.mark.parametrize(
    "change",
    [
        {"config": 3},
        {"lineage": [3]},
        {"lineage": {}},
        {"tensors": []},
        {"tensors": {"../../model.safetensors": "0"}},
        {"files": {"/etc/passwd": "0"}},
    ],
)
def test_a_manifest_of_another_kind_or_of_files_elsewhere_is_refused(tmp_path, change):
    manifest = {"run_id": "a", "ledger_steps": 0, "updates": 0, "config": {}, "plan": {}}
    manifest |= {"ledger_digest": "", "lineage": []}
    folder = save_checkpoint(tmp_path / "step-1", manifest, {"w": torch.zeros(2)})
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match="of another kind"):
        load_checkpoint(folder)


def test_parquet_columns_of_one_name_and_text_in_another_encoding_are_refused(tmp_path):
    path, image = tmp_path / "a.parquet", pa.array([_image("PNG")])
    pq.write_table(pa.table([image, image], names=["image", "image"]), path)
    with pytest.raises(DataError, match="expected each name once"):
        import_source(path, tmp_path / "store")
    odd = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"]).buffers())
    pq.write_table(pa.table({"image": image, "caption": odd}), path)
    with pytest.raises(DataError, match="expected a parquet file"):
        import_source(path, tmp_path / "store")
    names = json.dumps({"info": {"features": {"label": {"names": 1.5}}}})
    table = pa.table({"image": image, "label": [0]}).replace_schema_metadata({"huggingface": names})
    pq.write_table(table, path)
    assert import_source(path, tmp_path / "store").label_names is None


@pytest.mark.parametrize("size", [[3], {"height": [1], "width": 1}, {"shortest_edge": {}}, None])
def test_image_sizes_of_other_types_are_refused(size):
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 2,
        "size": {"height": 32, "width": 32},
    }
    assert image_fields(settings, "x")["image_size"] == 32
    with pytest.raises(ConfigError, match="a square, or shortest_edge"):
        image_fields(settings | {"size": size}, "x")
    edge = {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 96}}
    for share in (0, None, "x", 1e-9):
        with pytest.raises(ConfigError, match="crop_pct"):
            image_fields(settings | edge | {"crop_pct": share}, "x")


def test_a_parquet_file_is_unpacked_in_batches_of_limited_size(tmp_path, monkeypatch):
    limit, size = 1 << 20, 1 << 17
    monkeypatch.setattr(parquet_files, "_BATCH_BYTES", limit)
    path, table = tmp_path / "a.parquet", pa.table({"image": [_image("PNG"), *[bytes(size)] * 60]})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    with pytest.raises(DataError, match="bytes unpack to 7,"):
        import_source(path, tmp_path / "store")
    pq.write_table(table, path, compression="none", dictionary_pagesize_limit=limit)
    assert path.stat().st_size < 2 * size  # 60 rows name one cell
    rows = parquet_files._batch_rows(pq.ParquetFile(path), path)
    assert 1 < rows * size <= limit
    left_out = import_source(path, tmp_path / "store").import_summary()["left_out"]
    assert left_out == {"not an image": 60}


def test_numbers_beyond_floats_and_a_run_without_its_store_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="expected <class 'float'>"):
        from_dict(OptimConfig, {"learning_rate": 10**400}, "config")
    assert not _agree("guarantee.epsilon", 10**400, 2.0)
    assert not _agree("settings.x", 10**400, 2.0)
    (tmp_path / "config.json").write_text("{}")
    for about in ([], {"format": "dpvision-run-1", "run_id": "a", "store_id": "b"}):
        (tmp_path / "run.json").write_text(json.dumps(about))
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_run(tmp_path)
