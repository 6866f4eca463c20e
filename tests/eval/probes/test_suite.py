import io
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dpvision.data.importer import import_samples
from dpvision.data.open import open_store
from dpvision.data.person_names import PersonRule
from dpvision.data.sources import Sample
from dpvision.data.split import split_store
from dpvision.data.store import Store
from dpvision.data.synthetic_store import write_scenes
from dpvision.errors import CheckpointError, ConfigError, DataError
from dpvision.eval.probes.knn import KNN
from dpvision.eval.probes.linear_probe import Linear
from dpvision.eval.probes.own_head import OwnHead
from dpvision.eval.probes.protocol import score_features
from dpvision.eval.probes.protocols import PROTOCOLS, make_protocols
from dpvision.eval.probes.records import LabelledFeatures, check_labels, evaluation_rows, units
from dpvision.eval.probes.ridge import Ridge
from dpvision.eval.probes.settings import (
    FewShotProbeSettings,
    FineTuneSettings,
    LarsSettings,
    ProtocolSettings,
)
from dpvision.eval.probes.suite import evaluate
from dpvision.eval.score import Score
from dpvision.eval.score_file import read_scores, write_scores
from dpvision.eval.scored_run import with_averages

from ..conftest import MakeRun

SCORE = Score("encoder", 0.5, 0.4, 0.6, 100, 0.1, "linear probe, mean", "public")


def _store(path: Path, labels: list[str | None], person: list[str] | None = None) -> Store:
    """Public store of small random images."""
    rng = np.random.Generator(np.random.PCG64(0))
    samples = []
    for i, label in enumerate(labels):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(file, "PNG")
        fields = {"label": label, "person": person[i] if person else None}
        samples.append(
            Sample(
                f"k{i}",
                file.getvalue(),
                {name: value for name, value in fields.items() if value is not None},
            )
        )
    return import_samples(
        samples, path, public=True, people=PersonRule("person" if person else None)
    )


def test_baselines_stand_beside_every_score(
    make_run: MakeRun, train_store: Store, test_store: Store
) -> None:
    seen: list[str] = []
    scores = evaluate(
        make_run(), train_store, test_store, batch_size=64, workers=1, progress=seen.append
    )
    expected = {("raw pixels", "pixels")} | {
        (name, pooling) for name in ("encoder", "random weights") for pooling in ("mean", "2x2")
    }
    for protocol in ("k-NN, k=20, cosine", "linear probe"):
        found = {
            (s.name, s.protocol.rsplit(", ", 1)[1])
            for s in scores
            if s.protocol.startswith(protocol)
        }
        assert found == expected
    chance = np.bincount(test_store.labels).max() / 80
    assert all(
        0 <= s.low <= s.value <= s.high <= 1
        and s.n == 80
        and s.chance == chance
        and s.visibility == "public"
        for s in scores
    )
    assert (
        "features of training images: 240 of 240" in seen
        and "features of test images: 80 of 80" in seen
    )
    assert (
        len({s.value for s in scores}) > 3
    )  # encoder and random weights are different models here


@pytest.mark.slow
def test_scores_are_the_same_every_time(
    make_run: MakeRun, train_store: Store, test_store: Store
) -> None:
    run = make_run()
    assert evaluate(run, train_store, test_store, workers=1) == evaluate(
        run, train_store, test_store, batch_size=256, workers=2
    )


def test_features_that_hold_the_label_score_one_and_noise_scores_chance() -> None:
    rng = np.random.Generator(np.random.PCG64(0))

    def part(n: int) -> LabelledFeatures:
        label = rng.integers(0, 4, n)
        noise = torch.from_numpy(rng.standard_normal((n, 6))).float()
        oracle = noise.clone()
        oracle[:, :4] += 20 * torch.nn.functional.one_hot(torch.from_numpy(label), 4)
        return LabelledFeatures(
            {("oracle", "x"): oracle, ("noise", "x"): noise}, torch.from_numpy(label), np.arange(n)
        )

    for score in score_features(part(800), part(400), (KNN(5), Linear(), Ridge())):
        if score.name == "oracle":
            assert score.value == 1
        else:
            assert score.low < 0.3 and score.high > 0.2


