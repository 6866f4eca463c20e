"""Mistakes with what is read and what follows from it: planted, and caught. The ids are those of
docs/pitfalls.md, section "Data".
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpvision.data import import_merge, import_part, merge, person_names
from dpvision.data.import_labels import ImportedLabels, LabelRule
from dpvision.data.import_people import WithoutPerson
from dpvision.data.importer import import_samples, import_source
from dpvision.data.merge import merge_stores
from dpvision.data.overlap import write_without
from dpvision.data.person_names import PersonRule
from dpvision.data.rows import keyed_hash
from dpvision.data.sources import Sample
from dpvision.data.store import Store
from dpvision.data.synthetic_store import write_scenes
from dpvision.errors import DataError
from dpvision.eval.probes.knn import KNN
from dpvision.eval.probes.suite import evaluate
from dpvision.train import same, start
from dpvision.train.distributed import Group

from .conftest import NewRun
from .planting import assert_refused, planted
from .ranks import Ranks

pytestmark = pytest.mark.usefixtures("gates_once")


def test_ranks_read_other_records(new_run: NewRun) -> None:
    def check() -> None:
        with new_run() as first, new_run() as second:
            second.rows = second.rows[
                ::-1
            ].copy()  # as a copy of the store in another order has them

            def work(group: Group) -> None:
                session = (first, second)[group.rank]
                session.group = group
                start._check_same(session)

            assert_refused(lambda: Ranks(2).run(work), "another order of the records")

    check()
    with planted(
        same,
        "_digest_of_records",
        lambda store, rows: str(len(rows)),
        "another order of the records was accepted",
    ):
        check()


def test_classes_from_private_names(tmp_path: Path, scenes: Store) -> None:
    def samples(extra: bool) -> Iterator[Sample]:
        for i, name in enumerate(["oak", "birch", "oak", "ash"][: 3 + extra]):
            yield Sample(str(i), scenes.read(i), {"label": name})

    def numbers(extra: bool, rule: LabelRule) -> list[int]:
        store = import_samples(
            samples(extra), tmp_path / f"s{len(list(tmp_path.iterdir()))}", labels=rule
        )
        return store.labels.tolist()[:3]

    def check() -> None:
        rule = LabelRule(classes=("birch", "oak"), unknown_classes="unlabelled")
        assert numbers(False, rule) == numbers(True, rule), "one more record renumbers the others"
        try:
            one, two = numbers(False, LabelRule()), numbers(True, LabelRule())
        except DataError:
            return
        assert one == two, "one more record renumbers the others"

    def as_public(*args, private, **options):
        return ImportedLabels(*args, private=False, **options)

    check()
    with planted(import_part, "ImportedLabels", as_public, "one more record renumbers the others"):
        check()


def test_person_lost_in_a_join(tmp_path: Path) -> None:
    def check() -> None:
        folder = tmp_path / f"images{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for i, pixels in enumerate(np.arange(3 * 192, dtype=np.uint8).reshape(3, 8, 8, 3)):
            Image.fromarray(pixels).save(folder / f"{i}.png")
        (folder / "metadata.csv").write_text(
            "file_name,patient\n0.png,p1\n01.png,p1\n2.png,p2\n"
        )  # 1.png is of p1 too
        try:
            store = import_source(
                folder, tmp_path / f"store-{folder.name}", people=PersonRule("patient")
            )
        except DataError:
            return
        units = store.index["unit"]
        assert units[0] == units[1], "a patient is two persons"

    check()
    with planted(WithoutPerson, "refuse", lambda self, field: None, "a patient is two persons"):
        check()


def test_person_of_two_merged_stores(tmp_path: Path) -> None:
    for k, name in enumerate("ab"):
        image = Image.effect_noise((8, 8), 50 + k).convert("RGB")
        (tmp_path / f"of {name}" / "ann").mkdir(parents=True)
        image.save(tmp_path / f"of {name}" / "ann" / "1.png")
        import_source(tmp_path / f"of {name}", tmp_path / name, people=PersonRule("parent"))

    def check() -> None:
        assert_refused(
            lambda: merge_stores([tmp_path / "a", tmp_path / "b"], tmp_path / "c", workers=1),
            "a person of two stores",
        )

    check()
    with planted(merge, "_check_kind", lambda store: None, "a person of two stores was accepted"):
        check()


def test_person_spelled_twice(tmp_path: Path, scenes: Store) -> None:
    def check() -> None:
        people = ["7", "7.0", "007", "p\u00a01", "p 1"]
        samples = [
            Sample(str(i), scenes.read(i), {"patient": person}) for i, person in enumerate(people)
        ]
        try:
            store = import_samples(
                samples,
                tmp_path / f"s{len(list(tmp_path.iterdir()))}",
                people=PersonRule("patient"),
            )
        except DataError:
            return
        assert len(np.unique(store.index["unit"])) == 2, (
            "a person spelled in two ways is two persons"
        )

    check()
    with planted(import_merge, "refuse_alike", lambda field, names: None, "is two persons"):
        check()


def test_two_persons_one_spelling() -> None:
    def check() -> None:
        names = {person_names.person_name(name, "patient", "") for name in ("1", "1.000")}
        assert len(names) == 2, "two persons are one"

    check()
    with planted(person_names, "_WHOLE", re.compile(r"([+-]?\d+)\.0+"), "two persons are one"):
        check()


def test_image_of_two_persons(tmp_path: Path, scenes: Store) -> None:
    def check() -> None:
        people = ["p1", "p2", "p2"]
        samples = [
            Sample(str(i), scenes.read(i // 2), {"patient": person})
            for i, person in enumerate(people)
        ]
        try:
            store = import_samples(
                samples,
                tmp_path / f"s{len(list(tmp_path.iterdir()))}",
                people=PersonRule("patient"),
            )
        except DataError:
            return
        assert store.num_records == len(samples), (
            "without p1, the image is p2's: removing one person changes another"
        )

    check()
    with planted(
        import_merge,
        "refuse_shared",
        lambda field, found: None,
        "removing one person changes another",
    ):
        check()


def test_ids_under_a_published_key(tmp_path: Path) -> None:
    def check() -> None:
        store = write_scenes(tmp_path / f"s{len(list(tmp_path.iterdir()))}", 4, 16, public=False)
        published = [store.store_id.encode(), bytes.fromhex(store.store_id), b""]
        found = {keyed_hash(key, store.read(row)) for key in published for row in range(4)}
        assert not found & set(store.index["id"].tolist()), (
            "whoever has an image can test whether it is there"
        )

    check()
    with planted(
        import_part,
        "keyed_hash",
        lambda key, data: keyed_hash(b"", data),
        "whoever has an image can test",
    ):
        check()


def test_twins_counted_by_a_score(tmp_path: Path) -> None:
    public, private = (
        write_scenes(tmp_path / "public", 40, 16),
        write_scenes(tmp_path / "mine", 8, 16, public=False),
    )
    clean = write_without(public, tmp_path / "clean", np.arange(8), private, ["identical bytes"])
    train = write_scenes(tmp_path / "train", 40, 16, first=1000)

    def check() -> None:
        for score in evaluate("pixels", train, clean, protocols=(KNN(),), against=(), cache=False):
            assert score.visibility == "private" or score.n == public.num_records, (
                "a public score tells how many twins there are"
            )

    check()
    with planted(
        Store,
        "results_visibility",
        property(lambda store: store.visibility),
        "tells how many twins",
    ):
        check()
