"""`dpvision adapt`, as a newcomer uses it: from images to a statement, and one clear error for each
mistake.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from dpvision.adapt.defaults import MOST_STEPS
from dpvision.checkpoint import find_checkpoint, read_manifest
from dpvision.cli import main
from dpvision.data.import_labels import LabelRule
from dpvision.data.importer import import_samples
from dpvision.data.open import open_store
from dpvision.data.sources import Sample
from dpvision.data.store import Store
from dpvision.data.synthetic_store import write_scenes
from dpvision.encoders import open as open_module
from dpvision.encoders.classifier import load_classifier
from dpvision.encoders.feature_file import feature_array
from dpvision.privacy.ledger_format import read_ledger
from dpvision.recipes import RECIPES
from dpvision.synthetic.scenes import make_scene

from ..adapt.lineage_runs import untrained_run
from ..adapt.runs_of_heads import write_digits
from ..eval.labelled import write_store
from ..statement.test_statement import problems

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "statement.schema.json").read_text())


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Store]:
    folder = tmp_path_factory.mktemp("stores")
    return write_digits(folder / "mine", 0, 900), write_digits(
        folder / "test", 900, 1400, public=True
    )


def _argv(store: Store, root: Path, *more: str) -> list[str]:
    return [
        "adapt",
        "--data",
        str(store.path),
        "--encoder",
        "pixels",
        "--num-classes",
        "10",
        "--runs",
        str(root),
        "--name",
        "first",
        *more,
    ]


DECLARED = ["--dataset-size", "900", "--epsilon", "2"]


@pytest.mark.parametrize("more", [[], ["--optim.momentum", "0.5"]])
def test_the_encoder_is_opened_once(
    more: list[str],
    stores: tuple[Store, Store],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A network's weights are read once, though typed settings and the number of steps follow from
    what it is.
    """
    opened, real = [], open_module.open_encoder
    monkeypatch.setattr(
        open_module,
        "open_encoder",
        lambda spec, **settings: opened.append(spec) or real(spec, **settings),
    )
    assert (
        main(
            [
                *_argv(stores[0], tmp_path, "--dataset-size", "900", "--privacy.guarantee", "none"),
                *more,
                "--dry-run",
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["steps"] > 60, (
        "more steps than the preset's, so the plan was made again"
    )
    assert opened == ["pixels"]


def test_from_images_to_a_statement(
    stores: tuple[Store, Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, test = stores
    argv = _argv(mine, tmp_path, *DECLARED)
    assert main([*argv, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert (
        "epsilon 2 at" in said
        and "nothing was charged" in said
        and not (tmp_path / "first").exists()
    )
    # 900 records of 768 float32 numbers
    assert "768 dimensions per image" in said and "2.8 MB as float32 in the store's folder" in said
    assert main([*argv, "--test", str(test.path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (
        result["steps"] == read_ledger(tmp_path / "first" / "ledger.jsonl").steps
        and result["epsilon"] <= 2
        and result["reason"]
    )
    assert result["scores"][0]["value"] > 0.3 and result["scores"][0]["visibility"] == "public"
    assert main(["evaluate", str(tmp_path / "first"), "--test", str(test.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"] == result["scores"], (
        "the same question has the same answer"
    )
    assert main(["report", str(tmp_path / "first"), "--store", str(mine.path)]) == 0
    statement = json.loads((tmp_path / "first" / "statement.json").read_text())
    assert problems(statement, SCHEMA, "statement") == []
    text = json.dumps(statement) + (tmp_path / "first" / "report.html").read_text()
    assert str(tmp_path) not in text and str(mine.path) not in text, (
        "no path of the operator's machine"
    )
    assert (
        statement["settings"]["model"]["head"] == result["head"]
        and statement["settings"]["model"]["reason"] == result["reason"]
    )
    assert (
        statement["settings"]["model"]["encoder"]["name"] == "pixels"
        and "The head" in statement["scope"]["released"]
    )
    assert statement["guarantee"]["epsilon"] == pytest.approx(2.0, abs=1e-6)
    assert (
        main(["adapt", "--resume", "--runs", str(tmp_path), "--name", "first", "--quiet"]) == 0
    ), "finished: nothing is left to do"
    assert read_ledger(tmp_path / "first" / "ledger.jsonl").steps == result["steps"]


@pytest.mark.slow
def test_what_is_typed_overrides_what_auto_chose(
    stores: tuple[Store, Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = _argv(
        stores[0],
        tmp_path,
        "--dataset-size",
        "900",
        "--privacy.guarantee",
        "none",
        "--dry-run",
        "--json",
    )
    assert main(argv) == 0
    chosen = json.loads(capsys.readouterr().out)
    assert (
        chosen["head"] == "many_steps"
        and chosen["steps"] == MOST_STEPS
        and chosen["guarantee"] == "none"
    )
    for steps in ("5", "60"):
        assert main([*argv, "--privacy.steps", steps]) == 0
        assert json.loads(capsys.readouterr().out)["steps"] == int(steps)
    for other in (["--encoder", "patches"], ["--optim.learning-rate", "1"]):
        assert main([*argv, *other]) == 0
        assert json.loads(capsys.readouterr().out)["steps"] == 60
    assert main([*argv, "--head", "many_steps"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == MOST_STEPS
    assert main([*argv, "--head", "prototypes"]) == 0
    assert json.loads(capsys.readouterr().out)["head"] == "prototypes"


def test_under_a_noise_multiplier_adapt_has_the_steps_and_epsilon_of_plan(
    stores: tuple[Store, Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More steps are free only under a target epsilon: with fixed noise each costs epsilon."""
    declared = "--dataset-size 900 --expected-batch-size 900 --noise-multiplier 4 --json"
    assert main(["plan", "transfer.many_steps", *declared.split()]) == 0
    planned = json.loads(capsys.readouterr().out)
    argv = _argv(
        stores[0],
        tmp_path,
        "--dataset-size",
        "900",
        "--head",
        "many_steps",
        "--optim.momentum",
        "0",
        "--dry-run",
        "--json",
    )
    assert main([*argv, "--privacy.noise-multiplier", "4"]) == 0
    adapted = json.loads(capsys.readouterr().out)
    assert adapted["steps"] == planned["steps"] == 60 and adapted["epsilon"] == planned["epsilon"]
    assert main([*argv, "--epsilon", str(planned["epsilon"])]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] > 60, (
        "what the rate's rule asks for at this epsilon"
    )


@pytest.mark.slow
def test_a_private_score_chooses_among_heads_for_one_charge(
    stores: tuple[Store, Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, test = stores
    argv = _argv(mine, tmp_path, *DECLARED, "--select", "one_step,prototypes,least_squares")
    assert main([*argv, "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["selection"]["mean_runs"] == 10 and planned["candidates"] == [
        "one_step",
        "prototypes",
        "least_squares",
    ]
    assert main([*argv, "--test", str(test.path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (
        result["steps"] == 1
        and result["epsilon"] <= 2
        and result["head"] == result["chosen"]["candidate"]
    )
    run = tmp_path / "first"
    manifest = read_manifest(find_checkpoint(run))
    assert (
        manifest["config"]["model"]["head"] == result["head"]
        and manifest["chosen"] == result["chosen"]
    )
    assert "head_s" not in json.loads((run / "confidential" / "head.json").read_text())
    assert main(["report", str(run)]) == 0
    statement = json.loads((run / "statement.json").read_text())
    assert problems(statement, SCHEMA, "statement") == []
    # The released score is the chosen head's accuracy on the records it was fitted to, and noise
    # whose size the statement says.
    noise = statement["mechanism"]["selection"]["score_noise_multiplier"] / 900
    assert 0.003 < noise < 0.03 and abs(result["chosen"]["score"] - _accuracy(run, 900)) < 8 * noise
    assert statement["history"]["tuning"]["charged"] and statement["guarantee"][
        "epsilon"
    ] == pytest.approx(result["epsilon"])
    capsys.readouterr()
    assert main([*argv[:-1], "one_step,nothing", "--name", "second"]) == 2
    assert "'nothing'; expected names among one_step" in capsys.readouterr().err
    assert main([*argv, "--head", "prototypes", "--name", "second"]) == 2
    assert main([*argv[:-1], "one_step,feature_covariance", "--name", "second"]) == 2
    assert "expected 1 with head='one_step'" in capsys.readouterr().err
    assert not (tmp_path / "second").exists()


def _accuracy(run: Path, stop: int) -> float:
    """Of a run's classifier on the first digits."""
    classifier = load_classifier(run)
    pixels, labels = load_digits(return_X_y=True)
    grey = (pixels[:stop].reshape(-1, 8, 8, 1) * 15.9).astype(np.uint8).repeat(3, axis=3)
    predicted = (
        classifier(torch.from_numpy(np.stack([classifier.preprocess(x) for x in grey])))
        .argmax(dim=1)
        .numpy()
    )
    return float((predicted == labels[:stop]).mean())


def test_without_privacy_all_of_it_is_confidential(
    stores: tuple[Store, Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, test = stores
    argv = _argv(
        mine,
        tmp_path,
        "--dataset-size",
        "900",
        "--head",
        "least_squares",
        "--privacy.guarantee",
        "none",
    )
    assert main([*argv, "--test", str(test.path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (
        result["epsilon"] is None
        and result["scores"][0]["visibility"] == "private"
        and result["scores"][0]["value"] > 0.7
    )
    outside = [
        f
        for f in (tmp_path / "first").rglob("*")
        if f.is_file() and "confidential" not in f.parts and f.name != ".lock"
    ]
    assert not outside
    assert main(["report", str(tmp_path / "first")]) == 2
    assert "no guarantee and was trained on a private store" in capsys.readouterr().err


def test_the_lineage_of_an_encoder_of_ours_stands_in_the_statement(
    stores: tuple[Store, Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, _ = stores
    parent = untrained_run(
        tmp_path / "parent",
        "private",
        {"epsilon": 2.5, "epsilon_rdp": 2.6, "delta": 1e-5, "steps": 4},
    )
    argv = [*_argv(mine, tmp_path, *DECLARED), "--encoder", str(parent), "--head", "prototypes"]
    assert main(argv) == 0 and main(["report", str(tmp_path / "first")]) == 0
    statement = json.loads((tmp_path / "first" / "statement.json").read_text())
    assert problems(statement, SCHEMA, "statement") == []
    first, own = statement["history"]["lineage"]
    assert first["guarantee"]["epsilon"] == 2.5 and own["guarantee"]["epsilon"] == pytest.approx(
        2.0, abs=1e-6
    )
    assert str(tmp_path) not in json.dumps(statement)


def test_a_folder_named_as_an_encoder_is_not_taken_for_a_run(
    stores: tuple[Store, Store],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "pixels").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(_argv(stores[0], tmp_path, *DECLARED, "--dry-run", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["dry_run"]


def test_every_mistake_is_one_clear_error(
    stores: tuple[Store, Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, test = stores
    good = _argv(mine, tmp_path, *DECLARED)
    tainted = untrained_run(tmp_path / "tainted", "private", None)
    cases: list[tuple[list[str], str]] = [
        (
            _argv(mine, tmp_path, "--epsilon", "2"),
            "dataset_size is not declared.*Give --dataset-size 900",
        ),
        (
            _argv(mine, tmp_path, "--dataset-size", "800", "--epsilon", "2"),
            "declared dataset_size=800",
        ),
        (
            _argv(mine, tmp_path, "--dataset-size", "900", "--epsilon", "0"),
            "target_epsilon=0.0; expected a positive number",
        ),
        (
            _argv(mine, tmp_path, "--dataset-size", "900", "--epsilon", "nan"),
            "target_epsilon=nan; expected a positive number",
        ),
        ([*good, "--num-classes", "5"], "label=9 .*outside the range"),
        ([*good, "--num-classes", "1"], "num_classes=1; expected at least 2"),
        (
            [*good, "--encoder", "timm:resnet18"],
            "timm:resnet18 has no weights on this machine .*timm:resnet18@FILE",
        ),
        ([*good, "--encoder", "timm:resnet"], "one of its .* models"),
        ([*good, "--encoder", "runs/none"], "'runs/none'; expected a run folder"),
        ([*good, "--encoder", ""], "encoder: ''; expected a run folder"),
        ([*good, "--encoder", "tim:resnet18"], "'tim:resnet18'; expected a run folder"),
        (
            [*good, "--privacy.noise-multiplier", "2"],
            "--epsilon with --privacy.noise-multiplier; expected only one",
        ),
        ([*good, "--encoder", str(tainted)], "without a guarantee"),
        (
            [*good, "--encoder", str(tainted), "--model.encoder.image-size", "16"],
            "image_size=16; expected 8",
        ),
        ([*good, "--head", "one_step", "--privacy.steps", "3"], "steps=3; expected 1"),
        (
            ["adapt", "transfer.one_step", "--head", "prototypes", "--data", str(mine.path)],
            "expected one of the two",
        ),
        (
            ["adapt", "vip.micro", "--data", str(mine.path)],
            "vip.micro trains a 'mae'.*dpvision train vip.micro",
        ),
        (["train", "transfer.auto", "--data", str(mine.path)], "Use `dpvision adapt transfer.auto"),
        (["evaluate", str(tainted), "--test", str(test.path)], "has no head of its own"),
        (["evaluate", "pixels", "--test", str(test.path)], "has no head of its own"),
        (["adapt", "--resume", "--runs", str(tmp_path / "nowhere")], "holds no run"),
    ]
    before = _charged(mine, test)
    for argv, said in cases:
        assert main(argv) == 2, argv
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1 and re.search(said, err), (
            argv,
            err,
        )
    assert not (tmp_path / "first").exists() and _charged(mine, test) == before, (
        "nothing is charged"
    )


def _charged(*stores: Store) -> dict[Path, bytes]:
    """All ledgers beside the stores."""
    return {f: f.read_bytes() for s in stores for f in (s.path.parent / "LEDGERS").rglob("*.jsonl")}


def test_a_head_is_no_encoder_and_the_error_names_the_one_below(
    stores: tuple[Store, Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = _argv(stores[0], tmp_path, *DECLARED, "--head", "prototypes", "--quiet")
    assert main(argv) == 0
    before = _charged(stores[0])
    capsys.readouterr()
    assert main([*argv, "--encoder", str(tmp_path / "first"), "--name", "second"]) == 2
    err = capsys.readouterr().err
    assert (
        "is a head on frozen features" in err
        and "Use its encoder 'pixels'" in err
        and err.count("\n") == 1
    )
    assert _charged(stores[0]) == before and not (tmp_path / "second").exists()


def test_resume_needs_no_more_than_the_name(
    stores: tuple[Store, Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = _argv(stores[0], tmp_path, *DECLARED, "--head", "one_step", "--quiet")
    assert main(argv) == 0
    resume = ["adapt", "--resume", "--runs", str(tmp_path), "--name", "first", "--json"]
    capsys.readouterr()
    assert main(resume) == 0
    assert json.loads(capsys.readouterr().out)["head"] == "one_step"
    assert main([*resume, "--head", "prototypes"]) == 2, "what is named is held to"
    assert "expected 'transfer.one_step', the recipe of" in capsys.readouterr().err


@pytest.mark.parametrize(
    "recipe", ["transfer.one_step", pytest.param("supervised.micro", marks=pytest.mark.slow)]
)
def test_a_store_that_cannot_be_written_beside_leaves_the_name_free(
    recipe: str,
    stores: tuple[Store, Store],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As the system would refuse it; a test may run as the one user whom it does not refuse."""
    if recipe == "supervised.micro":
        argv = [
            "train",
            recipe,
            "--data",
            str(stores[0].path),
            "--name",
            "first",
            "--runs",
            str(tmp_path),
            "--model.num-classes",
            "10",
        ]
        argv += [
            "--privacy.dataset-size",
            str(stores[0].num_records),
            "--privacy.expected-batch-size",
            "20",
            "--privacy.steps",
            "2",
        ]
        argv += ["--optim.warmup-steps", "1", "--quiet"]
    else:
        argv = _argv(stores[0], tmp_path, *DECLARED, "--quiet")
    denied = PermissionError(13, "Permission denied", "x/LEDGERS")
    with monkeypatch.context() as patch:
        patch.setattr(
            "dpvision.privacy.ledger.make_folders", lambda _: (_ for _ in ()).throw(denied)
        )
        assert main(argv) == 2
    err = capsys.readouterr().err
    assert "x/LEDGERS (Permission denied); expected write access" in err and err.count("\n") == 1
    assert not (tmp_path / "first").exists()
    if recipe != "supervised.micro":  # two steps of a network take longer
        assert main(argv) == 0, "the name is free, and the store as it was"


def test_an_encoder_whose_features_are_no_numbers_is_refused_before_the_charge(
    stores: tuple[Store, Store],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A few records without numbers contribute zero (tests/adapt); an encoder that has none for
    anybody is broken.
    """

    def broken(*args: object, **kwargs: object) -> np.ndarray:
        return np.full_like(feature_array(*args, **kwargs), np.nan)  # type: ignore[arg-type]

    monkeypatch.setattr("dpvision.adapt.session.feature_array", broken)
    assert main(_argv(stores[0], tmp_path, *DECLARED, "--quiet")) == 2
    assert "error: features: non-finite for all 900 records" in capsys.readouterr().err
    run_id = json.loads((tmp_path / "first" / "run.json").read_text())["run_id"]
    ledger = stores[0].path.parent / "LEDGERS" / stores[0].store_id / f"{run_id}.jsonl"
    assert read_ledger(ledger).steps == 0


def test_an_empty_class_is_noted_of_public_images_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unlabelled images count for no class, in stores of one label and of several."""
    rng = np.random.default_rng(0)
    images = write_store(
        tmp_path / "images", list(rng.integers(0, 255, (60, 8, 8, 3), dtype=np.uint8)), ["0"] * 60
    )
    rule = LabelRule(classes=("a", "b", "c", "d"), unknown_classes="unlabelled")
    for public in (True, False):
        for name, labels, more in (
            ("one", ["a", "b", "e"], []),
            ("several", [["a"], ["b"], ["e"]], ["--model.multi-label"]),
        ):
            samples = (Sample(f"k{i}", images.read(i), {"label": labels[i % 3]}) for i in range(60))
            store = import_samples(
                samples, tmp_path / f"{public} {name}", public=public, labels=rule
            )
            argv = [
                "adapt",
                "--data",
                str(store.path),
                "--encoder",
                "pixels",
                "--num-classes",
                "4",
                "--dataset-size",
                "60",
                "--dry-run",
            ]
            assert main([*argv, *more]) == 0
            assert (
                "2 declared classes have no image in this public store: 2, 3"
                in capsys.readouterr().out
            ) is public


def _scenes_with_colours(folder: Path, first: int, count: int) -> Path:
    """Images with a table of which of four colours are in each; "none of them" is an empty cell."""
    folder.mkdir()
    lines = ["file_name,colours"]
    for i in range(first, first + count):
        scene = make_scene(i, 16)
        Image.fromarray(scene.image).save(folder / f"{i}.png")
        colours = sorted(
            {thing.colour for thing in scene.objects} & {"red", "green", "blue", "yellow"}
        )
        lines.append(f"{i}.png,{'|'.join(colours)}")
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.slow
def test_images_of_several_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, test, one = (str(tmp_path / name) for name in ("mine", "test", "one"))
    (tmp_path / "colours.txt").write_text("blue\ngreen\nred\nyellow\n")
    by_colour = [
        "--label-from",
        "colours",
        "--label-separator",
        "|",
        "--classes",
        str(tmp_path / "colours.txt"),
    ]
    assert (
        main(
            ["data", "import", str(_scenes_with_colours(tmp_path / "a", 0, 200)), mine, *by_colour]
        )
        == 0
    )
    assert (
        "several labels per record" in (said := capsys.readouterr().out)
        and "--model.multi-label" in said
    )
    assert (
        main(
            [
                "data",
                "import",
                str(_scenes_with_colours(tmp_path / "b", 900, 80)),
                test,
                "--public",
                *by_colour,
            ]
        )
        == 0
    )
    write_scenes(one, 30, 16, first=2000)
    argv = [
        "adapt",
        "--data",
        mine,
        "--encoder",
        "pixels",
        "--num-classes",
        "4",
        "--dataset-size",
        "200",
        "--privacy.guarantee",
        "none",
        "--runs",
        str(tmp_path),
        "--name",
        "first",
        "--json",
    ]
    several = [*argv, "--model.multi-label"]
    capsys.readouterr()
    assert (
        main([*argv, "--test", test]) == 2
        and "several labels a record; expected one" in capsys.readouterr().err
    )
    assert (
        main([*several, "--test", one]) == 2
        and "one label per record; expected several" in capsys.readouterr().err
    )
    assert not (tmp_path / "first").exists(), (
        "a test that cannot be made is said before the budget is spent"
    )
    assert main([*several, "--test", test]) == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert (
        "mean average precision of 4 classes" in scores[0]["protocol"]
        and scores[0]["low"] <= scores[0]["value"] <= scores[0]["high"]
    )
    assert scores[0]["value"] > scores[0]["chance"] + 0.1
    assert main(["evaluate", str(tmp_path / "first"), "--test", test, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"] == scores, (
        "the same question has the same answer"
    )


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in RECIPES
        if name.startswith("transfer.") and RECIPES[name]().model.kind == "head"
    ],
)
def test_a_head_recipe_declares_nothing_in_a_persons_place(name: str) -> None:
    config = RECIPES[name]()
    assert (
        config.model.kind == "head"
        and config.privacy.dataset_size == 1
        and config.model.num_classes is None
    )  # type: ignore[union-attr]


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["adapt", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "You declare three public numbers",
        "Nothing is downloaded",
        "transfer.least_squares",
        "--epsilon",
        "--encoder",
    ):
        assert words in said
    with pytest.raises(SystemExit) as stopped:
        main(["adapt"])
    assert stopped.value.code == 2 and "--num-classes K" in capsys.readouterr().out


def test_the_pages_five_lines_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they stand in docs/adapt.md, on digits in class folders; with an encoder that needs no
    minute of learning, and the number of records that the split gave.
    """
    for i, (x, label) in enumerate(zip(*load_digits(return_X_y=True), strict=True)):
        (tmp_path / "IMAGES" / str(label)).mkdir(parents=True, exist_ok=True)
        grey = Image.fromarray((x.reshape(8, 8) * 15.9).astype(np.uint8)).convert("RGB")
        grey.save(tmp_path / "IMAGES" / str(label) / f"{i}.png")
    page = (Path(__file__).parents[2] / "docs" / "adapt.md").read_text()
    lines = [
        line.removeprefix("    dpvision ")
        for line in page.splitlines()
        if line.startswith("    dpvision ")
    ]
    assert len(lines) == 5
    monkeypatch.chdir(tmp_path)
    (tmp_path / "classes.txt").write_text("".join(f"{digit}\n" for digit in range(10)))
    for line in lines:
        more = []
        if line.startswith("adapt"):
            more = [
                "--encoder",
                "pixels",
                "--dataset-size",
                str(open_store("stores/mine").num_records),
            ]
        assert main([*line.split(), *more]) == 0, capsys.readouterr().err
    (score, *_) = json.loads(
        (tmp_path / "runs" / "first" / "confidential" / "scores.json").read_text()
    )
    assert score["value"] > 0.3 and (tmp_path / "runs" / "first" / "report.html").exists()


def test_seeds_of_public_images_make_a_run_each_and_print_their_mean(
    stores: tuple[Store, Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mean and deviation are those of the runs' own score files; each run has its seed and its
    ledger.
    """
    public = write_digits(tmp_path / "public", 0, 300, public=True)
    declared = ["--dataset-size", "300", "--epsilon", "2", "--head", "one_step"]
    argv = _argv(public, tmp_path / "runs", *declared, "--test", str(stores[1].path))
    assert main([*argv, "--seeds", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    values, seeds = [], []
    for seed, folder in enumerate(said["runs"]):
        run = Path(folder)
        assert run == tmp_path / "runs" / "first" / f"seed-{seed}"
        values.append(json.loads((run / "scores.json").read_text())[0]["value"])
        manifest = read_manifest(find_checkpoint(run))
        seeds.append(manifest["config"]["seed"])
        assert manifest["ledger_steps"] == 1
    score = said["scores"][0]
    assert seeds == [seeds[0], seeds[0] + 1] and score["protocol"].endswith("mean over 2 seeds")
    assert score["value"] == pytest.approx(np.mean(values))
    assert score["std"] == pytest.approx(np.std(values, ddof=1))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--test", "TEST"], "on private images; expected a public store"),
        ([], "with no --test"),
        (["--test", "TEST", "--seeds", "1"], "--seeds 1; expected 2 or more"),
    ],
)
def test_seeds_are_refused_on_private_images_without_a_test_store_and_alone(
    more: list[str],
    said: str,
    stores: tuple[Store, Store],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is charged: there is no run."""
    more = [str(stores[1].path) if word == "TEST" else word for word in more]
    assert main(_argv(stores[0], tmp_path, *DECLARED, "--seeds", "3", *more)) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "first").exists()


def test_seeds_without_a_guarantee_on_private_images_have_a_confidential_mean(
    stores: tuple[Store, Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = _argv(stores[0], tmp_path, "--dataset-size", "900", "--head", "one_step")
    argv += ["--non-private", "--test", str(stores[1].path), "--seeds", "2"]
    assert main([*argv, "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert {score["visibility"] for score in scores} == {"private"}
    assert {score["std"] for score in scores} == {0}, "nothing is drawn"