def test_scores_are_private_when_a_store_or_the_encoder_is(
    make_run: MakeRun, train_store: Store, test_store: Store, tmp_path: Path
) -> None:
    private = write_scenes(
        tmp_path / "private", 300, 16, first=900, public=False
    )  # all classes on both sides
    run = make_run()
    for pair in ((private, test_store), (train_store, private), (private, None)):
        assert {s.visibility for s in evaluate(run, *pair, protocols=(KNN(),), workers=1)} == {
            "private"
        }


def test_scores_of_an_encoder_without_guarantee_are_private(
    make_run: MakeRun, train_store: Store, test_store: Store
) -> None:
    scores = evaluate(
        make_run(wholly_confidential=True), train_store, test_store, protocols=(KNN(),), workers=1
    )
    assert {s.visibility for s in scores} == {"private"}


def test_a_single_store_is_split_by_persons_the_same_way_each_time(tmp_path: Path) -> None:
    store = _store(
        tmp_path / "store",
        [f"c{i % 3}" for i in range(300)],
        person=[f"p{i // 3}" for i in range(300)],
    )
    train, test = evaluation_rows(store, None)
    assert sorted([*train, *test]) == list(range(300))
    assert not set(units(store)[train]) & set(units(store)[test])
    assert 0.0 < len(test) / 300 < 0.4  # by the store's random id: five deviations around 0.2
    again = evaluation_rows(store, None)
    assert (again[0] == train).all() and (again[1] == test).all()


def test_records_without_a_label_are_left_out(tmp_path: Path) -> None:
    store = _store(tmp_path / "store", [None if i % 4 == 0 else f"c{i % 2}" for i in range(80)])
    rows = np.concatenate(evaluation_rows(store, None))
    assert len(rows) == 60 and (store.labels[rows] >= 0).all()


def test_two_halves_of_a_store_are_accepted(train_store: Store, tmp_path: Path) -> None:
    parent = _store(tmp_path / "store", [f"c{i % 2}" for i in range(60)])
    halves = split_store(parent.path, tmp_path / "a", tmp_path / "b", 0.7)
    train, test = evaluation_rows(*halves)
    assert len(train) + len(test) == 60


def test_unfit_stores_are_refused(make_run: MakeRun, train_store: Store, tmp_path: Path) -> None:
    run = make_run()
    with pytest.raises(DataError, match=r"has no labels.*--label-from"):
        evaluate(run, _store(tmp_path / "unlabelled", [None] * 30), workers=1)
    with pytest.raises(
        DataError, match=r"1 class among the training labels \('a', \d+ images\); expected two"
    ):
        evaluate(
            run, _store(tmp_path / "one", ["a"] * 200), workers=1
        )  # of 30, one in a thousand stores has no held-out record
    with pytest.raises(DataError, match=r"classes of the stores differ"):
        evaluate(run, train_store, _store(tmp_path / "other", ["a", "b"] * 10), workers=1)
    with pytest.raises(DataError, match=r"shares records.*Give only --train"):
        evaluate(run, train_store, train_store, workers=1)
    with pytest.raises(DataError, match=r"has 1 labelled records; expected more"):
        evaluate(run, _store(tmp_path / "tiny", ["a"]), workers=1)


def test_labels_that_training_lacks_are_refused() -> None:
    def part(labels: list[int]) -> LabelledFeatures:
        return LabelledFeatures(
            {("f", "x"): torch.zeros(len(labels), 2)}, torch.tensor(labels), np.arange(len(labels))
        )

    with pytest.raises(DataError, match=r"labels \[3\] that the training store lacks"):
        score_features(part([0, 1, 2]), part([0, 3]), (KNN(1),))


def test_weights_that_are_not_finite_are_refused(
    make_run: MakeRun, train_store: Store, test_store: Store
) -> None:
    with pytest.raises(DataError, match=r"features of encoder are not finite for 240 records"):
        evaluate(make_run(poison=True), train_store, test_store, workers=1)


def test_unknown_settings_are_refused(make_run: MakeRun, train_store: Store) -> None:
    run = make_run()
    with pytest.raises(ConfigError, match="k=0; expected at least 1"):
        KNN(0)
    with pytest.raises(ConfigError, match=r"protocols=\(\); expected some"):
        evaluate(run, train_store, protocols=())


