"""Heads that draw people: one row of features a person, which no one else's images change."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import gaussian_mechanism
from made import key

from dpvision.adapt.person_rows import PersonFeatures, PersonImages
from dpvision.adapt.prepare import prepare
from dpvision.adapt.release import Releases
from dpvision.adapt.session import adapt, new_head_session, resumed_head_session
from dpvision.checkpoint import load_checkpoint
from dpvision.cli import main
from dpvision.config import with_settings
from dpvision.config.heads import HEADS
from dpvision.data.import_labels import LabelRule
from dpvision.data.importer import import_samples
from dpvision.data.person_names import PersonRule
from dpvision.data.sources import Sample
from dpvision.data.store import Store
from dpvision.errors import ConfigError, DataError, PrivacyError
from dpvision.privacy.account import store_account
from dpvision.privacy.composition import check_total
from dpvision.privacy.ledger_format import read_ledger
from dpvision.privacy.plan import make_plan

from ..data.image_files import encode, png, spoil
from ..train.people_store import NUM_IMAGES, PEOPLE, people_store, shared_store
from .heads_of_people import C, moves, people_head_config, stream_of, sums, without_person

SUMS = ("gradient at zero", "gradient", "moments", "prototypes")
CLASSES = LabelRule(classes=("c0", "c1", "c2"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Ten people with 1 to 9 images; the images of a person have different labels."""
    return people_store(tmp_path_factory.mktemp("data") / "people")


# Rows


def rows_by_hand(store: Store, images: PersonImages, count: int) -> dict[int, tuple[set[int], int]]:
    """For each person, the rows of the store that were chosen and their label; checks what must
    hold of any choice.
    """
    found = {}
    for p in range(len(images.start_P) - 1):
        rows = images.row_M[images.place_M[images.start_P[p] : images.start_P[p + 1]]]
        unit, label = np.unique(store.index["unit"][rows]), np.unique(store.index["label"][rows])
        assert (
            len(unit) == len(label) == 1
            and len(set(rows)) == len(rows)
            and images.label_row_P[p] == rows[0]
        )
        alike = (store.index["unit"] == unit[0]) & (store.index["label"] == label[0])
        assert len(rows) == min(count, alike.sum()), "every image with the label, up to k"
        found[int(unit[0])] = set(rows.tolist()), int(label[0])
    return found


@pytest.mark.parametrize("count", [1, 2, 99])
def test_the_images_of_a_row_are_up_to_k_of_one_person_and_one_label(
    store: Store, count: int
) -> None:
    images = PersonImages.chosen(store, count, 0)
    found = rows_by_hand(store, images, count)
    assert set(found) == set(store.index["unit"].tolist()) and np.array_equal(
        images.row_M, np.unique(images.row_M)
    )
    assert len(images.row_M) == sum(len(rows) for rows, _ in found.values())
    of_seeds = {tuple(PersonImages.chosen(store, count, seed).row_M.tolist()) for seed in range(5)}
    assert len(of_seeds) > 1, "the seed chooses"


