"""Private training, then training on public images without a guarantee: post-processing keeps what
held, and nothing else does.

The statement of such a run said that it guarantees nothing; a reader could not tell it from one
that saw private images unprotected.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpvision.checkpoint import find_checkpoint, read_manifest
from dpvision.cli.train import plan_text
from dpvision.config import PrivacyConfig, RunConfig
from dpvision.errors import PrivacyError
from dpvision.privacy.ledger import store_account
from dpvision.privacy.plan import make_plan
from dpvision.privacy.printed import up
from dpvision.report.page import make_report
from dpvision.statement.guarantee import NOTHING
from dpvision.statement.history_phrases import IN_BOTH, kept
from dpvision.statement.schema import problems, statement_schema
from dpvision.statement.statement import make_statement, write_statement
from dpvision.statement.verify import verify_statement

from .runs import PRIVACY, make_run, make_store

SMALL = replace(PRIVACY, steps=4, noise_multiplier=3.0)
NONE = replace(SMALL, guarantee="none", noise_multiplier=None, max_grad_norm=None)
PEOPLE = replace(SMALL, num_units=25_000, max_records_per_unit=2)
CLAIM = re.compile(
    r"epsilon ([\d.]+) and delta (\S+) for each "
    r"(single image|person, with all their images),? of private store (\w+)"
)


def lineage_of(run: Path) -> tuple[dict[str, Any], ...]:
    return tuple(read_manifest(find_checkpoint(run))["lineage"])


def public_child(folder: Path, *parents: Path, privacy: PrivacyConfig = NONE) -> Path:
    """A run without a guarantee on a public store, from weights that saw the parents' stores."""
    make_store(folder / "public", "public")
    lineage = tuple(entry for parent in parents for entry in lineage_of(parent))
    return make_run(
        folder / "child",
        folder / "public",
        privacy=privacy,
        charged=2,
        run_id="child",
        parents=lineage,
    )


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    make_store(tmp_path / "private")
    return make_run(
        tmp_path / "parent", tmp_path / "private", privacy=SMALL, charged=4, run_id="parent"
    )


@pytest.mark.parametrize("guarantee", ["none", "simulated"])
def test_the_headline_is_the_parents_epsilon_in_statement_page_verify_and_ledger(
    tmp_path: Path, parent: Path, guarantee: str
) -> None:
    privacy = NONE if guarantee == "none" else replace(SMALL, guarantee="simulated")
    child = public_child(tmp_path, parent, privacy=privacy)
    made = make_statement(child, tuning="none")
    [(epsilon, delta, whom, store)] = CLAIM.findall(made["headline"])
    theirs = make_statement(parent, tuning="none")["guarantee"]
    assert epsilon == up(theirs["epsilon"], 2) == up(store_account(tmp_path / "private").epsilon, 2)
    assert (
        float(delta.rstrip(",")) == theirs["delta"]
        and whom == "single image"
        and lineage_of(parent)[0]["store_id"].startswith(store)
    )
    assert (made["guaranteed"], made["guarantee"]) == (False, None), (
        "of its own images it promises nothing"
    )
    assert made["other_stores"][0]["epsilon"] == theirs["epsilon"]
    assert IN_BOTH in made["scope"]["not_covered"] and "Everything" not in " ".join(
        made["scope"]["not_covered"]
    )
    assert problems(json.loads(json.dumps(made, allow_nan=False)), statement_schema()) == []
    page = make_report(child, tuning="none").read_text()
    assert f"<h1>{made['headline']}</h1>" in page
    checks = verify_statement(child / "statement.json", child, tmp_path / "public")
    assert [check for check in checks if check.status == "failed"] == []
    assert {"figures", "sentences"} <= {check.name for check in checks if check.status == "ok"}
    shown = plan_text(
        RunConfig("vip.micro", NONE),
        make_plan(privacy),
        SimpleNamespace(store_id="p", visibility="public"),
        lineage_of(parent),
    )
    assert f"kept from earlier runs: with epsilon {epsilon}" in shown.splitlines()[0]


def test_a_smaller_epsilon_or_another_store_in_the_headline_is_found(
    tmp_path: Path, parent: Path
) -> None:
    child = public_child(tmp_path, parent)
    statement = json.loads(write_statement(child).read_text())
    [(epsilon, _, _, store)] = CLAIM.findall(statement["headline"])
    for old, new in (
        (f"epsilon {epsilon}", "epsilon 0.01"),
        (store, "another"),
        ("single image", "person, with all their images"),
    ):
        (tmp_path / "altered.json").write_text(
            json.dumps(statement | {"headline": statement["headline"].replace(old, new)})
        )
        assert "figures" in {
            check.name
            for check in verify_statement(tmp_path / "altered.json")
            if check.status == "failed"
        }
    (tmp_path / "altered.json").write_text(json.dumps(statement | {"headline": NOTHING}))
    assert "failed" in {check.status for check in verify_statement(tmp_path / "altered.json")}
    # An older version claimed less: that is no mistake.
    (tmp_path / "older.json").write_text(
        json.dumps(statement | {"headline": NOTHING, "phrases": "0" * 16})
    )
    assert "failed" not in {check.status for check in verify_statement(tmp_path / "older.json")}


