"""Private selection among heads: charged before, secret in its number, its score noisy, its winner
the best.
"""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from feature_sets import joined, multi_label, stream_of

from dpvision.adapt import select as select_module
from dpvision.adapt.feature_stream import FeatureStream, Head
from dpvision.adapt.heads.many_steps import many_steps
from dpvision.adapt.heads.one_step import one_step
from dpvision.adapt.heads.prototypes import prototypes
from dpvision.adapt.integer_rows import IntegerStream
from dpvision.adapt.release import Releases
from dpvision.adapt.select import Candidate, Selected, hits, select_head
from dpvision.cli import main
from dpvision.config import PrivacyConfig
from dpvision.data.synthetic_store import write_scenes
from dpvision.errors import OPERATOR_ONLY, ConfigError, PrivacyError
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.plan import DPPlan, ask_selection, make_plan, run_plans
from dpvision.privacy.stream import Key

from .runs_of_heads import write_digits

GOOD = Candidate("prototypes", prototypes)


def useless(stream: FeatureStream, releases: Releases) -> Head:
    """Always the first class, and by some margin."""
    return Head(
        torch.zeros(stream.num_classes, stream.feature_ND.shape[1]),
        -torch.arange(float(stream.num_classes)),
    )


BAD = Candidate("first class", useless)