def test_every_label_of_a_person_is_as_likely_as_it_is_frequent(store: Store) -> None:
    unit = int(store.index["unit"][-1])
    own = store.index["label"][store.index["unit"] == unit]
    assert len(own) == 9
    labels = [
        rows_by_hand(store, PersonImages.chosen(store, 2, seed), 2)[unit][1] for seed in range(300)
    ]
    for k in range(3):
        rate = float((own == k).mean())
        assert abs(labels.count(k) / 300 - rate) < 5 * (rate * (1 - rate) / 300) ** 0.5


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_persons_row_is_the_mean_of_their_images_whatever_block_it_is_read_in(
    store: Store, dtype: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = PersonImages.chosen(store, 3, 0)
    image_MD = np.random.default_rng(0).normal(size=(len(images.row_M), 37)).astype(dtype)
    several = np.flatnonzero(np.diff(images.start_P) > 1)
    part, none = several[0], several[1]
    image_MD[images.place_M[images.start_P[part]], 5] = np.nan
    image_MD[images.place_M[images.start_P[none] : images.start_P[none + 1]], 0] = np.inf
    features = PersonFeatures(image_MD, images)
    whole = features[:]
    assert (
        whole.shape == features.shape == (PEOPLE, 37)
        and whole.dtype == features.dtype == np.float32
    )
    for p in range(PEOPLE):
        own = image_MD[images.place_M[images.start_P[p] : images.start_P[p + 1]]].astype(np.float64)
        own = own[np.isfinite(own).all(axis=1)]
        if len(own):
            np.testing.assert_allclose(whole[p], own.mean(axis=0), rtol=1e-6)
        else:
            assert np.isnan(whole[p]).all()
        if len(own) == 1:
            assert np.array_equal(whole[p], own[0].astype(np.float32)), (
                "one image: its own features, bit for bit"
            )
    assert np.array_equal(np.isnan(whole).any(axis=1), np.arange(PEOPLE) == none)
    monkeypatch.setattr("dpvision.adapt.person_rows._PIECE_BYTES", 1)
    order = np.random.default_rng(1).permutation(PEOPLE)
    assert np.array_equal(features[:], whole, equal_nan=True) and np.array_equal(
        features[order], whole[order], equal_nan=True
    )
    assert np.array_equal(features[3:5], whole[3:5], equal_nan=True) and features[:0].shape == (
        0,
        37,
    )


def test_a_persons_row_and_label_depend_on_no_one_else_bit_for_bit(store: Store) -> None:
    made = prepare(people_head_config(store))
    units = np.unique(store.index["unit"])
    block = next(stream_of(made, store).blocks())
    assert len(block.x_BE) == PEOPLE
    for p, unit in enumerate(units.tolist()):
        fewer = next(stream_of(made, without_person(store, unit)).blocks())
        others = [q for q in range(PEOPLE) if q != p]
        assert torch.equal(fewer.x_BE, block.x_BE[others]) and torch.equal(
            fewer.label_B, block.label_B[others]
        )
    alone = store
    for unit in units[1:].tolist():
        alone = without_person(alone, unit)
    only = next(stream_of(made, alone).blocks())
    assert torch.equal(only.x_BE, block.x_BE[:1]) and torch.equal(only.label_B, block.label_B[:1])


def test_with_one_image_each_people_are_records(store: Store) -> None:
    """The same images, drawn as people or as records of which each person has one: the same rows,
    up to their order.
    """
    single = store
    for unit in np.unique(store.index["unit"]).tolist():
        if (store.index["unit"] == unit).sum() > 1:
            single = without_person(single, unit)
    people = prepare(people_head_config(store, max_records_per_unit=1))
    privacy = replace(people.config.privacy, sampling_unit="record", dataset_size=PEOPLE)
    blocks = [
        next(
            stream_of(replace(people, config=replace(people.config, privacy=cfg)), single).blocks()
        )
        for cfg in (people.config.privacy, privacy)
    ]
    (x_BE, label_B), (other_BE, other_B) = (
        (b.x_BE[o], b.label_B[o]) for b in blocks for o in [np.lexsort(b.x_BE.numpy().T)]
    )
    assert len(x_BE) == 2 and torch.equal(x_BE, other_BE) and torch.equal(label_B, other_B)


# The contract


@pytest.mark.parametrize(
    "count", [3, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 99))]
)
def test_a_person_moves_every_sum_by_at_most_the_clip_norm(store: Store, count: int) -> None:
    made = prepare(people_head_config(store, max_records_per_unit=count))
    largest = dict.fromkeys(SUMS, 0.0)
    for distances in moves(made, store).values():
        for name, distance in distances.items():
            assert distance <= C, name
            largest[name] = max(largest[name], distance)
    assert min(largest.values()) > 0.99 * C, (
        "nothing to clip: the test would not see a second contribution"
    )


def test_adversarial_people_move_every_sum_by_at_most_the_clip_norm(tmp_path: Path) -> None:
    """Forty images alike but for a pixel, black and white opposites, and images that do not decode,
    some or all of a person's.
    """

    def flat(value: int, mark: int = 0) -> bytes:
        image = np.full((16, 16, 3), value, dtype=np.uint8)
        image[0, 0, 0] = mark
        return encode(image)

    samples = [
        Sample(f"n{i}", png(i, 16, 16), {"person": f"n{i // 2}", "label": f"c{i // 2 % 3}"})
        for i in range(12)
    ]
    samples += [Sample(f"a{i}", flat(255, i), {"person": "same", "label": "c1"}) for i in range(40)]
    samples += [
        Sample(f"b{i}", flat(255 * (i % 2), 50 + i), {"person": "opposite", "label": "c2"})
        for i in range(6)
    ]
    samples += [
        Sample(f"d{i}", flat(255, 100 + i), {"person": "every label", "label": f"c{i % 3}"})
        for i in range(9)
    ]
    made_of = import_samples(
        samples, tmp_path / "store", people=PersonRule("person"), labels=CLASSES
    )
    (
        spoil(made_of, 0),
        spoil(made_of, 2),
        spoil(made_of, 3),
    )  # one of two images of the first person, both of the second
    spoiled = int(made_of.index["unit"][2])
    for count in (4, 40):
        for unit, distances in moves(
            prepare(people_head_config(made_of, max_records_per_unit=count)), made_of
        ).items():
            assert max(distances.values()) <= C and (max(distances.values()) == 0) == (
                unit == spoiled
            )


