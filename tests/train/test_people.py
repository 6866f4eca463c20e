"""Drawing people: one of them moves the sum by at most the clip norm, whatever their images are and
however many.
"""

import json
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from made import key

from dpvision.cli import main
from dpvision.config import ClassifierConfig, RunConfig, to_dict
from dpvision.data.importer import import_samples
from dpvision.data.keys import StepKey
from dpvision.data.loader import physical_batches
from dpvision.data.open import open_store
from dpvision.data.people import People
from dpvision.data.person_names import PersonRule
from dpvision.data.sources import Sample
from dpvision.data.split import split_store
from dpvision.data.store import Store
from dpvision.dp.per_record import per_record_gradients
from dpvision.errors import ConfigError, DataError, PrivacyError
from dpvision.models import mae
from dpvision.privacy.account import store_account
from dpvision.privacy.composition import check_total
from dpvision.privacy.plan import DPPlan, draft_plan, make_plan
from dpvision.privacy.sampling import derive_rng
from dpvision.privacy.second_accountant import epsilon, release
from dpvision.statement.history_phrases import SHARED_IMAGES
from dpvision.statement.schema import problems, statement_schema
from dpvision.statement.statement import make_statement
from dpvision.train import loop, objectives
from dpvision.train.loop import fit
from dpvision.train.start import new_session, resumed_session
from dpvision.train.step import step_sum

from ..data.image_files import encode, png, spoil
from .people_store import (
    NUM_IMAGES,
    PEOPLE,
    SIZES,
    people_config,
    people_store,
    shared_store,
    sums,
    without,
)

pytestmark = pytest.mark.usefixtures("gates_once")

KEY = key()
C = 0.5


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return people_store(tmp_path_factory.mktemp("data") / "people")


@pytest.fixture
def config(store: Store) -> RunConfig:
    return people_config(store)


def with_privacy(config: RunConfig, **changes) -> RunConfig:
    return replace(config, privacy=replace(config.privacy, **changes))


def full_batch(config: RunConfig, count: int) -> RunConfig:
    return with_privacy(
        config, sampling="full_batch", expected_batch_size=PEOPLE, max_records_per_unit=count
    )


# Plan


def test_rate_divisor_and_delta_are_of_people_and_epsilon_is_that_of_one_record_of_as_many(
    config: RunConfig,
) -> None:
    plan = make_plan(config.privacy)
    assert (
        plan.sample_rate == 4 / PEOPLE
        and plan.expected_batch_size == 4
        and plan.unit.sampled_from == PEOPLE
    )
    large = replace(
        config.privacy,
        dataset_size=10**6,
        num_units=20_000,
        expected_batch_size=200,
        steps=100,
        max_records_per_unit=50,
    )
    plan = make_plan(large)
    same = draft_plan(
        replace(
            large,
            dataset_size=20_000,
            num_units=None,
            sampling_unit="record",
            max_records_per_unit=1,
        )
    )
    assert (
        plan.delta == 1 / 40_000
        and plan.epsilon == plan.unit_epsilon == plan.stated_epsilon == same.epsilon
    )
    assert plan.spent(100).unit_epsilon == plan.epsilon and plan.event(100, "unit") == plan.event(
        100
    )
    assert epsilon([release(0.01, 2.0, 100)], plan.delta) <= 1.01 * plan.epsilon, (
        "by the second accountant"
    )
    assert make_plan(replace(large, max_records_per_unit=1)).epsilon == plan.epsilon, (
        "k does not cost epsilon"
    )
    assert DPPlan.from_dict(plan.to_dict()) == plan and "sampling_unit" not in same.to_dict(), (
        "older ledgers keep their bytes"
    )
    target = make_plan(replace(large, noise_multiplier=None, target_unit_epsilon=1.0))
    assert (
        target.noise.multiplier
        == make_plan(replace(large, noise_multiplier=None, target_epsilon=1.0)).noise.multiplier
    )


