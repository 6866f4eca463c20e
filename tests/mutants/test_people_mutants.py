"""Mistakes with drawn people: planted, and caught. The ids are those of docs/pitfalls.md, section
"People".
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made import key

from dpvision.adapt.person_rows import PersonImages
from dpvision.adapt.prepare import prepare
from dpvision.config import PrivacyConfig, RunConfig
from dpvision.config.unit import Unit
from dpvision.data.keys import StepKey
from dpvision.data.people import People
from dpvision.data.store import Store
from dpvision.dp.noise import privatize
from dpvision.eval.probes import release_scores as release
from dpvision.privacy import plan as plans
from dpvision.privacy.plan import draft_plan
from dpvision.privacy.sampling import FullBatch, derive_rng
from dpvision.train import loop, start, step
from dpvision.train.loop import Session, fit
from dpvision.train.start import new_session

from ..adapt.heads_of_people import C as HEAD_C
from ..adapt.heads_of_people import moves, people_head_config, without_person
from ..eval.probes.test_release_scores import check_a_person_moves_the_sum_by_one_at_most
from ..train.people_store import NUM_IMAGES, PEOPLE, people_config, people_store, sums, without
from .planting import planted

KEY = key()
C = 0.5


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return people_store(tmp_path_factory.mktemp("data") / "people")


@pytest.fixture(scope="module")
def config(store: Store) -> RunConfig:
    """All people in every batch, without the cost of accounting."""
    base = people_config(store)
    privacy = replace(
        base.privacy,
        guarantee="simulated",
        sampling="full_batch",
        expected_batch_size=PEOPLE,
        max_records_per_unit=3,
        steps=1,
    )
    return replace(base, privacy=privacy)


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    return (tmp_path / str(i) for i in range(99))


def blown_up(session: Session) -> Session:
    with torch.no_grad():
        for parameter in session.model.parameters():
            parameter.mul_(4)
    return session


def check_contract(config: RunConfig, folder: Path) -> None:
    """Each of the people with the most images, in turn, is removed from a step of all people."""
    with new_session(config, folder) as session:
        whole = sums(blown_up(session))[0]
        unit_P, size_P = np.unique(session.store.index["unit"], return_counts=True)
        for unit in unit_P[size_P > 4]:
            kept = session.store.index["unit"][session.people.row_N] != unit
            start_P = np.concatenate([[0], np.cumsum(kept)])[session.people.start_P]
            some = np.diff(start_P) > 0
            fewer = People(
                session.people.id_P[some],
                session.people.row_N[kept],
                np.append(start_P[:-1][some], start_P[-1]),
                session.people.record_id_N[kept],
            )
            moved = float((whole - sums(replace(session, people=fewer))[0]).norm())
            assert moved <= C, "a person moves the sum by more than the clip norm"


def test_images_drawn_in_place_of_people(config: RunConfig, folders: Iterator[Path]) -> None:
    """Each image has its own coin and its own clip, and is accounted for as if it were a person."""

    def each_image(store: Store) -> People:
        ids = store.index["id"].astype(np.int64)
        return People(ids, np.arange(NUM_IMAGES), np.arange(NUM_IMAGES + 1), ids)

    check_contract(config, next(folders))
    with planted(start.People, "of", staticmethod(each_image), "a record is twice in a sum"):
        check_contract(config, next(folders))


def test_images_clipped_then_added(config: RunConfig, folders: Iterator[Path]) -> None:
    real = step.physical_batches

    def one_row_an_image(store, rows, *args, physical_batch_size, **kwargs):
        sizes = [size * rows.shape[1] for size in physical_batch_size]
        return real(store, rows.ravel(), *args, physical_batch_size=sizes, **kwargs)

    check_contract(config, next(folders))
    with planted(step, "physical_batches", one_row_an_image, "a record is twice in a sum"):
        check_contract(config, next(folders))


def test_images_chosen_by_a_persons_place(
    store: Store, config: RunConfig, folders: Iterator[Path]
) -> None:
    """Which images a person shows follows from their place in the batch, so that one person less
    gives all others new images.
    """
    real = People.images

    def by_place(self, place_B, key, count):
        rows = [
            real(self, np.array([p]), StepKey(key.seed, 1000 * key.step + at), count)
            for at, p in enumerate(place_B)
        ]
        return np.concatenate(rows) if rows else real(self, place_B, key, count)

    def check_choice() -> None:
        people = People.of(store)
        for p in range(PEOPLE):
            rows = people.images(np.arange(PEOPLE), StepKey(0, 5), 3)
            fewer = without(people, p).images(np.arange(PEOPLE - 1), StepKey(0, 5), 3)
            assert np.array_equal(fewer, np.delete(rows, p, 0)), (
                "the choice depends on other people"
            )

    check_choice()
    with planted(People, "images", by_place, "the choice depends on other people"):
        check_choice()
    with planted(People, "images", by_place, "a person moves the sum by more than the clip norm"):
        check_contract(config, next(folders))


def test_rate_and_divisor_by_images(config: RunConfig, folders: Iterator[Path]) -> None:
    asked = replace(config.privacy, sampling="poisson", expected_batch_size=4, steps=4000)

    def check_rate() -> None:
        plan, secret = draft_plan(asked), key()
        sizes = [len(plan.draw(i, PEOPLE, derive_rng(secret, i))) for i in range(4000)]
        error = 5 * (4 * 0.6 / 4000) ** 0.5
        assert abs(np.mean(sizes) - plan.expected_batch_size) < error, (
            "the divisor is not the mean number of people in a batch"
        )

    def check_divisor() -> None:
        """Without noise, a step of plain SGD is the rate times the sum over the number of
        people.
        """
        quiet = replace(config, privacy=replace(config.privacy, noise_multiplier=0.0))
        with new_session(quiet, next(folders)) as session:
            total, names = sums(session)[0], sorted(dict(session.model.named_parameters()))
            trained = [
                name for name in names if dict(session.model.named_parameters())[name].requires_grad
            ]
            before = {name: p.detach().clone() for name, p in session.model.named_parameters()}
            fit(session, quiet=True)
            after = dict(session.model.named_parameters())
            moved = torch.cat(
                [(before[name] - after[name].detach()).flatten().double() for name in trained]
            )
        expected = config.optim.rate * total / PEOPLE
        assert (moved - expected).norm() < 1e-4 * expected.norm(), (
            "the sum is not divided by the number of people"
        )

    def by_images(self):
        return self.num_records

    def divided(total, plan, *args, **kwargs):
        wrong = replace(plan, sampler=FullBatch(Unit(NUM_IMAGES), float(NUM_IMAGES)))
        return privatize(total, wrong, *args, **kwargs)

    check_rate()
    words = "not the mean number of people in a batch"
    with planted(Unit, "sampled_from", property(by_images), words):
        check_rate()
    check_divisor()
    with planted(loop, "privatize", divided, "not divided by the number of people"):
        check_divisor()


def test_delta_by_images(config: RunConfig) -> None:
    asked = PrivacyConfig(
        dataset_size=10**6,
        num_units=10**4,
        expected_batch_size=10**4,
        sampling="full_batch",
        steps=1,
        noise_multiplier=2.0,
        sampling_unit="person",
    )

    def check() -> None:
        assert draft_plan(asked).delta == 1 / (2 * 10**4), (
            "delta does not follow the number of people"
        )

    check()
    with planted(
        plans,
        "default_delta",
        lambda population: 1 / (2 * asked.dataset_size),
        "delta does not follow the number of people",
    ):
        check()


def check_heads(store: Store) -> None:
    """The person with the most images moves no sum of a head by more than the clip norm."""
    made = prepare(people_head_config(store))
    unit_P, size_P = np.unique(store.index["unit"], return_counts=True)
    unit = int(unit_P[size_P.argmax()])
    moved = max(moves(made, store, [unit])[unit].values())
    assert moved <= HEAD_C, "a person moves a head's sum by more than the clip norm"


def test_images_as_rows_of_a_head(store: Store) -> None:
    """A person's images are counted one by one: each is a row of its own, with its own clip."""

    def each_image(store: Store, count: int, seed: int) -> PersonImages:
        row_M = store.eligible_rows(count, seed)
        return PersonImages(row_M, np.arange(len(row_M)), np.arange(len(row_M) + 1))

    check_heads(store)
    with planted(
        PersonImages,
        "chosen",
        staticmethod(each_image),
        "moves a head's sum by more than the clip norm",
    ):
        check_heads(store)


