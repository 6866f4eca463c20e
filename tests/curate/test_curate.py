"""Curation: the store of a plain loop over the samples, and the same after a kill."""

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dpvision.curate.exact_duplicates import ExactDuplicates
from dpvision.curate.look import marked
from dpvision.curate.near_duplicates import NearDuplicates, PublicDuplicates
from dpvision.curate.passes import curate
from dpvision.curate.pipeline import Pipeline, Settings
from dpvision.curate.record import about, with_captions
from dpvision.curate.semantic_duplicates import SemanticDuplicates
from dpvision.curate.size import Size
from dpvision.curate.text import Caption
from dpvision.data import import_work
from dpvision.data.decode import BadImage, decode
from dpvision.data.import_labels import LabelRule
from dpvision.data.importer import import_samples
from dpvision.data.merge import merge_stores
from dpvision.data.open import open_store
from dpvision.data.person_names import PersonRule
from dpvision.data.sample import Sample
from dpvision.data.sources import open_source
from dpvision.data.split import split_store
from dpvision.errors import ConfigError, DataError

from ..data.image_files import encode, js, noise, png, write_folder, write_tar
from .doubles import DOUBLES, KEY, SETTINGS, Dim, SameMean, content, records, write_tars


@pytest.fixture(autouse=True)
def one_key(monkeypatch):
    """The same key and id for all stores of a test, and a process wherever one may be started."""
    monkeypatch.setattr("dpvision.data.store_writer.secrets.token_bytes", lambda n: KEY)
    monkeypatch.setattr("dpvision.data.importer.secrets.token_hex", lambda n: "ab" * n)
    monkeypatch.setattr(import_work, "_WORTH_PROCESSES_BYTES", 0)


