"""Folders of img2dataset: its tars and parquet files in place, what failed counted by reason."""

import json
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpvision.cli import main
from dpvision.curate.downloads import downloads
from dpvision.curate.passes import curate
from dpvision.curate.pipeline import Pipeline
from dpvision.data.importer import import_source
from dpvision.data.sources import open_source
from dpvision.errors import DataError

from ..data.image_files import encode, js, noise, write_tar
from .doubles import KEY, SETTINGS

STEPS = Pipeline((SETTINGS.size, SETTINGS.caption))


@pytest.fixture(autouse=True)
def one_key(monkeypatch):
    """The same key and id for all stores of a test."""
    monkeypatch.setattr("dpvision.data.store_writer.secrets.token_bytes", lambda n: KEY)
    monkeypatch.setattr("dpvision.data.importer.secrets.token_hex", lambda n: "ab" * n)


def write_shard(folder: Path, shard: int, form: str, each: int = 12) -> None:
    """Write the files of a shard as img2dataset's writer.py and logger.py do."""
    rows, members, status, text = [], {}, {}, "caption of shard"
    for i in range(each):
        state = ["success", "success", "failed_to_download", "failed_to_resize"][i % 4]
        message = {"failed_to_download": f"HTTP Error 40{i % 3 + 1}"}.get(state)
        message = "cannot decode" if state == "failed_to_resize" else message
        status[message or "success"] = status.get(message or "success", 0) + 1
        data = encode(noise(100 * shard + i, 12, 14), "JPEG") if state == "success" else None
        about = {
            "url": f"http://a.b/{i}.jpg",
            "caption": f"{text} {shard} {i}",
            "key": f"{shard:05d}{i:04d}",
            "status": state,
            "error_message": message,
            "width": 14 if data else None,
            "height": 12 if data else None,
            "original_width": 14 if data else None,
            "original_height": 12 if data else None,
            "exif": "{}" if data else None,
            "sha256": "ab" if data else None,
        }
        rows.append(about | ({"jpg": data} if form == "parquet" else {}))
        if data:
            name = about["key"]
            members[f"{name}.jpg"] = data
            members[f"{name}.txt"] = about["caption"].encode()
            members[f"{name}.json"] = js(**about)
    if form == "tar":
        write_tar(folder / f"{shard:05d}.tar", members)
    pq.write_table(pa.Table.from_pylist(rows), folder / f"{shard:05d}.parquet")
    stats = {
        "count": each,
        "successes": status["success"],
        "failed_to_download": each // 4,
        "failed_to_resize": each // 4,
        "duration": 1.5,
        "start_time": 1.0,
        "end_time": 2.5,
        "status_dict": status,
    }
    (folder / f"{shard:05d}_stats.json").write_text(json.dumps(stats, indent=4))


def write_shards(folder: Path, form: str) -> Path:
    folder.mkdir()
    for shard in range(3):
        write_shard(folder, shard, form)
    return folder


def counts(store) -> dict:
    return json.loads((store.path / "confidential/curation/counts.json").read_text())


def test_its_tars_are_taken_in_place_and_its_counts_summed(tmp_path):
    source = write_shards(tmp_path / "src", "tar")
    store = curate(source, tmp_path / "store", STEPS, workers=1)
    assert store.num_records == 3 * 6
    assert store.shard_paths == [source / f"{shard:05d}.tar" for shard in range(3)]
    assert store.record(0).captions == ("caption of shard 0 0",)
    assert counts(store)["downloads"] == {
        "count": 36,
        "successes": 18,
        "failed_to_download": 9,
        "failed_to_resize": 9,
        "reasons": {
            "cannot decode": 9,
            "HTTP Error 403": 3,
            "HTTP Error 401": 3,
            "HTTP Error 402": 3,
        },
    }
    plain = import_source(source, tmp_path / "plain", workers=1)
    assert plain.num_records == 18, "the import takes the folder too"


def test_failed_rows_of_its_parquet_form_are_counted_by_reason(tmp_path):
    source = write_shards(tmp_path / "src", "parquet")
    store = curate(source, tmp_path / "store", STEPS, workers=1)
    assert store.num_records == 18
    assert store.record(0).captions == ("caption of shard 0 0",)
    summary = store.import_summary()
    assert summary["left_out"] == {"failed to download": 9, "failed to resize": 9}
    assert counts(store)["downloads"]["failed_to_download"] == 9
    assert counts(store)["size"]["came"] == 18


def test_its_folder_at_a_url_is_that_on_the_disk(tmp_path):
    source = write_shards(tmp_path / "src", "tar")
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.put(str(source), "/scraped", recursive=True)
    near = curate(source, tmp_path / "near", STEPS, workers=1)
    far = curate("memory://scraped", tmp_path / "far", STEPS, workers=1)
    system.store.clear()
    assert [far.record(row) for row in range(far.num_records)] == [
        near.record(row) for row in range(near.num_records)
    ]
    assert counts(far)["downloads"] == counts(near)["downloads"]


@pytest.mark.parametrize("kind", [".tar", ".parquet", "_stats.json"])
def test_a_shard_that_it_has_not_finished_is_refused(tmp_path, kind):
    source = write_shards(tmp_path / "src", "tar")
    (source / f"00001{kind}").unlink()
    with pytest.raises(DataError, match=rf"without 00001{kind}.*Run it again"):
        open_source(source)


def test_tars_beside_other_parquet_files_are_refused_as_before(tmp_path):
    source = write_shards(tmp_path / "src", "tar")
    for path in source.glob("*_stats.json"):
        path.unlink()
    with pytest.raises(DataError, match="tars and parquet files; expected one kind"):
        open_source(source)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"count": 1}', '{"count": "a"}', '{"count": -1}', "[" * 100_000]
)
def test_damaged_counts_are_refused_before_any_file_is_read(tmp_path, text):
    source = write_shards(tmp_path / "src", "tar")
    (source / "00001_stats.json").write_text(text)
    with pytest.raises(DataError, match=r"00001_stats\.json: damaged"):
        curate(source, tmp_path / "store", STEPS, workers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_many_wordings_of_one_failure_are_summed(tmp_path):
    stats = {"count": 3000, "successes": 0, "failed_to_download": 3000, "failed_to_resize": 0}
    reasons = {f"<error {n}>": 1 for n in range(2000)} | {"HTTP Error 404": 1000}
    (tmp_path / "0_stats.json").write_text(json.dumps(stats | {"status_dict": reasons}))
    found = downloads([str(tmp_path / "0.tar"), str(tmp_path / "1.tar")])
    assert found["reasons"]["HTTP Error 404"] == 1000 and len(found["reasons"]) == 1001
    assert sum(found["reasons"].values()) == 3000
    assert found["shards_without_counts"] == 1
    assert downloads([str(tmp_path / "other.tar")]) is None


def test_the_command_prints_what_came_and_what_failed(tmp_path, capsys):
    source = write_shards(tmp_path / "src", "tar")
    words = ["data", "curate", str(source), str(tmp_path / "store"), "--steps", "size,caption"]
    assert main([*words, "--size.min-side-px", "10"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "36 addresses tried; 18 came; failed: 9 to download, 9 to resize" in said
    assert "(most often: 9 cannot decode, 3 HTTP Error" in said