def test_private_scores_lie_under_confidential(make_run: MakeRun) -> None:
    run = make_run()
    private = replace(SCORE, protocol="k-NN", visibility="private")
    write_scores(run, [SCORE, private], train_data="a", test_data="b")
    assert [Score.from_dict(e) for e in read_scores(run / "scores.json")] == [SCORE]
    assert [Score.from_dict(e) for e in read_scores(run / "confidential" / "scores.json")] == [
        private
    ]


def test_a_new_score_replaces_its_predecessor_and_no_other(make_run: MakeRun) -> None:
    run = make_run()
    write_scores(run, [SCORE], train_data="a", test_data="b")
    write_scores(run, [SCORE], train_data="a", test_data="c")
    better = replace(SCORE, value=0.55)
    write_scores(run, [better], train_data="a", test_data="b")
    assert {(e["test_data"], e["value"]) for e in read_scores(run / "scores.json")} == {
        ("b", 0.55),
        ("c", 0.5),
    }


def test_scores_of_a_wholly_confidential_run_stay_there(make_run: MakeRun) -> None:
    run = make_run(wholly_confidential=True)
    assert write_scores(run, [SCORE], train_data="a", test_data="b") == [
        run / "confidential" / "scores.json"
    ]
    assert not (run / "scores.json").exists()