def plain_loop(source: Path, pipeline: Pipeline) -> list:
    """What the steps leave, by a plain loop in memory."""
    made, seen = [], set()
    for sample in open_source(source).samples:
        try:
            pixels = decode(sample.image)
        except BadImage:
            pixels = None
        for step in pipeline.steps:
            if isinstance(step, Caption):
                found = [t for t in dict.fromkeys(sample.fields["captions"]) if t]
                kept = [t for t in found if len(t.split()) >= 2]
                if not kept:
                    break
                sample = with_captions(sample, kept) if kept != found else sample
            elif pixels is None:
                made.append(sample)  # the import counts it
                break
            elif isinstance(step, Size):
                short, long = sorted(pixels.shape[:2])
                if short < 10 or long > 2 * short:
                    break
            elif isinstance(step, Dim) and pixels.mean() > 127:
                pixels = pixels // 2
                made_anew = marked(encode(pixels), KEY, sample.image)
                sample = sample._replace(image=made_anew, place=None)
            elif isinstance(step, SameMean):
                if pixels.mean() // 1 in seen:
                    break
                seen.add(pixels.mean() // 1)
        else:
            made.append(sample)
    return made


@pytest.mark.parametrize(
    ("pipeline", "workers"),
    [(Pipeline.of(["caption", "size"], SETTINGS), 3), (DOUBLES, 1)],
    ids=["processes", "all kinds of steps"],
)
def test_the_store_is_that_of_a_plain_loop_over_the_samples(tmp_path, pipeline, workers):
    source = write_tars(tmp_path / "src")
    left = plain_loop(source, pipeline)
    if pipeline is DOUBLES:  # one stream has no images in tars beside copied ones
        left = [sample._replace(place=None) for sample in left]
    oracle = import_samples(left, tmp_path / "one")
    made = curate(source, tmp_path / "many", pipeline, workers=workers)
    assert 10 < made.num_records < 100
    if pipeline is DOUBLES:
        assert [made.record(row) for row in range(made.num_records)] == [
            oracle.record(row) for row in range(oracle.num_records)
        ]
        assert made.import_summary() == oracle.import_summary()
    else:
        assert content(made.path) == content(oracle.path)
    assert [path.name for path in tmp_path.glob(".*")] == []
    found = made.path / "confidential" / "curation"
    lines = [json.loads(line) for line in (found / "left_out.jsonl").read_text().splitlines()]
    every = {sample.key for sample in open_source(source).samples}
    assert {line["key"] for line in lines} == every - {sample.key for sample in left}
    counts = json.loads((found / "counts.json").read_text())
    by_step = {s.name: sum(line["step"] == s.name for line in lines) for s in pipeline.steps}
    assert by_step == {
        step.name: sum(counts[step.name]["left_out"].values()) for step in pipeline.steps
    }
    assert counts["seen"] == len(every) and counts["size"]["came"] <= counts["seen"]
    sheets = {path.stem for path in found.glob("*.png")}
    assert sheets == {s.name for s in pipeline.steps if by_step[s.name] or s.name == "dim"}


def test_images_that_no_step_changed_stay_in_the_source_tars(tmp_path):
    bright, dark = encode(noise(1) // 2 + 128), encode(noise(2) // 4)
    source = write_tar(
        tmp_path / "a.tar",
        {"x.png": bright, "x.txt": b"two words", "y.png": dark, "y.txt": b"two words"},
    )
    store = curate(source, tmp_path / "store", Pipeline((Dim(),)))
    changed, same = (store.index["shard"][row] for row in range(2))
    assert store.shard_paths[same] == source
    assert store.shard_paths[changed] == store.path / "shards" / "shard-000000.tar"
    assert store.record(1).image == dark and store.record(0).image != bright


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_files_that_a_step_makes_equal_stay_two_records(tmp_path, kind):
    """Merged, the second would change the record of the first: its captions, or its name."""
    bright = noise(1) // 2 + 128
    files = [encode(bright), encode(bright, compress_level=0), encode(bright, "BMP")]
    assert len(set(files)) == 3

    @dataclass(frozen=True)
    class Rewrite(Dim):
        def _apply(self, records):
            for record in records:
                record.change_image(encode(np.zeros_like(record.pixels()), kind))

    def curated(name: str, chosen: list[int]) -> list:
        members = {}
        for i in chosen:
            members |= {f"{i}.png": files[i], f"{i}.txt": f"caption {i}".encode()}
        source = write_tar(tmp_path / f"{name}.tar", members)
        store = curate(source, tmp_path / name, Pipeline((Rewrite(),)))
        for row in range(store.num_records):
            assert not decode(store.record(row).image).any()
        return [store.record(row) for row in range(store.num_records)]

    three, two = curated("three", [0, 1, 2]), curated("two", [0, 2])
    assert [record.captions for record in three] == [(f"caption {i}",) for i in range(3)]
    assert two == [three[0], three[2]]


def test_a_folder_is_curated_like_its_import(tmp_path):
    files = {f"{'ab'[i % 2]}/{i}.png": data for i, (data, _) in enumerate(records(5, 40))}
    source = write_folder(tmp_path / "src", files)
    pipeline = Pipeline((SETTINGS.size,))
    made = curate(source, tmp_path / "store", pipeline, workers=2, public=True)
    whole = [sample for sample in open_source(source).samples if len(sample.image) > 0]
    sizes = {}
    for sample in whole:
        try:
            sizes[sample.key] = sorted(decode(sample.image).shape[:2])
        except BadImage:
            sizes[sample.key] = None
    left = [
        s for s in whole if sizes[s.key] is None or 10 <= sizes[s.key][0] >= sizes[s.key][1] / 2
    ]
    oracle = import_samples(left, tmp_path / "one", public=True)
    keys = [made.record(row).key for row in range(made.num_records)]
    assert keys == [oracle.record(row).key for row in range(oracle.num_records)]
    assert made.label_names == oracle.label_names == ["a", "b"]


def start(source: Path, store: Path) -> int:
    pid = os.fork()
    if not pid:
        try:
            curate(source, store, DOUBLES, workers=1)
        finally:
            os._exit(1)
    return pid


@pytest.mark.parametrize("passes", ["look", "compared", "read"])
def test_a_killed_curation_goes_on_and_changes_no_byte(tmp_path, passes):
    source = write_tars(tmp_path / "src", 6, 60)
    oracle = content(curate(source, tmp_path / "one", DOUBLES, workers=1).path)
    store, work = tmp_path / "store", tmp_path / ".store.importing" / "confidential"
    pid, end = start(source, store), time.monotonic() + 300
    pattern = "compared-0/kept.json" if passes == "compared" else f"{passes}-*/part.json"
    while not list(work.glob(pattern)) and time.monotonic() < end:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it ended before it was stopped"
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not store.exists()
    kept = {path: path.stat().st_mtime_ns for path in work.glob("*/part.json")}
    assert kept
    again = curate(source, store, DOUBLES, workers=1)
    assert content(again.path) == oracle
    assert not work.exists()


def test_other_steps_read_again_and_the_same_do_not(tmp_path, monkeypatch):
    source, done, real = write_tars(tmp_path / "src", 2), [], import_work._do
    monkeypatch.setattr(import_work, "_do", lambda job: done.append(job.kind) or real(job))

    def stop(*_):
        raise DataError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr("dpvision.curate.passes.compare", stop)
        for pipeline in (DOUBLES, DOUBLES, Pipeline((SETTINGS.size,))):
            with pytest.raises(DataError, match=r"stopped.*2 files is kept"):
                curate(source, tmp_path / "store", pipeline, workers=1)
    assert done == ["look"] * 4, "the second found both files looked at, the third none"


def test_a_file_that_changes_between_the_passes_is_refused(tmp_path, monkeypatch):
    source = write_tars(tmp_path / "src", 2)

    def change(*args):
        write_tar(source / "s1.tar", {"new.png": png(1), "new.txt": b"two words"})
        return real(*args)

    from dpvision.curate import passes as module

    real = module.compare
    monkeypatch.setattr(module, "compare", change)
    with pytest.raises(DataError, match="changed while it was read"):
        curate(source, tmp_path / "store", DOUBLES, workers=1)
    assert not (tmp_path / "store").exists()
    monkeypatch.setattr(module, "compare", real)
    assert curate(source, tmp_path / "store", DOUBLES, workers=1).num_records == 7


@pytest.mark.parametrize(
    ("steps", "settings", "words"),
    [
        (["siez"], SETTINGS, "steps=siez: no step siez; expected some of size, caption"),
        (["size", "size"], SETTINGS, "twice size"),
        ([], SETTINGS, "no step; expected some"),
        (["size"], SETTINGS, "settings of caption, which is not one of the steps"),
    ],
)
def test_pipelines_that_are_refused(steps, settings, words):
    with pytest.raises(ConfigError, match=words):
        Pipeline.of(steps, settings)


def test_the_bound_of_several_steps():
    def bound(*steps) -> int | None:
        return Pipeline(steps).stability

    exact, equal, near = ExactDuplicates(), NearDuplicates(0), NearDuplicates(6)
    assert bound(SETTINGS.size) == bound() == 1
    assert bound(exact) == bound(equal) == bound(exact, equal) == bound(SETTINGS.size, exact) == 2
    assert bound(exact, SameMean()) == 4 and bound(exact, equal, SameMean()) == 8
    assert bound(exact, near) is None and bound(exact, SemanticDuplicates()) is None


def test_steps_that_compare_images_are_refused_for_persons(tmp_path):
    """Person b's image would be left out because of a's: also without a word of the import's check
    of images of two persons.
    """
    members = {}
    for i, who in enumerate("ab"):
        members |= {f"{i}.png": png(0), f"{i}.json": js(who=who, captions=["two words"])}
    source = write_tar(tmp_path / "a.tar", members)
    for step in (ExactDuplicates(), NearDuplicates(0), SemanticDuplicates()):
        with pytest.raises(ConfigError, match="with persons"):
            curate(source, tmp_path / "s", Pipeline((step,)), people=PersonRule("who"))
    with pytest.raises(DataError, match="of an image of another person"):
        curate(source, tmp_path / "s", Pipeline((SETTINGS.size,)), people=PersonRule("who"))
    assert Pipeline.of(["exact-duplicates"], Settings()).steps == (ExactDuplicates(),)


@pytest.mark.parametrize("field", ["text", "caption", "captions"])
def test_captions_do_not_replace_the_field_of_persons_or_labels(tmp_path, field):
    source = write_tar(tmp_path / "a.tar", {"0.png": png(0), "0.json": js(**{field: "a b"})})
    pipeline = Pipeline((Caption(),))
    for rules in ({"people": PersonRule(field, "own-person")}, {"labels": LabelRule(field)}):
        with pytest.raises(ConfigError, match=f"{field} as the field of persons or labels"):
            curate(source, tmp_path / "s", pipeline, **rules)


def test_halves_of_a_public_store_are_stated_as_different(tmp_path):
    store = import_samples(
        [Sample(f"{i}", png(i), {}) for i in range(8)], tmp_path / "whole", public=True
    )
    halves = split_store(store.path, tmp_path / "a", tmp_path / "b", 0.5, 0)
    said = [about(PublicDuplicates((half.path,))) for half in (store, *halves)]
    assert len({json.dumps(one) for one in said}) == 3 and str(tmp_path) not in str(said)


def test_settings_that_are_refused():
    for wrong in (dict(min_side_px=0), dict(max_aspect=float("nan")), dict(max_aspect=0.5)):
        with pytest.raises(ConfigError, match="size"):
            Size(**wrong)
    for wrong in (dict(min_words=0), dict(min_words=9, max_words=3)):
        with pytest.raises(ConfigError, match="caption"):
            Caption(**wrong)
    with pytest.raises(ConfigError, match=r"languages=\['xx'\]"):
        Caption(languages=("en", "xx")).opened()


def test_captions_of_other_languages_are_left_out(tmp_path):
    texts = {
        "a": "a black dog is running through the water on a beach",
        "b": "ein schwarzer Hund läuft am Strand durch das flache Wasser",
        "c": "un chien noir court dans l'eau peu profonde sur la plage",
    }
    members = {}
    for n, (name, text) in enumerate(texts.items()):
        members |= {f"{name}.png": png(n), f"{name}.txt": text.encode()}
    source = write_tar(tmp_path / "a.tar", members)
    step = Caption(languages=("en", "fr"))
    store = curate(source, tmp_path / "store", Pipeline((step,)))
    assert [store.record(row).key for row in range(store.num_records)] == ["a", "c"]
    (line,) = (store.path / "confidential/curation/left_out.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "key": "b",
        "tar": "a.tar",
        "step": "caption",
        "reason": "no caption: another language",
    }
    found = store.path / "confidential" / "curation"
    (line,) = (found / "captions_dropped.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "key": "b",
        "tar": "a.tar",
        "caption": texts["b"],
        "reason": "another language",
    }
    counts = json.loads((found / "counts.json").read_text())
    assert counts["captions_dropped"] == {"another language": 1}


def test_why_captions_are_dropped_is_counted_also_of_images_that_stay(tmp_path):
    latin = "Ein Hund läuft über die Straße".encode("latin-1")
    captions = ["one", "two words", "IMG_1.jpg", "two words", 3, "..."]
    members = {"a.png": png(1), "a.txt": latin, "b.png": png(2), "b.json": js(captions=captions)}
    source = write_tar(tmp_path / "a.tar", members)
    store = curate(source, tmp_path / "store", Pipeline((Caption(min_words=2),)))
    assert [store.record(row).captions for row in range(store.num_records)] == [("two words",)]
    counts = json.loads((store.path / "confidential/curation/counts.json").read_text())
    assert counts["caption"]["left_out"] == {"no caption: another encoding": 1}
    dropped = {"another encoding": 1, "too short": 3, "no text": 1}
    assert counts["captions_dropped"] == dropped


def test_images_of_more_than_8_bits_are_judged_in_the_declared_range(tmp_path):
    """By the file's own range this one is nearly black."""
    dark = np.full((20, 20), 3000, dtype=np.uint16)
    source = write_folder(tmp_path / "src", {"a.png": encode(dark)})
    kept = curate(source, tmp_path / "one", Pipeline((Dim(),)))
    assert decode(kept.record(0).image).max() == 11
    dimmed = curate(source, tmp_path / "two", Pipeline((Dim(),)), window=(0, 4000))
    value = decode(dimmed.record(0).image).max()
    assert value == 3000 * 255 // 4000 // 2 and dimmed.window == (0, 4000)


def test_when_nothing_is_left_the_error_says_which_step_left_it_out(tmp_path):
    source = write_tar(tmp_path / "a.tar", {f"{i}.png": png(i) for i in range(5)})
    with pytest.raises(DataError, match=r"left out all images: 5 caption \(no caption\)"):
        curate(source, tmp_path / "store", Pipeline((Caption(),)))


def test_what_a_store_says_of_its_curation_has_no_path_and_no_count(tmp_path):
    source = write_tars(tmp_path / "src", 2)
    store = curate(source, tmp_path / "store", DOUBLES, workers=1)
    said = open_store(store.path).meta["curation"]
    assert said == DOUBLES.about() and said["stability"] == 2
    assert [step["name"] for step in said["steps"]] == ["size", "dim", "caption", "same_mean"]
    other = import_samples(open_source(source), tmp_path / "other")
    meta = json.loads((other.path / "store.json").read_text()) | {"store_id": "cd" * 16}
    (other.path / "store.json").write_text(json.dumps(meta))
    with pytest.raises(DataError, match="a curated store, whose steps did not see"):
        merge_stores([store.path, other.path], tmp_path / "c")


def test_pairs_are_named_with_their_files(tmp_path):
    """Of files without a record that stays for the comparison, too, and with keys in two files."""
    source, small = tmp_path / "src", png(0, 4, 4)
    source.mkdir()
    image_of = {}
    for t, numbers in enumerate([(1, 2, 3), (), (2, 4, 2), (), (5, 1, 3)]):
        images = [png(number, 64, 64) for number in numbers] or [small]
        write_tar(
            source / f"{t}.tar",
            {f"{i}é.png": data for i, data in enumerate(images)}
            | {f"{i}é.txt": b"two words" for i in range(len(images))},
        )
        image_of |= {(f"{t}.tar", f"{i}é"): data for i, data in enumerate(images)}
    store = curate(source, tmp_path / "store", Pipeline((Size(), ExactDuplicates())))
    lines = (store.path / "confidential/curation/left_out.jsonl").read_text().splitlines()
    pairs = [
        ((line["tar"], line["key"]), (line["of"]["tar"], line["of"]["key"]))
        for line in map(json.loads, lines)
        if line["step"] == "exact_duplicates"
    ]
    assert [row for row, _ in pairs] == [
        ("2.tar", "0é"),
        ("2.tar", "2é"),
        ("4.tar", "1é"),
        ("4.tar", "2é"),
    ]
    assert all(image_of[row] == image_of[twin] and twin < row for row, twin in pairs)
    assert len(lines) == len(pairs) + 2, "the two small images"