@pytest.mark.parametrize("same_store", [True, False])
@pytest.mark.parametrize("guarantee", ["none", "simulated"])
def test_a_run_without_privacy_on_private_images_inherits_nothing(
    tmp_path: Path, parent: Path, same_store: bool, guarantee: str
) -> None:
    store = tmp_path / "private" if same_store else tmp_path / "other"
    if not same_store:
        make_store(store)
    privacy = NONE if guarantee == "none" else replace(SMALL, guarantee="simulated")
    child = make_run(
        tmp_path / "child",
        store,
        privacy=privacy,
        charged=2,
        run_id="child",
        parents=lineage_of(parent),
    )
    with pytest.raises(PrivacyError, match="Do not release it"):
        make_statement(child)
    shown = plan_text(
        RunConfig("vip.micro", NONE),
        make_plan(privacy),
        SimpleNamespace(store_id="p", visibility="private"),
        lineage_of(parent),
    )
    assert "kept" not in shown
    base = child / "confidential"
    # and so do public runs that follow
    make_store(tmp_path / "public", "public")
    lineage = tuple(read_manifest(find_checkpoint(base))["lineage"])
    later = make_run(
        tmp_path / "later",
        tmp_path / "public",
        privacy=NONE,
        charged=2,
        run_id="later",
        parents=lineage,
    )
    with pytest.raises(PrivacyError, match="Do not release it"):
        make_statement(later)


def test_a_parent_that_was_charged_no_step_gives_no_guarantee(tmp_path: Path, parent: Path) -> None:
    make_store(tmp_path / "public", "public")
    [entry] = lineage_of(parent)
    unused = entry | {"guarantee": entry["guarantee"] | {"steps": 0}}
    made = make_statement(
        make_run(
            tmp_path / "child", tmp_path / "public", privacy=NONE, charged=2, parents=(unused,)
        )
    )
    assert made["headline"] == NOTHING and made["other_stores"] == []


def test_persons_and_several_stores_have_their_own_epsilons(tmp_path: Path, parent: Path) -> None:
    make_store(tmp_path / "people")
    people = make_run(
        tmp_path / "of-people", tmp_path / "people", privacy=PEOPLE, charged=4, run_id="people"
    )
    made = make_statement(public_child(tmp_path, parent, people), tuning="none")
    (image, _, _, first), (person, _, whom, second) = CLAIM.findall(made["headline"])
    assert whom == "person, with all their images" and first != second
    assert image == up(make_plan(SMALL).epsilon, 2) and person == up(
        make_plan(PEOPLE).unit_epsilon, 2
    )
    assert float(person) > float(image), "two images of a person cost more than one"


def test_a_parent_that_ended_early_is_stated_by_its_plan_and_its_end_is_not_covered(
    tmp_path: Path,
) -> None:
    make_store(tmp_path / "private")
    parent = make_run(
        tmp_path / "parent", tmp_path / "private", privacy=SMALL, charged=1, run_id="parent"
    )
    made = make_statement(public_child(tmp_path, parent))
    assert CLAIM.findall(made["headline"])[0][0] == up(make_plan(SMALL).epsilon, 2)
    assert any("ended before its plan" in text for text in made["scope"]["not_covered"])


def test_public_images_cleared_of_private_twins_are_listed(tmp_path: Path, parent: Path) -> None:
    make_store(tmp_path / "public", "public")
    cleared = {
        "store_id": "ab" * 8,
        "visibility": "public",
        "run_id": "p",
        "licence": "CC0",
        "guarantee": None,
        "deduplicated": {"against": ["cd" * 16], "methods": ["identical bytes"]},
    }
    parents = (*lineage_of(parent), cleared)
    made = make_statement(
        make_run(tmp_path / "child", tmp_path / "public", privacy=NONE, charged=2, parents=parents)
    )
    assert CLAIM.search(made["headline"]) and any(
        "public twin" in text for text in made["scope"]["not_covered"]
    )


def test_a_private_run_on_weights_of_another_private_store_names_both(
    tmp_path: Path, parent: Path
) -> None:
    """Its headline had its own epsilon alone, for persons, where the parent's images have none."""
    store = make_store(tmp_path / "people")
    run = make_run(
        tmp_path / "child",
        tmp_path / "people",
        privacy=PEOPLE,
        charged=4,
        run_id="child",
        parents=lineage_of(parent),
    )
    made = make_statement(run, tuning="none")
    theirs = make_statement(parent, tuning="none")
    assert theirs["headline"].removeprefix("Differential privacy ")[:-1] in made["headline"]
    assert "for each person, with all their images, of this run's private store" in made["headline"]
    (several,) = (text for text in theirs["scope"]["not_covered"] if "did not record" in text)
    assert several in made["scope"]["not_covered"]
    assert (
        "one person more than the other, with all their images, at most 2"
        in (made["scope"]["adjacency"])
    )
    checks = verify_statement(write_statement(run, tuning="none"), run, tmp_path / "people")
    assert [check for check in checks if check.status == "failed"] == []
    shown = plan_text(
        RunConfig("vip.micro", PEOPLE),
        make_plan(PEOPLE),
        SimpleNamespace(store_id=store, visibility="private"),
        lineage_of(parent),
    )
    assert f"The weights that it starts from: {kept(made['other_stores'])}" in shown