def test_damaged_scores_and_missing_runs_are_refused(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    for text in ("[{", json.dumps([{"name": "x"}]), "3"):
        (run / "scores.json").write_text(text)
        with pytest.raises(CheckpointError, match="cannot be read"):
            write_scores(run, [SCORE], train_data="a", test_data="b")
    with pytest.raises(CheckpointError, match="is not a run"):
        write_scores(tmp_path / "nowhere", [SCORE], train_data="a", test_data="b")


@pytest.mark.slow
def test_every_protocol_has_its_score_and_controls_join_where_they_can(
    make_run: MakeRun, train_store: Store, test_store: Store
) -> None:
    protocols = make_protocols(
        [name for name in PROTOCOLS if name not in ("own_head", "knn", "linear")],
        ProtocolSettings(
            shots=(2, 5),
            few_shot_probe=FewShotProbeSettings(draws=3),
            fine_tune=FineTuneSettings(draws=2, epochs=1, warmup_epochs=0, learning_rates=(1e-3,)),
            lars=LarsSettings(blrs=(0.1,), epochs=2, warmup_epochs=0, augment=False),
        ),
    )
    scores = evaluate(make_run(), train_store, test_store, protocols=protocols, workers=1)
    counts = Counter((s.protocol.split(",")[0], s.name) for s in scores)
    assert counts == {
        ("ridge probe", "encoder"): 2,
        ("ridge probe", "random weights"): 2,
        ("ridge probe", "raw pixels"): 1,
        ("LARS probe", "encoder"): 2,
        ("LARS probe", "random weights"): 2,
        ("LARS probe", "raw pixels"): 1,
        **{
            (f"{k}-shot fine-tuning", name): 1
            for k in (2, 5)
            for name in ("encoder", "random weights")
        },
        **{
            (f"{k}-shot linear probe", name): 2
            for k in (2, 5)
            for name in ("encoder", "random weights")
        },
        **{(f"{k}-shot linear probe", "raw pixels"): 1 for k in (2, 5)},
        **{
            (f"{k}-shot DP-Cap probe", name): 2
            for k in (2, 5)
            for name in ("encoder", "random weights")
        },
        **{(f"{k}-shot DP-Cap probe", "raw pixels"): 1 for k in (2, 5)},
    }
    assert len({(s.name, s.protocol) for s in scores}) == len(scores), (
        "two scores would overwrite each other in scores.json"
    )
    assert all(s.low <= s.value <= s.high for s in scores)


def test_controls_can_be_left_out(make_run: MakeRun, train_store: Store, test_store: Store) -> None:
    run = make_run()
    for against, names in (
        ((), {"encoder"}),
        (("pixels",), {"encoder", "raw pixels"}),
        (("random",), {"encoder", "random weights"}),
    ):
        assert {
            s.name
            for s in evaluate(
                run, train_store, test_store, protocols=(KNN(),), against=against, workers=1
            )
        } == names


def test_a_declared_metric_is_used_and_an_asked_one_wins(
    make_run: MakeRun, train_store: Store, test_store: Store, tmp_path: Path
) -> None:
    run = make_run()
    plain = evaluate(run, train_store, test_store, protocols=(KNN(),), against=(), workers=1)
    per_class = evaluate(
        run,
        train_store,
        test_store,
        protocols=(KNN(),),
        against=(),
        metric="mean_per_class",
        workers=1,
    )
    assert (
        per_class[0].protocol == "k-NN (mean per class), k=20, cosine, mean"
        and per_class[0].value != plain[0].value
    )
    declared = write_scenes(tmp_path / "declared", 240, 16)
    meta = json.loads((declared.path / "store.json").read_text())
    (declared.path / "store.json").write_text(json.dumps(meta | {"metric": "mean_per_class"}))
    declared = open_store(declared.path)
    assert (
        evaluate(run, declared, test_store, protocols=(KNN(),), against=(), workers=1) == per_class
    )
    assert (
        evaluate(
            run, declared, test_store, protocols=(KNN(),), against=(), metric="accuracy", workers=1
        )
        == plain
    )


def test_what_an_encoder_cannot_go_through_is_said_before_the_work(
    make_run: MakeRun, train_store: Store, test_store: Store
) -> None:
    said: list[str] = []
    for spec, protocol, words in [
        ("pixels", "fine_tune", r"no trainable weights.*few_shot_probe"),
        ("pixels", "linear_cls", r"no class token.*linear_lars"),
        ("pixels", "own_head", r"'pixels' has no head.*--protocols linear"),
    ]:
        with pytest.raises(ConfigError, match=words):
            evaluate(
                spec,
                train_store,
                test_store,
                protocols=make_protocols(["knn", protocol]),
                progress=said.append,
            )
    with pytest.raises(ConfigError, match=r"own_head: no test store; expected one.*--test STORE"):
        evaluate(make_run(), train_store, protocols=(OwnHead(),), progress=said.append)
    with pytest.raises(ConfigError, match=r"against='hog'; expected random, pixels, both or none"):
        evaluate("pixels", train_store, against=("hog",), progress=said.append)
    assert not said


def test_persons_on_both_sides_are_refused(tmp_path: Path) -> None:
    parent = _store(
        tmp_path / "store",
        [f"c{i % 2}" for i in range(60)],
        person=[f"p{i // 3}" for i in range(60)],
    )
    halves = []
    for name, rows in (
        ("a", slice(0, 31)),
        ("b", slice(31, 60)),
    ):  # person 10 has one record here and two there
        shutil.copytree(parent.path, tmp_path / name)
        np.save(tmp_path / name / "index.npy", parent.index[rows])
        meta = json.loads((tmp_path / name / "store.json").read_text())
        (tmp_path / name / "store.json").write_text(
            json.dumps(meta | {"num_records": len(parent.index[rows])})
        )
        halves.append(open_store(tmp_path / name))
    with pytest.raises(DataError, match=r"shares records \(or persons: 1\)"):
        evaluation_rows(*halves)


def test_a_label_without_a_name_is_refused(tmp_path: Path) -> None:
    store = _store(tmp_path / "store", [f"c{i % 3}" for i in range(30)])
    meta = json.loads((store.path / "store.json").read_text())
    (store.path / "store.json").write_text(json.dumps(meta | {"label_names": ["c0", "c1"]}))
    with pytest.raises(
        DataError, match=r"has label 2 \(10 images\) but 2 class names; expected labels 0 to 1"
    ):
        evaluation_rows(open_store(store.path), None)


def test_averages_are_those_of_runs_and_are_refused_where_no_encoder_has_any(
    make_run: MakeRun,
) -> None:
    run = str(make_run())
    assert with_averages([run, "pixels"], True) == [True, False]
    assert with_averages([run, "pixels"], False) == [False, False]
    with pytest.raises(ConfigError, match=r"--ema with pixels, hog; expected a run, .*Drop --ema"):
        with_averages(["pixels", "hog"], True)


def test_a_class_that_training_lacks_is_named_with_its_count() -> None:
    with pytest.raises(DataError, match=r"'dog': 3 test images, 0 to train on"):
        check_labels(torch.tensor([0, 2]), torch.tensor([0, 1, 1, 1]), ["cat", "dog", "emu"])
