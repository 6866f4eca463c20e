"""One function says whom an epsilon is for: headline, sentences, cards and rows of a report
agree.
"""

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpvision.config.unit import Stated
from dpvision.privacy.plan import make_plan
from dpvision.privacy.printed import up
from dpvision.report.page import make_report
from dpvision.runs.spent import guarantee_words, spent

from ..statement.runs import PRIVACY, make_run, make_store

PEOPLE: dict[str, dict[str, Any]] = {
    "images": {},
    "one image of each": {"num_units": 50_000},
    "three images of each": {"num_units": 20_000, "max_records_per_unit": 3},
    "people drawn, one image": {
        "num_units": 20_000,
        "sampling_unit": "person",
        "expected_batch_size": 20_000,
    },
    "people drawn": {
        "num_units": 20_000,
        "max_records_per_unit": 3,
        "sampling_unit": "person",
        "expected_batch_size": 20_000,
    },
}


def test_whom_the_figures_are_for() -> None:
    assert Stated.of("record", 1.0, None) == Stated(False, 1.0, None)
    assert Stated.of("record", 1.0, 3.0) == Stated(True, 3.0, 1.0)
    assert Stated.of("record", 1.0, 1.0) == Stated(True, 1.0, None)
    assert (
        Stated.of("person", 1.0, 1.0) == Stated.of("person", 1.0, None) == Stated(True, 1.0, None)
    )


@pytest.mark.parametrize("parent", [False, True], ids=["", "after an earlier run"])
@pytest.mark.parametrize("kind", PEOPLE)
def test_a_report_says_one_thing(kind: str, parent: bool, tmp_path: Path) -> None:
    privacy = replace(PRIVACY, noise_multiplier=60.0, **PEOPLE[kind])
    plan = make_plan(privacy)
    store, parents = tmp_path / "store", ()
    make_store(store)
    if parent:
        make_run(tmp_path / "first", store, privacy=privacy, run_id="0123456789abcdef")
        manifest = json.loads(
            next((tmp_path / "first").glob("checkpoints/*/manifest.json")).read_text()
        )
        parents = tuple(manifest["lineage"])
    run = make_run(tmp_path / "run", store, privacy=privacy, parents=parents)
    page = re.sub(
        r"\s+",
        " ",
        html.unescape(
            re.sub(r"<[^>]*>", "", make_report(run).read_text().partition("</header>")[2])
        ),
    )
    statement = json.loads((run / "statement.json").read_text())
    guarantee, words = statement["guarantee"], json.dumps(statement, ensure_ascii=False)
    of_person, beside = kind != "images", kind == "three images of each"
    stated = guarantee["unit_epsilon"] if of_person else guarantee["epsilon"]

    whom = "each person, with all their images" if of_person else "each single image"
    assert (
        statement["headline"].startswith(
            f"Differential privacy with epsilon {up(stated, 2)} and delta"
        )
        and whom in statement["headline"]
    )
    assert f"ε {up(stated, 2)} δ" in page, "the card"
    assert ("For a person with all their images: ε = " + up(stated, 4) in page) == of_person, (
        "the row"
    )
    single = re.findall(
        r"(?:[Ff]or a|of a) single image[^.;]{0,40}?(?:ε =?|epsilon(?: is)?) ?([\d.]*\d)", page
    )
    assert bool(single) == beside, single
    true = guarantee["epsilon"], guarantee["this_run"]["epsilon"]
    assert all(
        any(float(number) in (float(up(x, 2)), float(up(x, 4))) for x in true) for number in single
    ), single
    none = "There is none for a single image"
    assert (none in page) == (none in words) == kind.startswith("people drawn")
    if none in page:
        assert not re.search(
            r"[Ff]or a single image(?! of a person: without)", page.replace(none, "")
        ), "a claim that the row takes back"
    for text in [entry["text"] for entry in statement["history"]["lineage"]]:
        assert (" for a person at delta" in text) == of_person

    _, said = spent(plan, plan.steps)
    assert ("for a single image" in said) == beside and ("for a person" in said) == of_person


def test_every_run_on_the_store_says_whom_its_epsilon_is_for(tmp_path: Path) -> None:
    store, privacy = tmp_path / "store", replace(PRIVACY, noise_multiplier=60.0)
    make_store(store)
    kinds = ("people drawn", "three images of each", "images")
    for name, kind in zip("abc", kinds, strict=True):
        asked = replace(privacy, **PEOPLE[kind])
        run = make_run(tmp_path / name, store, privacy=asked, run_id=name * 16)
    page = re.sub(r"\s+", " ", html.unescape(make_report(run).read_text()))
    stated = {
        one["run_id"][0]: one
        for one in json.loads((run / "statement.json").read_text())["history"]["other_runs"]["runs"]
    }
    assert stated["a"]["unit_epsilon"] == stated["a"]["epsilon"]
    assert stated["b"]["unit_epsilon"] > stated["b"]["epsilon"]
    for name in "ab":
        said = f"{name * 8} (another run): ε {up(stated[name]['unit_epsilon'], 2)} for a person;"
        assert said in page
    said = f"{'c' * 8} (this run): ε {up(stated['c']['epsilon'], 2)} for a single image."
    assert said in page and stated["c"]["unit_epsilon"] is None


def test_a_total_without_accounting_for_people_is_an_images() -> None:
    plan = make_plan(replace(PRIVACY, num_units=50_000))
    assert "for a single image, unknown for a person" in guarantee_words(plan, 2.0, None, 1e-5)
