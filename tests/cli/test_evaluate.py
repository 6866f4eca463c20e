"""``dpvision evaluate``: many encoders, protocols and places for scores, on a run that was never
trained.
"""

import json
import statistics
from pathlib import Path

import pytest

from dpvision.checkpoint import save_checkpoint, state_tensors
from dpvision.cli import main
from dpvision.cli.evaluate import _told_apart
from dpvision.config import MAEConfig, PrivacyConfig, RunConfig, ViTConfig, to_dict
from dpvision.data.open import open_store
from dpvision.data.synthetic_store import write_scenes
from dpvision.eval.probes.few_shot_probe import FewShotProbe
from dpvision.eval.probes.settings import FewShotProbeSettings
from dpvision.eval.probes.suite import evaluate
from dpvision.eval.score import Score
from dpvision.eval.score_file import read_scores
from dpvision.files import write_json
from dpvision.models import make_model


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("stores")
    write_scenes(root / "train", 160, 16)
    write_scenes(root / "test", 40, 16, first=500)
    write_scenes(root / "private", 160, 16, first=900, public=False)
    return {name: str(root / name) for name in ("train", "test", "private")}


def _run(root: Path, seed: int = 5) -> Path:
    config = RunConfig(
        recipe="vip.micro",
        privacy=PrivacyConfig(
            dataset_size=60, expected_batch_size=20, steps=4, noise_multiplier=2.0
        ),
        model=MAEConfig(
            encoder=ViTConfig(image_size=8, patch_size=2, depth=1, width=16, num_heads=2),
            decoder_depth=1,
            decoder_width=16,
            decoder_num_heads=2,
        ),
    )
    (root / "confidential").mkdir(parents=True)
    manifest = {
        "run_id": "r",
        "ledger_steps": 4,
        "updates": 4,
        "config": to_dict(config),
        "plan": {},
        "ledger_digest": "d",
        "lineage": [
            {"store_id": "s", "visibility": "private", "run_id": "r", "guarantee": {"epsilon": 8.0}}
        ],
    }
    save_checkpoint(
        root / "checkpoints" / "step-00000004",
        manifest,
        state_tensors(make_model(config.model, seed)),
    )
    write_json(root / "config.json", to_dict(config))
    return root