def test_one_person_more_or_less_is_one_row_in_a_poisson_batch(store: Store) -> None:
    made = prepare(
        people_head_config(
            store, "many_steps", sampling="poisson", expected_batch_size=4, steps=2000
        )
    )
    assert made.plan.sample_rate == 4 / PEOPLE and made.plan.expected_batch_size == 4
    stream, sizes = stream_of(made, store), []
    counter = iter(range(2000))
    releases = Releases(made.plan, lambda: next(counter), key(), key())
    for _ in range(2000):
        drawn: list[np.ndarray] = []

        def seen(blocks, drawn=drawn):
            drawn.extend(block.row_B for block in blocks)
            raise StopIteration

        with pytest.raises(StopIteration):
            releases.release(stream, seen)
        sizes.append(sum(map(len, drawn)))
    assert max(sizes) <= PEOPLE and abs(np.mean(sizes) - 4) < 5 * (4 * 0.6 / 2000) ** 0.5


# Numbers


@pytest.mark.parametrize("head", HEADS)
def test_rows_divisor_delta_and_noise_are_those_of_as_many_records(store: Store, head: str) -> None:
    made = prepare(people_head_config(store, head, max_records_per_unit=7))
    plan = made.plan
    assert (
        feature_rows(made, store) == plan.expected_batch_size == plan.unit.sampled_from == PEOPLE
        and plan.dataset_size == NUM_IMAGES
    )
    assert plan.delta == made.config.privacy.delta or plan.delta == min(1e-3, 1 / (2 * PEOPLE))
    exact = gaussian_mechanism.get_sigma_gaussian(4.0, plan.delta) * plan.steps**0.5
    assert plan.noise.multiplier == pytest.approx(exact, rel=1e-6), "no factor k"
    cfg = made.config.privacy
    as_records = make_plan(
        replace(
            cfg,
            dataset_size=PEOPLE,
            num_units=None,
            sampling_unit="record",
            max_records_per_unit=1,
            target_unit_epsilon=None,
            noise_multiplier=plan.noise.multiplier,
            delta=plan.delta,
        )
    )
    assert (
        plan.epsilon == plan.unit_epsilon == as_records.epsilon
        and plan.noise_std == as_records.noise_std
    )
    group = prepare(
        people_head_config(
            store,
            head,
            max_records_per_unit=9,
            sampling_unit="record",
            expected_batch_size=NUM_IMAGES,
        )
    )
    assert group.plan.noise.multiplier == pytest.approx(9 * plan.noise.multiplier, rel=1e-6), (
        "the group bound"
    )


def feature_rows(made, store: Store) -> int:
    return sum(len(block.x_BE) for block in stream_of(made, store).blocks())


def test_auto_chooses_by_the_number_of_people(store: Store) -> None:
    made = prepare(people_head_config(store, None))
    assert made.model.head == "prototypes" and "3.33 people a class" in (
        made.model.choice.reason or ""
    ), "12 images a class would be enough"


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_every_head_learns_from_people(tmp_path: Path, head: str) -> None:
    """600 people with 1 to 3 noisy images of their class."""
    rng, samples = np.random.default_rng(0), []
    for p in range(600):
        for i in range(1 + p % 3):
            image = rng.normal(100, 25, (8, 8, 3))
            image[:, :, p % 3] += 60
            samples.append(
                Sample(
                    f"{p}-{i}",
                    encode(image.clip(0, 255).astype(np.uint8)),
                    {"person": f"p{p}", "label": f"c{p % 3}"},
                )
            )
    made_of = import_samples(
        samples, tmp_path / "store", people=PersonRule("person"), labels=CLASSES
    )
    with new_head_session(
        people_head_config(made_of, head, max_grad_norm=1.0), tmp_path / "run"
    ) as session:
        adapt(session)
        stream = stream_of(session.prepared, made_of)
    with resumed_head_session(tmp_path / "run") as session:
        assert session.finished
    ledger = read_ledger(tmp_path / "run" / "ledger.jsonl")
    assert (
        ledger.plan.unit.drawn == "person"
        and ledger.steps == ledger.plan.steps
        and ledger.plan.expected_batch_size == 600
    )
    saved = load_checkpoint(tmp_path / "run").model
    block = next(replace(stream, constant=0.0).blocks())
    predicted = (block.x_BE @ saved["weight"].T + saved["bias"]).argmax(1)
    assert float((predicted == block.label_B).float().mean()) > 0.9, "chance is a third"