def test_the_pages_example_of_adapt_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it stands in docs/selection.md, with the default encoder, on a smaller store."""
    write_digits(tmp_path / "stores" / "mine", 0, 200)
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "selection.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("    dpvision adapt "))
    assert (
        main([*line.replace("--dataset-size 20000", "--dataset-size 200").split()[1:], "--dry-run"])
        == 0
    )


def plan_of(
    count: int,
    *,
    steps: int = 1,
    mean_runs: float = 4.0,
    shape: float | None = 1.0,
    **settings: float,
) -> DPPlan:
    cfg = PrivacyConfig(
        dataset_size=count,
        expected_batch_size=count,
        sampling="full_batch",
        steps=steps,
        **({"target_epsilon": 4.0} | settings),
    )  # type: ignore[arg-type]
    return make_plan(cfg, ask_selection(cfg, mean_runs=mean_runs, shape=shape))


def charge() -> int:
    return 0


def test_the_better_setting_wins_and_says_so() -> None:
    stream = stream_of(400, unit=True)
    plan = plan_of(400, mean_runs=8.0)
    found = [
        select_head(stream, [GOOD, BAD], plan, charge, key=Key.for_tests(seed.to_bytes(32, "big")))
        for seed in range(40)
    ]
    names = [one.candidate for one in found if one is not None]
    assert len(names) == 40
    # Of K geometric runs with mean 8, none is the good one with probability sum of (1/8)
    # (7/8)^(k-1) / 2^k = 1/9.
    assert 28 <= names.count("prototypes") <= 40
    for one in found:
        assert one is not None
        right = float(
            (one.head.predict(torch.from_numpy(stream.feature_ND)).numpy() == stream.label).mean()
        )
        noise = run_plans(plan)[1].noise_std / 400
        assert abs(one.score - right) < 6 * noise, "the score is of the head that is released"


def test_a_candidate_is_scored_on_rows_divided_as_in_training() -> None:
    """Undivided, the first dimension would hide the others."""
    stream = stream_of(400, unit=True)
    spread_D = torch.ones(stream.feature_ND.shape[1])
    spread_D[0] = 1e4
    feature_ND = stream.feature_ND * spread_D.numpy()
    plan, divided = (
        plan_of(400),
        dataclasses.replace(stream, feature_ND=feature_ND, spread_D=spread_D),
    )
    found = select_head(divided, [GOOD, Candidate("the same", prototypes)], plan, charge)
    assert found is not None
    of_plain = Head(found.head.weight_KD, found.head.bias_K, found.head.centre_D, None, True)
    right = float(
        (of_plain.predict(torch.from_numpy(stream.feature_ND)).numpy() == stream.label).mean()
    )
    assert abs(found.score - right) < 6 * run_plans(plan)[1].noise_std / 400


def test_the_released_run_is_the_one_with_the_highest_noisy_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, made = select_module._run, list[Selected]()

    def spied(*arguments: object) -> Selected:
        made.append(real(*arguments))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(select_module, "_run", spied)
    stream, plan = stream_of(100, unit=True), plan_of(100)
    numbers, drawn = [], []
    for seed in range(60):
        made.clear()
        best = select_head(
            stream, [GOOD, BAD], plan, charge, key=Key.for_tests(seed.to_bytes(32, "big"))
        )
        runs = made[2:]  # the first two are the rehearsal of both candidates
        assert best is max(runs, key=lambda run: run.score)
        numbers.append(len(runs))
        drawn += [run.candidate for run in runs]
    assert (
        np.mean(numbers) == pytest.approx(4.0, abs=5 * math.sqrt(12 / 60))
        and min(numbers) >= 1
        and len(set(numbers)) > 4
    )
    assert abs(drawn.count("prototypes") / len(drawn) - 0.5) < 5 * 0.5 / math.sqrt(len(drawn)), (
        "candidates are drawn uniformly"
    )
    assert len({run.score for run in made}) == len(made), "noise of one run is not that of another"


def test_the_score_has_the_plans_noise() -> None:
    stream, plan = stream_of(200, unit=True), plan_of(200)
    run_plan, score_plan = run_plans(plan)
    right = float((stream.label == 0).mean())
    scores = [
        select_module._run(stream, BAD, run_plan, score_plan, Key.for_tests(bytes(32)), run).score
        for run in range(600)
    ]
    assert np.mean(scores) == pytest.approx(
        right, abs=5 * score_plan.noise_std / 200 / math.sqrt(600)
    )
    assert np.std(scores) == pytest.approx(score_plan.noise_std / 200, rel=0.15)
    assert plan.selection is not None
    assert score_plan.noise_std == pytest.approx(
        plan.noise.multiplier * plan.selection.score_noise_ratio
    )


@pytest.mark.parametrize("multi", [False, True])
def test_one_record_moves_the_count_of_hits_by_at_most_one(multi: bool) -> None:
    stream = stream_of(50, multi=multi)
    head, plan = Head(torch.randn(4, 12), torch.zeros(4)), run_plans(plan_of(50))[1]
    before = float(hits(IntegerStream(stream).blocks(), head, plan).grads["hits"])
    label = [1, 1, 1, 1] if multi else int(head.predict(torch.ones(1, 12))[0])
    rows = (np.ones(12), 1e14 * np.ones(12), np.full(12, np.nan), np.full(12, np.inf), np.zeros(12))
    moved = [
        float(hits(IntegerStream(joined(stream, row, label)).blocks(), head, plan).grads["hits"])
        - before
        for row in rows
    ]
    assert all(0 <= by <= 1 for by in moved) and moved[0] > 0.99 and moved[2] == moved[3] == 0
    broken = Head(torch.full((4, 12), torch.nan), torch.zeros(4))
    assert 0 <= float(hits(IntegerStream(stream).blocks(), broken, plan).grads["hits"]) <= 50


def test_a_record_of_several_classes_is_right_with_any_of_them() -> None:
    stream = stream_of(50, multi=True)
    head = Head(torch.zeros(4, 12), torch.tensor([0.0, 0.0, 1.0, 0.0]))
    counted = float(
        hits(IntegerStream(stream).blocks(), head, run_plans(plan_of(50))[1]).grads["hits"]
    )
    assert counted == pytest.approx(multi_label(50)[:, 2].sum(), rel=1e-4)


def test_it_is_charged_once_before_a_record_is_read() -> None:
    events: list[str] = []

    class Watched(FeatureStream):
        def blocks(self, rows: np.ndarray | None = None):  # type: ignore[no-untyped-def]
            events.append("read")
            return super().blocks(rows)

    stream = stream_of(60, unit=True)

    def head_of(watched: FeatureStream, releases: Releases) -> Head:
        if len(watched.feature_ND) == 60 and watched.feature_ND is stream.feature_ND:
            events.append("read")
        return useless(watched, releases)

    def charged() -> int:
        events.append("charge")
        return 0

    select_head(
        stream,
        [Candidate("a", head_of), Candidate("b", head_of)],
        plan_of(60, mean_runs=9.0),
        charged,
        key=Key.for_tests(bytes([3] * 32)),
    )
    assert events[0] == "charge" and events.count("charge") == 1 and "read" in events

    def refused() -> int:
        raise PrivacyError("ledger: no")

    events.clear()
    with pytest.raises(PrivacyError, match="ledger"):
        select_head(
            stream, [Candidate("a", head_of), Candidate("b", head_of)], plan_of(60), refused
        )
    assert events == []


def test_more_records_than_declared_are_refused_while_it_costs_nothing() -> None:
    """Poisson draws take 1% more than declared, the score's full batch does not: epsilon was spent,
    and the run then ended with an error.
    """
    config = PrivacyConfig(200, 100, 1, noise_multiplier=3.0)
    plan = make_plan(config, ask_selection(config, mean_runs=3.0))

    def charged() -> int:
        raise AssertionError("charged")

    with pytest.raises(PrivacyError, match=f"{OPERATOR_ONLY}a full batch of 201 records"):
        select_head(stream_of(201, unit=True), [GOOD, BAD], plan, charged)


def test_an_impossible_setting_is_refused_while_it_costs_nothing() -> None:
    charged: list[int] = []

    def count() -> int:
        charged.append(1)
        return 0

    stream = stream_of(60, unit=True)
    with pytest.raises(ConfigError, match="one_step"):
        select_head(stream, [GOOD, Candidate("one step", one_step)], plan_of(60, steps=2), count)
    for wrong in ([GOOD], [GOOD, GOOD], []):
        with pytest.raises(ConfigError, match="two or more"):
            select_head(stream, wrong, plan_of(60), count)
    with pytest.raises(PrivacyError, match="selection"):
        select_head(
            stream,
            [GOOD, BAD],
            make_plan(PrivacyConfig(60, 60, 1, noise_multiplier=3.0, sampling="full_batch")),
            count,
        )
    assert charged == []


def test_no_run_at_all_releases_nothing() -> None:
    """Poisson with mean 1.1 draws no run one time in three."""
    stream, plan = stream_of(40, unit=True), plan_of(40, mean_runs=1.1, shape=None)
    found = [
        select_head(stream, [GOOD, BAD], plan, charge, key=Key.for_tests(seed.to_bytes(32, "big")))
        for seed in range(40)
    ]
    assert 4 <= sum(one is None for one in found) <= 26


def test_a_used_up_plan_selects_nothing(tmp_path: Path) -> None:
    write_scenes(tmp_path / "store", 2)
    plan = plan_of(50)
    with Ledger.open(tmp_path / "store", "a", plan, resume=False) as ledger:
        assert select_head(stream_of(50, unit=True), [GOOD, BAD], plan, ledger.append) is not None
        assert ledger.steps == 1
        with pytest.raises(PrivacyError, match="used up"):
            select_head(stream_of(50, unit=True), [GOOD, BAD], plan, ledger.append)
    with (
        Ledger.open(tmp_path / "store", "a", plan, resume=True) as ledger,
        pytest.raises(PrivacyError, match="used up"),
    ):
        select_head(stream_of(50, unit=True), [GOOD, BAD], plan, ledger.append)


def test_nothing_tells_how_many_runs_there_were(capfd: pytest.CaptureFixture[str]) -> None:
    best = select_head(stream_of(40, unit=True), [GOOD, BAD], plan_of(40), charge)
    assert best is not None and capfd.readouterr() == ("", "")
    assert {field.name for field in dataclasses.fields(best)} == {"head", "candidate", "score"}


def test_clip_norms_may_differ_between_candidates() -> None:
    """The noise follows the clip norm, so that the price is the same: a head of noise alone scales
    with it.
    """
    empty = FeatureStream(np.zeros((0, 12), dtype=np.float32), np.zeros(0, dtype=np.int64), 4)
    run_plan, score_plan = run_plans(plan_of(100, steps=2))

    def last(stream: FeatureStream, releases: Releases) -> Head:
        from dpvision.config import OptimConfig

        return many_steps(
            stream,
            releases,
            optim=OptimConfig(name="sgd", learning_rate=1.0, momentum=0.0, weight_decay=0.0),
        ).last

    small, large = (
        select_module._run(
            empty, Candidate("x", last, norm), run_plan, score_plan, Key.for_tests(bytes(32)), 0
        ).head.weight_KD
        for norm in (None, 8.0)
    )
    torch.testing.assert_close(large, 8 * small)
