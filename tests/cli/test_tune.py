"""`dpvision tune`: the price printed beforehand is what the ledgers say, every trial counts, and
nothing private leaves.
"""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from dpvision.cli import main
from dpvision.config.resolve import candidate_name, with_candidate
from dpvision.data.importer import import_samples
from dpvision.data.person_names import PersonRule
from dpvision.data.sample import Sample
from dpvision.data.store import Store
from dpvision.data.synthetic_store import write_scenes
from dpvision.errors import ConfigError
from dpvision.privacy.account import store_account
from dpvision.privacy.printed import up
from dpvision.privacy.store_marks import StoreLedgers
from dpvision.recipes import RECIPES
from dpvision.tune.space import Range, grid, parse_space

from ..adapt.lineage_runs import untrained_run
from ..adapt.runs_of_heads import write_digits
from ..data.image_files import png
from ..statement.test_statement import problems

pytestmark = pytest.mark.usefixtures("gates_once")

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "statement.schema.json").read_text())
SPACE = ["--space", "optim.learning_rate=log 1..100", "privacy.max_grad_norm=0.5,1.0"]
STEPS = 3


def tune_argv(store: Store | Path, how: str, *more: str, trials: int = 3) -> list[str]:
    path = store.path if isinstance(store, Store) else store
    return [
        "tune",
        "transfer.many_steps",
        "--data",
        str(path),
        "--encoder",
        "pixels",
        "--num-classes",
        "10",
        "--dataset-size",
        "200",
        "--epsilon",
        "2",
        "--privacy.steps",
        str(STEPS),
        "--hardware.workers",
        "1",
        "--model.centre",
        "none",
        "--runs",
        str(path.parent.parent / "runs"),
        "--name",
        "study",
        "--how",
        how,
        "--trials",
        str(trials),
        *more,
    ]


def runs_of(store: Store) -> list[tuple[str, int]]:
    """(guarantee, steps charged) of every run in the store's ledgers."""
    return sorted(
        (found.plan.guarantee, found.steps)
        for found in StoreLedgers.of(store.path).read_all().values()
    )