# Bad images, labels


def test_a_person_without_an_image_that_decodes_or_has_a_label_contributes_exactly_zero(
    tmp_path: Path,
) -> None:
    own = people_store(tmp_path / "store", unlabelled=9)  # the last person has no label
    unlabelled = int(own.index["unit"][-1])
    made = prepare(people_head_config(own, max_records_per_unit=9))
    assert len(made.label) == PEOPLE - 1
    before = sums(made, own)
    for name, after in sums(made, without_person(own, unlabelled)).items():
        assert torch.equal(after, before[name])
    pair = next(u for u in np.unique(own.index["unit"]) if (own.index["unit"] == u).sum() == 2)
    for row in np.flatnonzero(own.index["unit"] == pair).tolist():
        spoil(own, row)
    cache = own.path / "confidential" / "features"
    for file in [f for f in cache.rglob("*") if f.is_file()]:
        file.unlink()
    spoiled = sums(made, own)
    for name, after in sums(made, without_person(own, int(pair))).items():
        assert torch.equal(after, spoiled[name]) and not torch.equal(after, before[name])
    with new_head_session(people_head_config(own, "prototypes"), tmp_path / "run") as session:
        adapt(session)


@pytest.mark.slow
def test_of_several_labels_the_images_with_the_same_ones_are_averaged(tmp_path: Path) -> None:
    sets = [[0], [0, 1], [1, 0], [2], [], [0, 1], []]
    samples = [
        Sample(
            f"{p}-{i}", png(100 * p + i, 16, 16), {"person": f"p{p}", "label": sets[(p + i) % 7]}
        )
        for p in range(6)
        for i in range(7)
    ]
    several = import_samples(samples, tmp_path / "store", people=PersonRule("person"))
    config = people_head_config(several)
    made = prepare(replace(config, model=replace(config.model, multi_label=True)))
    found = rows_by_hand(several, made.people, 3)  # type: ignore[arg-type]
    target_NK = several.targets(np.arange(several.num_records), 3)
    for p, (rows, _) in enumerate(found.values()):
        assert (target_NK[sorted(rows)] == made.label[p]).all()
    for unit in np.unique(several.index["unit"]).tolist():
        block, fewer = (
            next(stream_of(made, s).blocks()) for s in (several, without_person(several, unit))
        )
        assert len(fewer.target_BK) == len(block.target_BK) - 1  # type: ignore[arg-type]


# Runs