def test_images_of_a_row_chosen_by_the_store(store: Store) -> None:
    """One generator for the whole store chooses: which images make a row follows from how many
    others there are.
    """
    real = PersonImages.chosen

    def by_store(store: Store, count: int, seed: int) -> PersonImages:
        return real(store, count, seed + store.num_records)

    def check_rows() -> None:
        unit_P = np.unique(store.index["unit"])
        rows = {int(unit): set() for unit in unit_P}
        for other in (store, *(without_person(store, int(unit)) for unit in unit_P)):
            images = PersonImages.chosen(other, 3, 0)
            for p in range(len(images.start_P) - 1):
                own = images.row_M[images.place_M[images.start_P[p] : images.start_P[p + 1]]]
                rows[int(other.index["unit"][own[0]])].add(tuple(other.index["id"][own].tolist()))
        assert all(len(found) == 1 for found in rows.values()), (
            "a person's row depends on other people"
        )

    check_rows()
    with planted(
        PersonImages, "chosen", staticmethod(by_store), "a person's row depends on other people"
    ):
        check_rows()
    check_heads(store)
    with planted(
        PersonImages,
        "chosen",
        staticmethod(by_store),
        "moves a head's sum by more than the clip norm",
    ):
        check_heads(store)


def test_released_counts_of_images() -> None:
    """Each image of a released table of scores counts as a person."""

    def each_image(images_P: np.ndarray, of_unit_P: np.ndarray, whole: int) -> np.ndarray:
        return whole * images_P

    check_a_person_moves_the_sum_by_one_at_most()
    with planted(release, "_weights", each_image, "moves the sum by more than 1"):
        check_a_person_moves_the_sum_by_one_at_most()