def test_people_may_be_truncated_as_records_may(config: RunConfig) -> None:
    cfg = replace(
        config.privacy,
        dataset_size=10**5,
        num_units=2000,
        expected_batch_size=200,
        sampling="truncated_poisson",
        max_batch_size=320,
    )
    assert make_plan(cfg).event(1).event.dataset_size == 2000
    with pytest.raises(PrivacyError, match="max_batch_size=205; expected epsilon within 1%"):
        make_plan(replace(cfg, max_batch_size=205))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"num_units": None, "max_records_per_unit": 1},
            "num_units=None; expected a number with sampling_unit='person'",
        ),
        (
            {"num_units": NUM_IMAGES + 1},
            f"num_units=37; expected from 1 to dataset_size={NUM_IMAGES}",
        ),
        ({"num_units": 0}, "num_units=0; expected from 1"),
        ({"expected_batch_size": 11}, "expected_batch_size=11; expected at most num_units=10"),
        ({"sampling": "full_batch"}, "expected_batch_size=4; expected num_units=10"),
    ],
)
def test_numbers_of_people_that_cannot_be_are_refused(
    config: RunConfig, change: dict, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        with_privacy(config, **change)


def test_runs_that_drew_people_and_runs_that_drew_records_do_not_add_up_to_one_guarantee(
    config: RunConfig,
) -> None:
    """Without one of their images a person's gradient is another one: that is not what the epsilon
    of drawn people bounds.
    """
    people = make_plan(config.privacy)
    records = make_plan(
        replace(
            config.privacy, sampling_unit="record", max_records_per_unit=9, noise_multiplier=50.0
        )
    )
    check_total(((people, 1), (people, 1)), allow_weak=True)
    with pytest.raises(PrivacyError, match="some drew people and others records"):
        check_total(((people, 1), (records, 1)), allow_weak=True)


# Draws


def test_people_are_drawn_each_by_their_own_coin_at_the_accounted_rate(config: RunConfig) -> None:
    plan = draft_plan(replace(config.privacy, steps=4000))
    drawn = np.zeros((4000, PEOPLE))
    for step in range(4000):
        drawn[step, plan.draw(step, PEOPLE, derive_rng(KEY, step))] = 1
    rate = plan.event(1).event.sample_rate
    assert rate == plan.expected_batch_size / PEOPLE, (
        "the divisor is the mean number of drawn people"
    )
    assert np.abs(drawn.mean(0) - rate).max() < 5 * (rate * (1 - rate) / 4000) ** 0.5, (
        "however many images they have"
    )
    correlation = np.corrcoef(drawn.T)[~np.eye(PEOPLE, dtype=bool)]
    assert np.abs(correlation).max() < 6 / 4000**0.5


def test_which_images_follows_from_seed_step_and_the_persons_own_images(store: Store) -> None:
    people, place = People.of(store), np.arange(PEOPLE)
    assert sorted(np.diff(people.start_P)) == list(SIZES)
    for step in range(20):
        rows = people.images(place, StepKey(3, step), 4)
        assert np.array_equal(rows, people.images(place, StepKey(3, step), 4))
        assert np.array_equal(people.images(place[::-1], StepKey(3, step), 4)[::-1], rows), (
            "not the order of the draw"
        )
        for p in place:
            assert np.array_equal(
                without(people, p).images(place[:-1], StepKey(3, step), 4), np.delete(rows, p, 0)
            ), "nor other people"
            own = people.row_N[people.start_P[p] : people.start_P[p + 1]]
            assert set(rows[p]) <= set(own) and len(set(rows[p])) == min(4, len(own)), (
                "no image twice before each was taken"
            )
    assert not np.array_equal(rows, people.images(place, StepKey(4, 19), 4)), "the seed counts"


def test_every_image_of_a_person_is_equally_likely(store: Store) -> None:
    people = People.of(store)
    largest = np.array([int(np.diff(people.start_P).argmax())])
    taken = Counter(
        row
        for step in range(3000)
        for row in people.images(largest, StepKey(0, step), 2)[0].tolist()
    )
    rate = 2 / 9
    assert len(taken) == 9
    assert max(abs(n / 3000 - rate) for n in taken.values()) < 5 * (rate * (1 - rate) / 3000) ** 0.5


def test_no_draw_no_image(store: Store) -> None:
    assert People.of(store).images(np.empty(0, dtype=np.int64), StepKey(0, 0), 3).shape == (0, 3)


# The contract


def blown_up(session, factor: float = 4.0):
    """The session with weights so large that gradients are clipped."""
    with torch.no_grad():
        for parameter in session.model.parameters():
            parameter.mul_(factor)
    return session


def moves(session) -> tuple[list[float], torch.Tensor]:
    """How far each person moves the sum of a step, and the norms before the clip."""
    whole, norms = sums(session)
    num = len(session.people)
    return [
        float((whole - sums(replace(session, people=without(session.people, p)))[0]).norm())
        for p in range(num)
    ], norms


@pytest.mark.parametrize("kind", ["mae", "classifier"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_person_moves_the_sum_by_at_most_the_clip_norm(
    config: RunConfig, tmp_path: Path, kind: str, count: int
) -> None:
    config = full_batch(config, count)
    if kind == "classifier":
        config = replace(
            config,
            model=ClassifierConfig(encoder=config.model.encoder, num_classes=3, head_init="xavier"),
        )
    with new_session(config, tmp_path / "run") as session:
        moved, norms = moves(blown_up(session))
    # A classifier this sure of itself has no gradient for a person whose images it gets right.
    assert len(norms) == PEOPLE and (norms > C).sum() >= PEOPLE // 2, (
        "nothing to clip, or not one gradient for each person"
    )
    assert max(moved) <= C
    # Half a percent of C is kept for rounding.
    np.testing.assert_allclose(
        sorted(moved), sorted(norms.double().clamp(max=C).tolist()), rtol=6e-3, atol=1e-6
    )


@pytest.mark.parametrize(("key", "splits"), [(0, False), (71, True)])
def test_adversarial_people_move_the_sum_by_at_most_the_clip_norm(
    config: RunConfig, tmp_path: Path, monkeypatch, key: int, splits: bool
) -> None:
    """Forty images that differ in one pixel only, flat extremes, bytes that do not decode, and a
    gradient that is not finite.

    Under the second key the person without an image that decodes is the fifth of a bucket of four,
    which is added up in two passes because of them: the sum moves by its rounding.
    """
    monkeypatch.setattr("dpvision.data.store_writer.secrets.token_bytes", Random(key).randbytes)

    def flat(value: int, mark: int = 0) -> bytes:
        image = np.full((16, 16, 3), value, dtype=np.uint8)
        image[0, 0, 0] = mark
        return encode(image)

    samples = [Sample(f"n{i}", png(i, 16, 16), {"person": f"n{i // 2}"}) for i in range(12)]
    samples += [Sample(f"a{i}", flat(255, i), {"person": "same"}) for i in range(40)]
    samples += [Sample(f"b{i}", flat(128 * i), {"person": f"flat {i}"}) for i in range(2)]
    made = import_samples(samples, tmp_path / "store", people=PersonRule("person"))
    (
        spoil(made, 0),
        spoil(made, 2),
        spoil(made, 3),
    )  # one of two images of the first person, both of the second
    config = with_privacy(
        config,
        dataset_size=54,
        num_units=9,
        expected_batch_size=9,
        max_records_per_unit=4,
        sampling="full_batch",
    )
    config = replace(config, data=replace(config.data, store=str(made.path), crop_scale=(1.0, 1.0)))
    with new_session(config, tmp_path / "run") as session:
        moved, norms = moves(blown_up(session))
        assert len(norms) == 8, "a person without an image that decodes takes no part"
        assert sum(m < 1e-6 * C for m in moved) == 1 and max(moved) <= C and norms.max() > C
        assert splits or min(moved) == 0
        chosen = int(np.argmax(moved))
        real, first = session.loss_fn, int(session.people.id_P[chosen])

        def infinite(model, batch, key):
            losses = real(model, batch, key)
            return torch.where(batch.record_id_B == first, torch.inf * losses, losses)

        moved, norms = moves(replace(session, loss_fn=infinite))
        assert moved[chosen] == 0 and max(moved) <= C and not norms.isfinite().all()


def test_a_person_moves_their_own_bucket_only_whatever_the_physical_batch(
    config: RunConfig, tmp_path: Path
) -> None:
    with new_session(full_batch(config, 2), tmp_path / "run") as session:
        found = [
            sums(
                replace(
                    session,
                    config=replace(
                        session.config,
                        hardware=replace(session.config.hardware, physical_batch_size=b),
                    ),
                )
            )
            for b in (1, 3, 64)
        ]
    for other, _ in found[1:]:
        assert (other - found[0][0]).norm() < 1e-5 * C * PEOPLE


def test_the_clipped_gradient_is_that_of_the_mean_over_the_persons_images(
    config: RunConfig, tmp_path: Path
) -> None:
    """Against one image at a time: gradients of single images, averaged, then clipped and added."""

    def alone(view: int):
        def losses(model, batch, key):
            orders = objectives._patch_orders(batch, key, model.num_patches).unflatten(
                0, batch.image_BVCHW.shape[:2]
            )
            return mae.losses(model, batch.image_BVCHW[:, view], orders[:, view])

        return losses

    config = full_batch(config, 3)
    with new_session(config, tmp_path / "run") as session:
        total, _ = sums(blown_up(session))
        key, params = (
            StepKey(config.seed, 0),
            {n: p.detach() for n, p in session.model.named_parameters() if p.requires_grad},
        )
        rows = session.people.images(np.arange(PEOPLE), key, 3)
        (batch,) = physical_batches(
            session.store, rows, key, config.data, 16, physical_batch_size=PEOPLE, workers=1
        )
        grads = [
            per_record_gradients(alone(v), session.model, params, batch, key)[0] for v in range(3)
        ]
    mean_BP = torch.stack(
        [torch.cat([g[name].flatten(1) for name in sorted(g)], 1).double() for g in grads]
    ).mean(0)
    expected = (mean_BP * (C * (1 - 5e-3) / mean_BP.norm(dim=1)).clamp(max=1)[:, None]).sum(0)
    assert (total - expected).norm() < 1e-5 * C * PEOPLE


# Views


def test_the_views_of_a_person_are_their_images_with_their_own_labels(
    config: RunConfig, store: Store
) -> None:
    people, key = People.of(store), StepKey(0, 7)
    rows = people.images(np.arange(PEOPLE), key, 3)
    data = replace(config.data, views=2)
    parts = [
        list(
            physical_batches(
                store, rows, key, data, 16, physical_batch_size=b, workers=w, num_classes=3
            )
        )
        for b, w in ((99, 1), (4, 3))
    ]
    (batch,), several = parts
    assert torch.equal(torch.cat([b.image_BVCHW for b in several]), batch.image_BVCHW), (
        "no setting of the machine counts"
    )
    assert (
        batch.image_BVCHW.shape[:2] == (PEOPLE, 6)
        and batch.label_B is None
        and batch.record_id_B.tolist() == people.id_P.tolist()
    )
    assert batch.label_BV.tolist() == [
        [label for row in own for label in [store.labels[row]] * 2] for own in rows
    ]
    single = next(
        iter(physical_batches(store, rows[:, 0], key, data, 16, physical_batch_size=99, workers=1))
    )
    assert torch.equal(batch.image_BVCHW[:, :2], single.image_BVCHW), (
        "the first image's views are those of the image alone"
    )
    (one,) = (np.flatnonzero(rows[:, 0] == rows[:, 1])[:1],)
    assert not torch.equal(batch.image_BVCHW[one, 0], batch.image_BVCHW[one, 2]), (
        "an image that repeats is cropped anew"
    )


def test_an_image_without_a_label_counts_as_one_that_the_person_does_not_have(
    config: RunConfig, tmp_path: Path
) -> None:
    own = people_store(tmp_path / "store", unlabelled=4)
    people, key = People.of(own), StepKey(0, 0)
    rows = people.images(np.arange(PEOPLE), key, 9)
    (batch,) = physical_batches(
        own, rows, key, config.data, 16, physical_batch_size=99, workers=1, num_classes=3
    )
    assert bool(batch.valid_B.all()) and bool((batch.label_BV >= 0).all())
    (free,) = physical_batches(own, rows, key, config.data, 16, physical_batch_size=99, workers=1)
    assert int((free.label_BV < 0).sum()) == 4, "a network without labels uses every image"


# Runs


def test_a_run_states_and_verifies_the_guarantee_of_a_person(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_privacy(config, noise_multiplier=20.0, allow_weak_guarantee=False)
    with new_session(config, tmp_path / "run") as session:
        assert fit(session, quiet=True)
    assert main(["report", str(tmp_path / "run")]) == 0
    statement = json.loads((tmp_path / "run" / "statement.json").read_text())
    guarantee, unit = statement["guarantee"], statement["scope"]["unit"]
    assert (
        guarantee["epsilon"] == guarantee["unit_epsilon"]
        and "for each person" in statement["headline"]
    )
    assert (
        unit["sampling_unit"] == "person"
        and unit["num_units"] == PEOPLE
        and statement["mechanism"]["divisor"] == 4
    )
    assert "each person is sampled independently" in statement["mechanism"]["sampling_assumed"]
    assert "single image of a person" not in " ".join(statement["in_words"]), (
        "there is no such figure"
    )
    assert (
        main(["ledger", config.data.store]) == 0 and "total for a person" in capsys.readouterr().out
    )
    verify = [
        "verify",
        str(tmp_path / "run" / "statement.json"),
        "--run",
        str(tmp_path / "run"),
        "--store",
        config.data.store,
    ]
    assert main(verify) == 0
    capsys.readouterr()
    statement["scope"]["unit"]["sampling_unit"] = "record"
    (tmp_path / "run" / "statement.json").write_text(json.dumps(statement))
    with pytest.raises(SystemExit):
        main(verify)
    assert "sampling_unit: 'record' stated, 'person' found" in capsys.readouterr().out


def test_the_account_of_a_store_with_both_kinds_of_run_is_a_persons(tmp_path: Path) -> None:
    store = people_store(tmp_path / "store")
    config = with_privacy(people_config(store), noise_multiplier=20.0)
    records = with_privacy(
        config, sampling_unit="record", max_records_per_unit=9, noise_multiplier=40.0
    )
    for name, settings in (("people", config), ("records", records)):
        with new_session(settings, tmp_path / name) as session:
            fit(session, quiet=True)
            account = store_account(store.path)
    alone = [run.spent.unit_epsilon for run in account.runs]
    assert account.draws_people and account.epsilon == account.unit_epsilon
    assert max(alone) < account.epsilon <= sum(alone)


CRASH = """
import json, os, signal, sys
from pathlib import Path
from dpvision.config import RunConfig, from_dict
from dpvision.train import loop
from dpvision.train.start import new_session

real = loop.privatize

def killed(total, plan, step, key, **owners):
    if step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(total, plan, step, key, **owners)

loop.privatize = killed
with new_session(from_dict(RunConfig, json.loads(Path(sys.argv[1]).read_text())),
                 Path(sys.argv[2])) as session:
    loop.fit(session, quiet=True)
"""


def test_after_sigkill_the_same_images_of_a_person_belong_to_a_step_and_people_are_drawn_anew(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run must not repeat a draw of people (new keys), but which of their images a step
    shows is public and stays.
    """
    config = replace(config, privacy=replace(config.privacy, steps=8))
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
    command = [sys.executable, "-c", CRASH, str(tmp_path / "config.json"), str(tmp_path / "run")]
    assert subprocess.run(command, capture_output=True, timeout=900).returncode == -signal.SIGKILL
    with new_session(config, tmp_path / "other") as fresh:
        expected = sums(fresh, 3, key())[0]
    with resumed_session(tmp_path / "run") as session:
        assert session.run.ledger.steps == 3 and session.updates == 0, (
            "charged, and lost before a checkpoint"
        )
        assert torch.equal(sums(session, 3, key())[0], expected), "under the same key"
        keys = []
        monkeypatch.setattr(
            loop,
            "step_sum",
            lambda number, t, drawn, **more: (
                keys.append(drawn) or step_sum(number, t, drawn, **more)
            ),
        )
        assert fit(session, quiet=True) and session.run.ledger.steps == 8
        assert len(keys) == 5 and len(set(keys)) == 1 and keys[0].secret() != KEY.secret()


# What a store must be


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 2
    return capsys.readouterr().err


def command(store: Path, **changes) -> list[str]:
    given = {
        "dataset_size": NUM_IMAGES,
        "num_units": PEOPLE,
        "expected_batch_size": 4,
        "steps": 2,
        "noise_multiplier": 20,
        **changes,
    }
    options = [
        word
        for name, value in given.items()
        for word in (f"--privacy.{name.replace('_', '-')}", str(value))
    ]
    return [
        "train",
        "vip.micro_random_start",
        "--data",
        str(store),
        "--privacy.sampling-unit",
        "person",
        "--hardware.physical-batch-size",
        "8",
        *options,
        "--dry-run",
    ]


def test_the_command_line_draws_people_and_refuses_what_is_not_theirs(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command(store.path), "--privacy.delta", "None"]) == 0
    assert "for a person (one image in a step)" in capsys.readouterr().out
    assert "expected from 1 to dataset_size=36" in refused(
        command(store.path, num_units=37), capsys
    )
    assert "36 records and 10 units can take part; expected" in refused(
        command(store.path, num_units=20), capsys
    )
    records = import_samples([Sample(f"{i}", png(i), {}) for i in range(10)], tmp_path / "records")
    assert "has no units" in refused(command(records.path, dataset_size=10), capsys)


def test_a_record_without_a_person_or_with_two_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [Sample(f"{i}", png(i, 16, 16), {"person": f"p{i // 2}"}) for i in range(40)]
    missing = import_samples(
        [*samples, Sample("x", png(50), {})],
        tmp_path / "missing",
        people=PersonRule("person", unmatched="own-person"),
    )
    declared = {"dataset_size": 41, "num_units": 21, "expected_batch_size": 2}
    assert "1 of 41 records have no person" in refused(command(missing.path, **declared), capsys)
    shared = shared_store(
        [*samples, Sample("x", png(0, 16, 16), {"person": "p7"})], tmp_path / "shared"
    )
    declared = {"dataset_size": 40, "num_units": 20, "expected_batch_size": 2}
    assert "1 files have the bytes of an image of another person" in refused(
        command(shared.path, **declared), capsys
    )
    for half in split_store(shared.path, tmp_path / "a", tmp_path / "b", 0.5):
        with pytest.raises(DataError, match="another person"):
            declared = {
                "dataset_size": half.num_records,
                "num_units": half.num_records // 2,
                "expected_batch_size": 1,
            }
            settings = with_privacy(people_config(half), **declared)
            with new_session(settings, tmp_path / "run"):
                pass
    assert (
        open_store(
            import_samples(samples, tmp_path / "good", people=PersonRule("person")).path
        ).meta["shared_images"]
        == 0
    )


def test_a_choice_to_keep_shared_images_for_the_first_trains_and_is_stated(tmp_path: Path) -> None:
    samples = [Sample(f"{i}", png(i, 16, 16), {"person": f"p{i // 2}"}) for i in range(40)]
    twice = Sample("x", png(0, 16, 16), {"person": "p7"})
    store = import_samples(
        [*samples, twice], tmp_path / "shared", people=PersonRule("person", shared_images="first")
    )
    settings = with_privacy(
        people_config(store), dataset_size=40, num_units=20, expected_batch_size=2, steps=1
    )
    with new_session(settings, tmp_path / "run") as session:
        fit(session, quiet=True)
    statement = make_statement(tmp_path / "run", store_dir=store.path)
    assert problems(statement, statement_schema()) == []
    assert statement["scope"]["not_covered"].count(SHARED_IMAGES) == 1