def _json(capsys: pytest.CaptureFixture[str], argv: list[str]) -> dict:
    status = main(["evaluate", *argv, "--workers", "1", "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out)


def test_each_runs_scores_go_to_the_run_and_all_to_one_file(
    stores: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, out = _run(tmp_path / "a"), _run(tmp_path / "b", seed=6), tmp_path / "scores.json"
    asked = [
        str(a),
        str(b),
        "--train",
        stores["train"],
        "--test",
        stores["test"],
        "--protocols",
        "knn,ridge",
        "--out",
        str(out),
    ]
    scores = _json(capsys, asked)["scores"]
    names = {s["name"] for s in scores}
    assert names == {str(a), str(b), "random weights", "raw pixels"}
    assert len(scores) == 2 * (2 * 2 + 2 + 1), "both runs' poolings, and each control once"
    for run in (a, b):
        assert {e["name"] for e in read_scores(run / "scores.json")} == {
            "encoder",
            "random weights",
            "raw pixels",
        }
    assert len(read_scores(out)) == len(scores) and all(
        e["test_data"] == "test" for e in read_scores(out)
    )
    _json(capsys, asked)
    assert len(read_scores(out)) == len(scores)


def test_private_scores_need_a_confidential_place_and_say_so(
    stores: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, asked = (
        _run(tmp_path / "a"),
        ["--train", stores["private"], "--protocols", "knn", "--against", "none", "--workers", "1"],
    )
    assert main(["evaluate", str(run), *asked, "--out", str(tmp_path / "scores.json")]) == 2
    assert "expected a folder called confidential in its path" in capsys.readouterr().err
    out = tmp_path / "confidential" / "scores.json"
    out.parent.mkdir()
    assert main(["evaluate", str(run), *asked, "--out", str(out)]) == 0
    assert "not printed where others may read" in capsys.readouterr().out
    assert {e["visibility"] for e in read_scores(out)} == {"private"} and not (
        run / "scores.json"
    ).exists()


def test_no_cache_leaves_nothing_in_the_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = write_scenes(tmp_path / "s", 160, 16).path
    asked = [
        str(_run(tmp_path / "a")),
        "--train",
        str(store),
        "--protocols",
        "knn",
        "--against",
        "none",
    ]
    first = _json(capsys, [*asked, "--no-cache"])
    assert not (store / "confidential" / "features").exists()
    assert (
        _json(capsys, asked)["scores"] == first["scores"]
        and (store / "confidential" / "features").exists()
    )


@pytest.mark.slow
def test_few_shot_and_lars_settings_reach_the_protocol(
    stores: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(_run(tmp_path / "a"))
    text = (
        f"{run} --train {stores['train']} --test {stores['test']} --protocols "
        "few_shot_probe,linear_lars,fine_tune --against none"
    )
    text += (
        " --shots 2 3 --few-shot-probe.draws 2 --lars.epochs 2 --lars.warmup-epochs 1 "
        "--lars.blrs 0.5 --lars.no-augment"
    )
    text += (
        " --fine-tune.epochs 1 --fine-tune.warmup-epochs 0 --fine-tune.draws 2 --metric "
        "mean_per_class"
    )
    protocols = [s["protocol"] for s in _json(capsys, text.split())["scores"]]
    assert any(
        p.startswith("3-shot linear probe (mean per class), 2 draws, 2x2") for p in protocols
    )
    assert any(
        p.startswith("LARS probe (mean per class), 2 epochs, batch 160, blr 0.5, no augmentation")
        for p in protocols
    )
    assert any(
        p.startswith("2-shot fine-tuning (mean per class), AdamW") and "1 epochs" in p
        for p in protocols
    )
    assert main(["evaluate", *text.split(), "--workers", "1"]) == 0
    assert "Student's over the draws" in capsys.readouterr().out


def test_wrong_input_gets_one_clear_error(
    stores: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, train = str(_run(tmp_path / "a")), ["--train", stores["train"]]
    (tmp_path / "bad.json").write_text("[{")
    for argv, words in [
        (train, "no encoder; expected one or more"),
        ([str(tmp_path / "nowhere"), *train], "nowhere"),
        ([run, "hgo", *train], "encoder: 'hgo'; expected a run folder"),
        (
            [run, *train, "--protocols", "knn,k-nn"],
            "protocols='knn,k-nn'; expected some of knn, linear",
        ),
        ([run, *train, "--protocols", ""], "expected some of knn"),
        ([run, *train, "--against", "hog"], "against='hog'; expected random, pixels, both or none"),
        (
            [run, *train, "--metric", "top5"],
            "metric='top5'; expected one of accuracy, mean_per_class",
        ),
        (
            [run, *train, "--protocols", "few_shot_probe", "--shots", "500"],
            "expected 500 training images of each class",
        ),
        ([run, *train, "--protocols", "fine_tune", "--shots", "0"], "shots=(0,)"),
        ([run, *train, "--protocols", "own_head"], "own_head: no test store"),
        ([run, *train, "--test", stores["train"]], "shares records"),
        ([run, *train, "--out", str(tmp_path / "no" / "s.json")], "expected an existing folder"),
        ([run, *train, "--out", str(tmp_path / "scores.csv")], "ends in .json"),
        ([run, *train, "--out", str(tmp_path / "bad.json")], "cannot be read"),
        ([run, *train, "--lars.epochs", "3"], "warmup_epochs=10; expected 0 to epochs - 1"),
        ([run, "--train", str(tmp_path)], "store"),
        ([run, *train, "--batch-size", "0"], "batch_size=0; expected at least 1"),
        (
            [run, "--test", stores["test"], "--batch-size", "-1"],
            "batch_size=-1; expected at least 1",
        ),
        ([run, *train, "--workers", "0"], "workers=0; expected at least 1"),
    ]:
        try:
            status = main(["evaluate", *argv, *([] if "--workers" in argv else ["--workers", "1"])])
        except SystemExit as stop:  # tyro's own exit on wrong usage
            status = stop.code if isinstance(stop.code, int) else 1
        err = capsys.readouterr().err
        assert status == 2 and "Traceback" not in err, (argv, err)
        assert words in " ".join(err.replace("│", " ").split()), (argv, err)


def test_a_baseline_that_differs_between_encoders_is_named_by_its_encoder() -> None:
    """Raw pixels at two sizes had one name, and one entry in --out."""

    def scores(*values: float) -> list[Score]:
        names = ("encoder", "raw pixels")
        return [
            Score(name, value, 0.0, 1.0, 10, 0.1, "k-NN", "public")
            for name, value in zip(names, values, strict=True)
        ]

    found = {"a": scores(0.5, 0.2), "b": scores(0.6, 0.3), "c": scores(0.7, 0.2)}
    assert {score.name: score.value for score in _told_apart(found)} == {
        **{"a": 0.5, "b": 0.6, "c": 0.7},
        **{"raw pixels, for a": 0.2, "raw pixels, for b": 0.3},
    }
    del found["b"]
    assert [score.name for score in _told_apart(found)] == ["a", "raw pixels", "c"]


def test_seeds_give_the_mean_of_the_protocols_own_seeds(
    stores: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against the same protocol called once for each seed; k-NN, which draws nothing, has no
    deviation.
    """
    argv = ["pixels", "--train", stores["train"], "--test", stores["test"], "--against", "none"]
    few = ["--shots", "4", "--few-shot-probe.draws", "2"]
    said = _json(capsys, [*argv, "--protocols", "knn,few_shot_probe", *few, "--seeds", "3"])
    scores = {score["protocol"].split(",")[0]: score for score in said["scores"]}
    alone = [
        evaluate(
            "pixels",
            open_store(stores["train"]),
            open_store(stores["test"]),
            protocols=[FewShotProbe((4,), FewShotProbeSettings(draws=2), seed=seed)],
            against=(),
            workers=1,
        )[0].value
        for seed in range(3)
    ]
    assert len(set(alone)) > 1
    found = scores["4-shot linear probe"]
    assert found["value"] == pytest.approx(statistics.mean(alone))
    assert found["std"] == pytest.approx(statistics.stdev(alone))
    assert scores[next(name for name in scores if "NN" in name)]["std"] == 0
    once = _json(capsys, [*argv, "--protocols", "few_shot_probe", *few])
    assert once["scores"][0]["value"] == pytest.approx(alone[0]) and "std" not in once["scores"][0]


def test_seeds_of_own_heads_and_one_seed_are_refused(
    stores: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", "runs/a", "--test", stores["test"], "--seeds", "3"]) == 2
    assert "dpvision adapt --seeds" in capsys.readouterr().err
    assert main(["evaluate", "pixels", "--train", stores["train"], "--seeds", "1"]) == 2
    assert "--seeds 1; expected 2 or more" in capsys.readouterr().err