def test_counts_that_no_trial_could_use_are_refused_before_the_price(
    public: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [Sample(f"{i}", png(i), {"label": i % 10, "who": f"p{i // 2}"}) for i in range(200)]
    people = import_samples(samples, tmp_path / "stores" / "people", people=PersonRule("who"))
    for more, words in (
        ((), "num_units is not declared"),
        (("--privacy.num-units", "90"), "num_units=90"),
    ):
        argv = tune_argv(people, "charged", "--test", str(public.path), *SPACE, *more)
        for last in ((), ("--dry-run",)):
            assert main([*argv, *last]) == 2
            said = capsys.readouterr()
            assert words in said.err and said.out == ""
    assert runs_of(people) == [] and not (tmp_path / "runs").exists()


def test_the_price_printed_beforehand_is_what_the_ledgers_say(
    mine: Store, public: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = tune_argv(mine, "charged", "--test", str(public.path), *SPACE)
    assert main([*argv, "--dry-run"]) == 0
    assert f"dpvision ledger {mine.path} --set-cap EPSILON" in capsys.readouterr().out
    assert main([*argv, "--dry-run", "--json"]) == 0
    asked = json.loads(capsys.readouterr().out)["prices"]["charged"]
    assert not (tmp_path / "runs").exists() and runs_of(mine) == [] and asked["fits"] == 3
    assert main([*argv, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert runs_of(mine) == [("dp", STEPS)] * 3
    account = store_account(mine.path)
    assert (
        result["epsilon"]
        == result["charged"]
        == asked["budget"]
        == account.epsilon_filter
        == result["store_epsilon"]
    )
    assert (
        account.epsilon is not None and account.epsilon <= asked["budget"] and asked["budget"] > 2
    ), "more than one trial costs"
    # The best trial is named, and its statement says what the choice costs.
    assert result["best"]["score"] == max(_scores(tmp_path / "runs" / "study").values())
    assert main(shlex.split(result["commands"][0])[1:]) == 0
    run = tmp_path / "runs" / "study" / f"trial-{result['best']['trial']:03d}"
    statement = json.loads((run / "statement.json").read_text())
    assert problems(statement, SCHEMA, "statement") == []
    assert (
        statement["history"]["tuning"]["declared"] == "charged"
        and "The choice costs their total" in statement["history"]["tuning"]["text"]
    )
    assert any(
        "total of those runs" in text and "cap set before the first run" in text
        for text in statement["scope"]["not_covered"]
    )
    assert (
        statement["guarantee"]["epsilon"] <= 2
        and statement["history"]["other_runs"]["epsilon_filter"] == asked["budget"]
    )
    assert (
        main(["verify", str(run / "statement.json"), "--run", str(run), "--store", str(mine.path)])
        == 0
    )
    again = json.loads((run / "config.json").read_text())
    assert {
        name: again[name.split(".")[0]][name.split(".")[1]] for name in result["best"]["settings"]
    } == result["best"]["settings"]


def test_scores_have_intervals_and_chance_is_named(
    mine: Store, public: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = tune_argv(mine, "charged", "--test", str(public.path), *SPACE, trials=1)
    assert main(argv) == 0
    capsys.readouterr()
    file = tmp_path / "runs" / "study" / "trial-000" / "scores.json"
    score, *_ = json.loads(file.read_text())
    for low, at_chance in ((score["chance"], True), (score["chance"] + 1e-6, False)):
        file.write_text(json.dumps([score | {"low": low, "high": 0.987}]))
        assert main([*argv, "--resume"]) == 0
        out = capsys.readouterr().out
        assert f"{low:.3g} to 0.987" in out and f"chance {score['chance']:.3g}." in out
        assert ("The best trial is at chance" in out) == at_chance


def _scores(root: Path) -> dict[str, float]:
    return {
        path.parent.name: json.loads(path.read_text())[0]["value"]
        for path in root.glob("trial-*/scores.json")
    }


def test_the_filter_refuses_the_first_trial_above_the_budget(
    mine: Store, public: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = tune_argv(mine, "charged", "--test", str(public.path), "--json", *SPACE)
    plans = []
    for trials in (1, 2, 3):
        assert (
            main(
                [
                    *tune_argv(mine, "charged", "--test", str(public.path), *SPACE, trials=trials),
                    "--dry-run",
                    "--json",
                ]
            )
            == 0
        )
        plans.append(json.loads(capsys.readouterr().out)["prices"]["charged"]["budget"])
    assert plans == sorted(plans)
    enough_for_two = str(plans[2] * 0.997)
    assert main([*argv, "--budget", str(plans[0] * 0.99)]) == 2
    assert "the price of one trial" in capsys.readouterr().err and runs_of(mine) == []
    assert main([*argv, "--budget", enough_for_two]) == 0
    found = capsys.readouterr()
    assert (
        "Refused: trial 2 would exceed the budget" in found.err
        and json.loads(found.out)["trials"] == 2
    )
    result = json.loads(found.out)
    assert (
        runs_of(mine) == [("dp", STEPS)] * 2
        and result["charged"] == plans[1] < result["epsilon"] <= float(enough_for_two) < plans[2]
    )
    assert main([*argv, "--budget", enough_for_two, "--resume"]) == 0, (
        "nothing is left to do, and nothing is charged"
    )
    assert runs_of(mine) == [("dp", STEPS)] * 2
    for other in ("20", str(plans[1])):
        assert main([*argv, "--budget", other, "--resume"]) == 2
        assert "budget differ from those" in capsys.readouterr().err


def test_simulations_of_private_images_leave_nothing_outside_confidential(
    mine: Store, public: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = tune_argv(
        mine, "simulated", "--simulate", "4", "--test", str(public.path), *SPACE, trials=2
    )
    assert main(argv) == 0
    said = capsys.readouterr()
    assert (
        "nothing covers it" in said.out
        and "optim.learning_rate=" not in said.out
        and "--optim" not in said.out
        and "Score" not in said.err
    )
    root = tmp_path / "runs" / "study"
    outside = [
        path
        for path in root.rglob("*")
        if path.is_file() and "confidential" not in path.parts and path.name != ".lock"
    ]
    assert outside == [] and runs_of(mine) == [("simulated", STEPS)] * 2
    table = (root / "confidential" / "trials.txt").read_text()
    assert (
        "--tuning not_covered" in table
        and f"--data {mine.path}" in table
        and "--privacy.steps 3" in table
    )
    assert main([*argv, "--resume", "--show-confidential"]) == 0
    assert table.strip() in capsys.readouterr().out
    assert main(["report", str(root / "trial-000")]) == 2


def test_results_of_weights_without_a_guarantee_are_not_shown(
    mine: Store, public: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Simulations on public images, from an encoder that was trained on private ones without a
    guarantee.
    """
    tainted = untrained_run(tmp_path / "tainted", "private", None)
    argv = tune_argv(
        public,
        "simulated",
        "--simulate",
        "4",
        *SPACE,
        "--dataset-size",
        "100",
        "--encoder",
        str(tainted),
    )
    other = write_digits(tmp_path / "other", 1100, 1200, public=True)
    assert main([*argv, "--runs", str(tmp_path / "runs"), "--test", str(other.path)]) == 2
    said = capsys.readouterr()
    argv = [
        *tune_argv(public, "simulated", "--simulate", "4", *SPACE, trials=1),
        "--dataset-size",
        "100",
        "--name",
        "private-test",
    ]
    assert main([*argv, "--runs", str(tmp_path / "runs"), "--test", str(mine.path)]) == 0
    shown = capsys.readouterr()
    assert "Score" not in shown.err and "best first" not in shown.out, (
        "scores on private images, of trials on public ones"
    )
    assert (
        "--tuning not_covered"
        in (tmp_path / "runs" / "private-test" / "confidential" / "trials.txt").read_text()
    )
    assert (
        "expected public results" in said.err
        and "Score" not in said.out + said.err
        and "best first" not in said.out
    )


def test_a_private_selection_is_one_charge_at_the_price_printed(
    mine: Store,
    public: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)  # an import would fail
    lists = ["--space", "optim.learning_rate=5,50", "model.constant=0,0.1"]
    argv = tune_argv(mine, "private-selection", *lists, "--test", str(public.path), trials=4)
    assert main([*argv, "--dry-run", "--json"]) == 0
    price = json.loads(capsys.readouterr().out)["prices"]["private-selection"]["epsilon"]
    assert main([*argv, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    plan = next(iter(StoreLedgers.of(mine.path).read_all().values())).plan
    assert (
        runs_of(mine) == [("dp", 1)]
        and plan.selection is not None
        and plan.selection.mean_runs == 4
        and plan.selection.steps == STEPS
    )
    assert price.startswith(
        f"{up(plan.epsilon)} for all, with noise multiplier {plan.noise.multiplier:.4g}"
    )
    names = {
        candidate_name(one)
        for one in [
            {"optim.learning_rate": r, "model.constant": c} for r in (5, 50) for c in (0, 0.1)
        ]
    }
    assert result["head"] in names
    run = tmp_path / "runs" / "study"
    assert not list(run.glob("trial-*")) and not (run / "confidential" / "study.journal").exists()
    assert main(["report", str(run)]) == 0
    statement = json.loads((run / "statement.json").read_text())
    assert (
        problems(statement, SCHEMA, "statement") == [] and statement["history"]["tuning"]["charged"]
    )
    assert statement["guarantee"]["epsilon"] == pytest.approx(plan.epsilon)
    assert set(statement["settings"]["model"]["candidates"]) == names
    assert (
        main(["verify", str(run / "statement.json"), "--run", str(run), "--store", str(mine.path)])
        == 0
    )


def test_candidates_share_all_that_is_paid_for() -> None:
    config = RECIPES["transfer.many_steps"]()
    made = with_candidate(
        config,
        candidate_name({"optim.learning_rate": 3, "model.bias": None, "model.loss": "softmax"}),
    )
    assert (made.optim.learning_rate, made.model.settings.bias, made.model.settings.loss) == (
        3.0,
        None,
        "softmax",
    ) and made.privacy == config.privacy
    for name in (
        "privacy.noise_multiplier",
        "privacy.steps",
        "model.unit",
        "model.head",
        "model.encoder.spec",
        "data.resize",
        "seed",
        "privacy.max_grad_norm",
    ):
        with pytest.raises(
            ConfigError, match="candidates share features, releases, clipping and noise"
        ):
            with_candidate(config, f"{name}=1")
    with pytest.raises(ConfigError, match="values in JSON"):
        with_candidate(config, "optim.name=sgd")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes") / "stores" / "scenes"
    write_scenes(folder, 40, 16, workers=1)
    return folder


def _network(store: Path, how: str, *more: str) -> list[str]:
    return [
        "tune",
        "vip.micro",
        "--data",
        str(store),
        "--init-from",
        "None",
        "--dataset-size",
        "40",
        "--privacy.expected-batch-size",
        "20",
        "--privacy.delta",
        "None",
        "--privacy.steps",
        "2",
        "--model.encoder.image-size",
        "16",
        "--model.encoder.depth",
        "1",
        "--model.encoder.width",
        "16",
        "--model.encoder.num-heads",
        "2",
        "--model.decoder-width",
        "16",
        "--model.decoder-num-heads",
        "2",
        "--hardware.workers",
        "1",
        "--hardware.physical-batch-size",
        "8",
        "--optim.warmup-steps",
        "0",
        "--quiet",
        "--runs",
        str(store.parent.parent / "runs"),
        "--how",
        how,
        "--trials",
        "2",
        *more,
    ]


@pytest.mark.slow
def test_on_public_images_trials_are_compared_by_loss_and_the_best_is_a_command(
    scenes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                *_network(
                    scenes, "public", "--name", "p", "--space", "optim.learning_rate=1e-4,1e-2"
                ),
                "--json",
            ]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    losses = {}
    for run in (scenes.parent.parent / "runs" / "p").glob("trial-*"):
        lines = (run / "confidential" / "metrics.jsonl").read_text().splitlines()
        losses[int(run.name[-3:])] = json.loads(lines[-1])["loss"]
    assert (
        result["best"]["score"]
        == pytest.approx(min(losses.values()))
        == losses[result["best"]["trial"]]
    )
    assert result["prices"]["public"]["epsilon"].startswith("0 ") and "epsilon" not in result
    train, report = result["commands"]
    assert report == "dpvision report RUN --tuning public"
    words = shlex.split(train.replace(" STORE", f" {scenes}"))
    assert words[:3] == ["dpvision", "train", "vip.micro"]
    assert main([*words[1:], "--dry-run", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["dataset_size"] == 40 and made["steps"] == 2 and "--optim.learning-rate" in words


@pytest.mark.slow
def test_simulated_trials_may_vary_batch_and_steps_since_the_target_fixes_the_price(
    scenes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = ["--space", "privacy.steps=1..3", "privacy.expected_batch_size=8,20"]
    assert (
        main([*_network(scenes, "simulated", "--simulate", "2", "--name", "s", *space), "--json"])
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    for run in (scenes.parent.parent / "runs" / "s").glob("trial-*"):
        plan, config = (
            json.loads((run / name).read_text()) for name in ("plan.json", "config.json")
        )
        assert (
            plan["guarantee"] == "simulated"
            and plan["expected_batch_size"] in (4, 10)
            and plan["steps"] in (1, 2, 3)
        )
        assert config["privacy"]["steps"] == plan["steps"]
    assert (
        result["commands"][0].startswith("dpvision train vip.micro --data STORE")
        and "--simulate" not in result["commands"][0]
    )


BAD = [
    ([], "no --how"),
    (["--how", "public"], "no --space"),
    (
        ["--how", "public", "--space", "optim.learning_rat=1,2"],
        "optim.learning_rat'; expected one of .*learning_rate",
    ),
    (["--how", "public", "--space", "optimizer.rate=1,2"], "'optimizer.rate'; expected PART.NAME"),
    (["--how", "public", "--space", "optim=1,2"], "'optim'; expected PART.NAME"),
    (["--how", "public", "--space", "optim.learning_rate"], "expected NAME=VALUE"),
    (["--how", "public", "--space", "optim.learning_rate="], "expected a finite number"),
    (
        ["--how", "public", "--space", "optim.learning_rate=1,nan"],
        "config.optim.learning_rate: 'nan'",
    ),
    (
        ["--how", "public", "--space", "optim.learning_rate=1,NaN"],
        "'NaN': expected|'NaN'; expected a finite",
    ),
    (["--how", "public", "--space", "optim.learning_rate=1,1"], "expected different values"),
    (["--how", "public", "--space", "optim.learning_rate=2..1"], "the first one smaller"),
    (["--how", "public", "--space", "optim.learning_rate=1..1"], "the first one smaller"),
    (["--how", "public", "--space", "optim.learning_rate=log 0..1"], "two numbers above 0"),
    (["--how", "public", "--space", "optim.learning_rate=log 1,2"], "expected LOW..HIGH after log"),
    (
        ["--how", "public", "--space", "optim.learning_rate=-1..1"],
        "learning_rate=-1.0; expected a positive number",
    ),
    (
        ["--how", "public", "--space", "optim.momentum=0.5..1"],
        r"momentum=1.0; expected in \[0, 1\)",
    ),
    (
        ["--how", "public", "--space", "optim.learning_rate=1,2", "optim.learning-rate=3,4"],
        "each name once",
    ),
    (["--how", "public", "--space", "optim.betas=1,2"], "betas'; expected one of"),
    (["--how", "public", "--space", "optim.warmup_steps=0.5,1"], "warmup_steps: 0.5"),
    (["--how", "charged", "--space", "privacy.steps=1,2"], "changes what a trial costs"),
    (["--how", "public", "--space", "privacy.steps=1,2"], "changes what a trial costs"),
    (
        ["--how", "charged", "--space", "privacy.noise_multiplier=1,2"],
        "Drop one|changes the guarantee",
    ),
    (["--how", "charged", "--space", "privacy.target_epsilon=1,2"], "changes the guarantee"),
    (
        ["--how", "charged", "--space", "privacy.max_records_per_unit=1,2"],
        "changes the guarantee|num_units",
    ),
    (["--how", "charged", "--space", "data.store=a,b"], "changes the guarantee"),
    (["--how", "charged", "--space", "seed=1,2"], "changes the guarantee"),
    (["--how", "charged", "--space", "model.encoder.spec=pixels,hog"], "changes the guarantee"),
    (["--how", "charged", "--space", "hardware.workers=1,2"], "changes the guarantee"),
    (
        ["--how", "private-selection", "--space", "optim.learning_rate=1..2"],
        "is a range; expected a list",
    ),
    (
        ["--how", "private-selection", "--space", "optim.learning_rate=1"],
        "1 combinations; expected 2 to 100",
    ),
    (
        ["--how", "private-selection", "--space", "model.unit=true,false"],
        "candidates share features",
    ),
    (["--how", "private-selection", "--resume"], "it is one charge"),
    (["--how", "public"], "whose results are private; expected public images"),
    (["--how", "charged", "--test", "PRIVATE"], "whose scores are private"),
    (["--how", "public", "--data", "PUBLIC", "--test", "PRIVATE"], "whose scores are private"),
    (["--how", "charged", "--data", "PUBLIC"], "which is public; expected private images"),
    (["--how", "charged", "--no-test"], "charged without --test"),
    (["--how", "charged", "--budget", "nan"], "--budget nan"),
    (["--how", "public", "--budget", "3"], "expected a positive epsilon, with charged"),
    (["--how", "public", "--simulate", "4"], "exactly with simulated"),
    (["--how", "simulated"], "exactly with simulated"),
    (["--how", "simulated", "--simulate", "0.5"], "expected a number above 1"),
    (["--how", "charged", "--objective", "knm"], "expected some of"),
    (["--how", "simulated", "--simulate", "2", "--objective", "loss"], "expected a score"),
    (["--how", "charged", "--trials", "0"], "expected 1 to 10000"),
    (["--how", "charged", "--resume"], "holds no study"),
    (["--how", "charged", "--privacy.guarantee", "none"], "--epsilon with --non-private"),
    (
        [
            "--how",
            "charged",
            "--privacy.sampling",
            "truncated_poisson",
            "--privacy.expected-batch-size",
            "100",
            "--privacy.max-batch-size",
            "180",
        ],
        "no Renyi accounting",
    ),
]


@pytest.mark.slow
def test_every_mistake_is_one_clear_error_and_costs_nothing(
    mine: Store, public: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"PRIVATE": str(mine.path), "PUBLIC": str(public.path)}
    for more, said in BAD:
        words = [places.get(word, word) for word in more if word != "--no-test"]
        argv = tune_argv(mine, "x", "--test", str(public.path), *SPACE)
        argv = argv[: argv.index("--how")]
        argv += [] if "--space" in more or said == "no --space" else SPACE
        argv += [] if "--test" in more or "--no-test" in more else ["--test", str(public.path)]
        assert main([*argv, *words]) == 2, more
        err = capsys.readouterr().err
        assert re.search(said, err) and err.count("error:") == 1 and "Traceback" not in err, (
            more,
            err,
        )
    assert runs_of(mine) == [] and not (tmp_path / "runs").exists()


def test_network_selection_is_refused_with_the_reason(
    scenes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(_network(scenes, "private-selection", "--space", "optim.learning_rate=1e-4,1e-2")) == 2
    )
    said = capsys.readouterr().err
    assert "has to stay secret" in said and all(
        way in said for way in ("simulated", "public", "charged")
    )
    assert (
        main(_network(scenes, "public", "--name", "q", "--space", "model.mask_ratio=0.5,0.75")) == 2
    )
    assert "leave the loss comparable" in capsys.readouterr().err
    assert (
        main(
            _network(
                scenes,
                "public",
                "--name",
                "q",
                "--space",
                "optim.eps=1,2",
                "--privacy.guarantee",
                "none",
            )
        )
        == 2
    )
    assert "expected a private recipe" in capsys.readouterr().err


def test_spaces_are_read_as_typed() -> None:
    config = RECIPES["vip.micro"]()
    space = parse_space(
        [
            "optim.learning-rate=log 1e-4..1e-2",
            "optim.warmup_steps=0..50",
            "optim.momentum=0..0.9",
            "optim.ema_decay=None,0.99",
            "optim.name=sgd,lamb",
        ],
        config,
        "public",
    )
    assert space["optim.learning_rate"] == Range(1e-4, 1e-2, log=True, whole=False)
    assert space["optim.warmup_steps"] == Range(0, 50, log=False, whole=True)
    assert space["optim.momentum"] == Range(0, 0.9, log=False, whole=False)
    assert space["optim.ema_decay"] == (None, 0.99) and space["optim.name"] == ("sgd", "lamb")
    assert parse_space(["optim.learning_rate=1..10"], config, "public")[
        "optim.learning_rate"
    ] == Range(1, 10, log=False, whole=False)
    assert grid({"a": (1, 2), "b": (3,)}, 10) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