def test_a_heads_run_states_and_verifies_the_guarantee_of_a_person(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = people_store(tmp_path / "store")
    with new_head_session(people_head_config(store, "many_steps"), tmp_path / "run") as session:
        adapt(session)
    assert main(["report", str(tmp_path / "run")]) == 0
    path = tmp_path / "run" / "statement.json"
    statement = json.loads(path.read_text())
    guarantee, scope, mechanism = statement["guarantee"], statement["scope"], statement["mechanism"]
    assert (
        guarantee["epsilon"] == guarantee["unit_epsilon"] <= 4
        and "for each person" in statement["headline"]
    )
    assert (
        scope["unit"]["sampling_unit"] == "person"
        and scope["unit"]["num_units"] == mechanism["divisor"] == PEOPLE
    )
    assert (
        "At most 3 images of a person take part, with one label, in every release the same"
        in scope["unit"]["text"]
    )
    assert (
        mechanism["clipping"].startswith("Each person's whole contribution")
        and "the mean over at most 3" in mechanism["clipping"]
    )
    assert (
        mechanism["sensitivity"].startswith("One person moves")
        and "every person in every step" in mechanism["sampling_assumed"]
    )
    said = json.dumps(statement)
    assert "augmented views" not in said and not re.search(r"[Ee]ach record's whole", said)
    verify = ["verify", str(path), "--run", str(tmp_path / "run"), "--store", str(store.path)]
    assert main(verify) == 0
    capsys.readouterr()
    statement["scope"]["unit"]["sampling_unit"] = "record"
    path.write_text(json.dumps(statement))
    with pytest.raises(SystemExit):
        main(verify)
    assert "sampling_unit: 'record' stated, 'person' found" in capsys.readouterr().out


def test_heads_of_both_kinds_on_one_store_add_up_for_a_person_and_cannot_be_behind_the_same_weights(
    tmp_path: Path,
) -> None:
    store = people_store(tmp_path / "store")
    people = people_head_config(store)
    records = people_head_config(
        store, sampling_unit="record", max_records_per_unit=9, expected_batch_size=NUM_IMAGES
    )
    plans = []
    for name, config in (("people", people), ("records", records)):
        with new_head_session(config, tmp_path / name) as session:
            adapt(session)
            plans.append((session.plan, 1))
    account = store_account(store.path)
    alone = [run.spent.unit_epsilon for run in account.runs]
    assert account.draws_people and account.epsilon == account.unit_epsilon
    assert max(alone) < account.epsilon <= sum(alone)
    with pytest.raises(PrivacyError, match="some drew people and others records"):
        check_total(tuple(plans), allow_weak=True)


# What is refused


def command(store: Path, **changes: object) -> list[str]:
    given = {"num_units": PEOPLE, "max_records_per_unit": 3, **changes}
    options = [
        word
        for name, value in given.items()
        for word in (f"--privacy.{name.replace('_', '-')}", str(value))
    ]
    argv = [
        "adapt",
        "--data",
        str(store),
        "--encoder",
        "pixels",
        "--num-classes",
        "3",
        "--epsilon",
        "8",
        "--dry-run",
    ]
    return [*argv, "--privacy.sampling-unit", "person", *options]


def test_the_command_line_says_what_a_persons_row_is_and_refuses_what_is_not_theirs(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*argv: str) -> str:
        assert main([*argv]) == 2
        return capsys.readouterr().err

    images = "--dataset-size", str(NUM_IMAGES)
    assert main([*command(store.path), *images]) == 0
    said = re.sub(" +", " ", capsys.readouterr().out)
    assert (
        "for a person (at most 3 images in a step)" in said
        and "declared people 10" in said
        and "expected batch size 10" in said
    )
    assert (
        "a person's row the mean of the features of at most 3 images of one class" in said
        and "sampling full_batch, of people" in said
    )
    assert "at most 3 images of one class, the same in every release; others take no part" in said
    people = "--num-units 10 --sampling-unit person --max-records-per-unit 3"
    asked = f"{people} --dataset-size {NUM_IMAGES} --target-unit-epsilon 8 --steps 60"
    assert main(["plan", "transfer.many_steps", *asked.split(), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["sample_gradients"]
    shown = [*command(store.path), *images, "--head", "many_steps", "--optim.momentum", "0"]
    assert main([*shown, "--privacy.steps", "60"]) == 0
    found = re.search(r"sample-gradients +([\d,]+)", capsys.readouterr().out)
    assert found and int(found[1].replace(",", "")) == planned == 60 * PEOPLE
    assert main([*command(store.path, max_records_per_unit=1), *images, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (
        shown["operator_only"] == {"num_records": PEOPLE, "num_people": PEOPLE}
        and shown["expected_batch_size"] == PEOPLE
    )
    assert "36 records and 10 units can take part; expected" in refused(
        *command(store.path, num_units=20), *images
    )
    assert "expected none with privacy.sampling_unit='person'" in refused(
        *command(store.path), *images, "--select", "prototypes,many_steps"
    )
    samples = [
        Sample(f"{i}", png(i, 16, 16), {"person": f"p{i // 2}", "label": f"c{i % 3}"})
        for i in range(20)
    ]
    records = import_samples(
        [replace_person(s, None) for s in samples], tmp_path / "records", labels=CLASSES
    )
    assert "has no units" in refused(*command(records.path), "--dataset-size", "20")
    options: dict[str, Any] = {"people": PersonRule("person", "own-person"), "labels": CLASSES}
    missing = import_samples(
        [*samples, Sample("x", png(50), {"label": "c1"})], tmp_path / "missing", **options
    )
    assert "1 of 21 records have no person" in refused(
        *command(missing.path, num_units=11), "--dataset-size", "21"
    )
    two = [*samples, Sample("x", png(0, 16, 16), {"person": "p7", "label": "c0"})]
    shared = shared_store(two, tmp_path / "shared", labels=CLASSES)
    assert "1 files have the bytes of an image of another person" in refused(
        *command(shared.path), "--dataset-size", "20"
    )


def replace_person(sample: Sample, person: str | None) -> Sample:
    fields = {name: value for name, value in sample.fields.items() if name != "person"}
    return Sample(
        sample.key, sample.image, fields if person is None else {**fields, "person": person}
    )


def test_a_selection_does_not_draw_people(store: Store) -> None:
    config = people_head_config(store)
    with pytest.raises(ConfigError, match=r"expected none with privacy\.sampling_unit='person'"):
        with_settings(config, {"model.candidates": ("prototypes", "many_steps")})


def test_a_head_needs_more_than_the_wrong_number_of_people(store: Store) -> None:
    with pytest.raises(DataError, match="10 units can take part"):
        prepare(people_head_config(store, num_units=9, expected_batch_size=9))
