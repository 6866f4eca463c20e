"""One meaning for every setting: the command line, Python and ``tune`` train the same thing, and
nothing is accepted and ignored.
"""

import ast
import dataclasses
import itertools
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dpvision
from dpvision.adapt.fit import fit_head
from dpvision.adapt.prepare import Prepared, prepare
from dpvision.adapt.release import Releases
from dpvision.adapt.session import feature_stream
from dpvision.cli import adapt as adapt_command
from dpvision.cli import main
from dpvision.cli import tune as tune_command
from dpvision.config import HeadConfig, PrivacyConfig, RunConfig, with_settings
from dpvision.config.plain import setting
from dpvision.config.resolve import require_read, resolve, unread
from dpvision.data.store import Store
from dpvision.errors import ConfigError, DPVisionError, PrivacyError
from dpvision.privacy.plan import DPPlan, make_plan
from dpvision.privacy.stream import Key
from dpvision.recipes import RECIPES
from dpvision.runs import folder
from dpvision.train import start
from dpvision.tune import Question, Study
from dpvision.tune import trials as tune_trials
from dpvision.tune.space import parse_space

from ..adapt.runs_of_heads import write_digits
from .settings_read import SHAPES, leaves, other, read_by_a_run

HEADS = [name for name in RECIPES if RECIPES[name]().model.kind == "head"]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Store]:
    folder = tmp_path_factory.mktemp("settings") / "stores"
    return write_digits(folder / "mine", 0, 400, public=True), write_digits(
        folder / "test", 900, 960, public=True
    )


class Caught(Exception):
    """What a command would have executed."""

    def __init__(self, what: Any) -> None:
        self.what = what


def _catch(what: Any, *_: Any, **__: Any) -> None:
    raise Caught(what)


def _caught(argv: list[str]) -> Any:
    with pytest.raises(Caught) as found:
        main(argv)
    return found.value.what


def _declared(recipe: str, store: Store) -> list[str]:
    words = [
        "--data",
        str(store.path),
        "--encoder",
        "pixels",
        "--num-classes",
        "10",
        "--dataset-size",
        "400",
        "--epsilon",
        "8",
    ]
    return [recipe, *words, "--privacy.delta", "1e-3"]


def _in_python(recipe: str, store: Store, **optim: Any) -> RunConfig:
    """The same settings as ``_declared``, as a user of the package writes them."""
    config = RECIPES[recipe]()
    assert isinstance(config.model, HeadConfig)
    privacy = replace(
        config.privacy, dataset_size=400, expected_batch_size=400, target_epsilon=8.0, delta=1e-3
    )
    model = replace(
        config.model, num_classes=10, encoder=replace(config.model.encoder, spec="pixels")
    )
    data, optim_config = replace(config.data, store=str(store.path)), replace(config.optim, **optim)
    return replace(config, privacy=privacy, model=model, data=data, optim=optim_config)


def _same(one: Prepared, another: Prepared) -> None:
    assert one.config == another.config and one.plan.to_dict() == another.plan.to_dict()


# The three train the same thing


@pytest.mark.parametrize("momentum", [None, "0"])
@pytest.mark.parametrize("recipe", HEADS)
def test_a_head_is_the_same_by_the_command_line_from_python_and_in_tune(
    recipe: str,
    momentum: str | None,
    stores: tuple[Store, Store],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before: a head of many steps got 87 steps by the command line, 60 from Python and in tune;
    'auto' dropped what Python had set.
    """
    mine, test = stores
    if momentum is not None and recipe in ("transfer.prototypes", "transfer.least_squares"):
        pytest.skip("takes no gradient steps")
    typed = [] if momentum is None else ["--optim.momentum", momentum]
    if momentum is not None and recipe == "transfer.one_step":
        typed = ["--optim.eps", "1e-6"]
    optim = (
        {}
        if momentum is None
        else {"eps": 1e-6}
        if recipe == "transfer.one_step"
        else {"momentum": 0.0}
    )
    monkeypatch.setattr(adapt_command, "adapt_new", lambda args, made, asked: _catch(made))
    by_words = _caught(["adapt", *_declared(recipe, mine), *typed, "--runs", str(tmp_path)])
    _same(by_words, prepare(_in_python(recipe, mine, **optim)))
    asked = {
        "data.store": str(mine.path),
        "model.encoder.spec": "pixels",
        "model.num_classes": 10,
        "privacy.dataset_size": 400,
        "epsilon": 8,
    }
    asked |= {"privacy.delta": 1e-3} | {f"optim.{name}": value for name, value in optim.items()}
    _same(by_words, prepare(resolve(RECIPES[recipe](), asked)))
    if recipe in ("transfer.many_steps", "transfer.auto") and momentum is not None:
        assert by_words.plan.steps > 60, "the rule has an effect"
    if recipe == "transfer.auto":
        return  # tune wants a head by name
    monkeypatch.setattr(tune_command, "search", _catch)
    space = [
        "--how",
        "public",
        "--test",
        str(test.path),
        "--space",
        "privacy.max_grad_norm=1.0,0.5",
        "--runs",
        str(tmp_path),
    ]
    study = _caught(["tune", *_declared(recipe, mine), *typed, *space])
    assert study.plan.to_dict() == by_words.plan.to_dict(), "the price printed is that of what runs"
    _same(by_words, prepare(tune_trials.trial_config(study, {"privacy.max_grad_norm": 1.0})))


def test_the_command_that_tune_prints_plans_what_its_trial_trained(
    stores: tuple[Store, Store],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The steps that the rate's rule wants depend on the momentum, which trials vary. Before: 60 in
    the trial, more by the command.
    """
    mine, test = stores
    argv = [
        "tune",
        *_declared("transfer.many_steps", mine),
        "--how",
        "public",
        "--test",
        str(test.path),
        "--trials",
        "1",
    ]
    argv += [
        "--space",
        "optim.momentum=0.0,0.01",
        "--runs",
        str(tmp_path),
        "--name",
        "study",
        "--quiet",
        "--json",
        "--seed",
        "3",
    ]
    assert main(argv) == 0
    best = json.loads(capsys.readouterr().out)["commands"][0]
    trial = json.loads((tmp_path / "study" / "trial-000" / "plan.json").read_text())
    monkeypatch.setattr(adapt_command, "adapt_new", lambda args, made, asked: _catch(made))
    words = [
        *shlex.split(best.replace(" STORE", f" {mine.path}"))[1:],
        "--runs",
        str(tmp_path),
        "--name",
        "best",
    ]
    made, at = _caught(words), words.index("--privacy.steps")
    assert made.plan.to_dict() == DPPlan.from_dict(trial).to_dict()
    assert _caught([*words[:at], *words[at + 2 :]]).plan.steps > made.plan.steps, (
        "the momentum alone would plan more"
    )
    wanted = json.loads((tmp_path / "study" / "trial-000" / "config.json").read_text())
    assert (made.config.optim.momentum, made.config.optim.rate) == (
        wanted["optim"]["momentum"],
        wanted["optim"]["learning_rate"],
    )
    assert made.config.seed == wanted["seed"] == 3


@pytest.mark.parametrize(
    "recipe",
    ["vip.micro", "dpcap.micro", "supervised.micro", "transfer.micro_lora", "synthetic.vip_micro"],
)
def test_a_network_is_the_same_by_the_command_line_from_python_and_in_tune(
    recipe: str, stores: tuple[Store, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "check_run", _catch)
    monkeypatch.setattr(
        folder, "require_parent", lambda init_from: None
    )  # of warm starts, which are not here
    monkeypatch.chdir(tmp_path)
    store = str(stores[0].path)
    words = [
        recipe,
        "--data",
        store,
        "--privacy.dataset-size",
        "400",
        "--privacy.expected-batch-size",
        "50",
    ]
    config = RECIPES[recipe]()
    wanted = replace(
        config,
        data=replace(config.data, store=store),
        privacy=replace(config.privacy, dataset_size=400, expected_batch_size=50),
    )
    assert _caught(["train", *words, "--dry-run"]) == wanted
    if config.privacy.guarantee != "dp":
        return
    monkeypatch.setattr(tune_command, "search", _catch)
    typed = ["--how", "public", "--space", "optim.learning_rate=0.1,0.2", "--runs", str(tmp_path)]
    study = _caught(["tune", *words, *typed])
    settings = {"optim.learning_rate": 0.1}
    assert tune_trials.trial_config(study, settings) == replace(
        wanted, optim=replace(wanted.optim, learning_rate=0.1)
    )


def test_every_recipe_is_its_own_resolution() -> None:
    for name, recipe in RECIPES.items():
        config = recipe()
        require_read(config)
        assert resolve(config, {}) == config, name
        assert (
            config.privacy.delta is None or config.privacy.delta_for == config.privacy.dataset_size
        ), name


def test_auto_keeps_what_python_sets(stores: tuple[Store, Store]) -> None:
    """Before: the head's preset replaced it, though the command line kept it."""
    config = _in_python("transfer.auto", stores[0], learning_rate=0.5)
    config = replace(
        config,
        privacy=replace(config.privacy, steps=7),
        model=with_settings(config.model, {"constant": 0.3}),
    )  # type: ignore[arg-type]
    made = prepare(config)
    assert (
        made.plan.steps,
        made.config.optim.rate,
        setting(made.config, "model.constant"),
        made.model.head,
    ) == (
        7,
        0.5,
        0.3,
        "many_steps",
    )
    few = replace(config, model=replace(config.model, num_classes=200))  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError,
        match=r"optim.learning_rate=0.5 is not read: prototypes takes no gradient steps",
    ):
        prepare(few)


# Privacy refusals are make_plan's


def test_a_recipes_delta_is_refused_for_more_records_by_whatever_way() -> None:
    """Before: by the command line alone. A delta chosen for this run may have N x delta up to
    1.5.
    """
    privacy = replace(
        RECIPES["supervised.tan"]().privacy,
        dataset_size=1_280_000,
        expected_batch_size=1000.0,
        steps=1,
    )
    with pytest.raises(
        PrivacyError,
        match=r"N x delta=1.03 .*the recipe's 8e-7 is for 1,281,167 records.*--privacy.delta None",
    ):
        make_plan(privacy)
    assert make_plan(replace(privacy, delta=None, delta_for=None)).delta == 1 / 2_560_000
    chosen = resolve(replace(RECIPES["supervised.tan"](), privacy=privacy), {"privacy.delta": 8e-7})
    assert chosen.privacy.delta_for is None and make_plan(chosen.privacy).delta == 8e-7
    people = PrivacyConfig(
        dataset_size=3000,
        expected_batch_size=30,
        steps=2,
        noise_multiplier=5.0,
        num_units=2000,
        max_records_per_unit=2,
        delta=6e-4,
        delta_for=1000,
    )
    with pytest.raises(PrivacyError, match=r"N x delta=1.2 .* and 2,000 are declared"):
        make_plan(people)


# Nothing is accepted and ignored


@pytest.mark.parametrize(
    ("name", "words", "value"),
    [
        ("data.resize", ["32"], 32),
        ("data.crop", ["centre"], "centre"),
        ("data.crop_scale", ["0.5", "1"], (0.5, 1.0)),
        ("data.views", ["2"], 2),
        ("init_from", ["runs/x"], "runs/x"),
        ("hardware.precision", ["bfloat16"], "bfloat16"),
        ("optim.average", [], True),
    ],
)
def test_settings_that_frozen_features_cannot_have_are_refused(
    name: str,
    words: list[str],
    value: Any,
    stores: tuple[Store, Store],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before: accepted, printed in the statement's settings, and ignored."""
    mine, test = stores
    option = f"--{name.replace('_', '-')}"
    argv = [
        "adapt",
        *_declared("transfer.many_steps", mine),
        "--dry-run",
        "--runs",
        str(tmp_path),
        option,
        *words,
    ]
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert (
        f"settings: {name}=" in said
        and "is not read" in said
        and "Leave it out." in said
        and said.count("\n") == 1
    )
    config = _in_python("transfer.many_steps", mine)
    part, _, field = name.rpartition(".")
    config = replace(
        config,
        **({part: replace(getattr(config, part), **{field: value})} if part else {field: value}),
    )
    with pytest.raises(ConfigError, match=f"settings: {name}=.* is not read"):
        prepare(config)
    if name in ("data.resize", "data.crop"):
        tune = [
            "tune",
            *_declared("transfer.many_steps", mine),
            "--how",
            "public",
            "--test",
            str(test.path),
            "--runs",
            str(tmp_path),
        ]
        values = {"data.resize": "32,64", "data.crop": "centre,random"}[name]
        assert main([*tune, "--space", f"{name}={values}"]) == 2
        assert f"tune: {name} is not read" in capsys.readouterr().err


def test_a_space_may_vary_what_only_some_of_its_trials_read() -> None:
    config = RECIPES["vip.micro"]()
    space = parse_space(["optim.name=adamw,sgd", "optim.momentum=0.5,0.9"], config, "public")
    asked, plan = Question("public", trials=2), make_plan(config.privacy)
    study = Study(Path("x"), asked, config, space, "loss", plan, None, None, False)  # type: ignore[arg-type]
    made = tune_trials.trial_config(study, {"optim.name": "sgd", "optim.momentum": 0.5})
    assert made.optim.momentum == 0.5
    left = tune_trials.trial_config(study, {"optim.name": "adamw", "optim.momentum": 0.5})
    assert left == config
    with pytest.raises(ConfigError, match=r"optim.momentum is not read: name='adamw'"):
        parse_space(["optim.momentum=0.5,0.9"], config, "public")


@pytest.mark.parametrize(
    "short",
    [
        ["--dataset-size", "400", "--privacy.dataset-size", "300"],
        ["--encoder", "hog", "--model.encoder.spec", "pixels"],
    ],
)
def test_a_setting_given_twice_is_refused(
    short: list[str], stores: tuple[Store, Store], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "adapt",
                "--data",
                str(stores[0].path),
                "--num-classes",
                "10",
                "--epsilon",
                "2",
                "--dry-run",
                *short,
            ]
        )
        == 2
    )
    assert "expected it once" in capsys.readouterr().err


def _effect(config: RunConfig) -> tuple[Any, ...]:
    """What a head's run releases, under fixed keys."""
    made = prepare(config)
    stream = feature_stream(made)
    releases = Releases(
        made.plan,
        itertools.count().__next__,
        Key.for_tests(bytes(32)),
        Key.for_tests(bytes([1]) * 32),
    )
    fitted = fit_head(made.config, stream, releases)
    ema = None if fitted.ema is None else fitted.ema.weight_KD.numpy().tobytes()
    plan = {name: value for name, value in made.plan.to_dict().items() if name != "selection"}
    return (
        json.dumps(plan),
        fitted.head.weight_KD.numpy().tobytes(),
        fitted.head.bias_K.numpy().tobytes(),
        ema,
    )


SPEED = {
    f"hardware.{f.name}"
    for f in dataclasses.fields(RunConfig("", PrivacyConfig(1, 1, 1, target_epsilon=1.0)).hardware)
}
ALLOWS = {
    "privacy.allow_weak_guarantee",
    "privacy.delta_for",
    "public_weights",
    "data.store",
    "seed",
}
"""Settings that name or allow something, and the seed of what these runs do not draw: the same is
released, or a run is refused.
"""
EQUAL = {
    "transfer.one_step": {
        "optim.learning_rate",
        "optim.betas",
        "optim.eps",
        "optim.warmup_steps",
        "optim.schedule",
        "optim.weight_decay",
        "optim.decay_horizon",
        "optim.global_clip",
        "model.bias",
        "model.multi_label",
    },
}
"""Read, and without effect on the first step from zeros, by the theory that docs/heads.md gives."""


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=[] if name == "transfer.prototypes" else pytest.mark.slow)
        for name in HEADS
        if name != "transfer.auto"
    ],
)
def test_every_setting_of_a_head_changes_what_is_released_or_is_refused(
    recipe: str, stores: tuple[Store, Store]
) -> None:
    """The whole way from settings to weights, under fixed keys: the oracle knows nothing of which
    settings are read.
    """
    config = _in_python(recipe, stores[0])
    if recipe in ("transfer.many_steps", "transfer.feature_covariance"):
        config = replace(config, optim=replace(config.optim, ema_decay=0.5))
    before, own_loss, ignored = _effect(config), setting(prepare(config).config, "model.loss"), []
    for name, value in leaves(config):
        if (
            name in SPEED | ALLOWS | EQUAL.get(recipe, set())
            or name.endswith(".kind")
            or name in ("recipe", "model.candidates")
        ):
            continue
        for changed in other(name, value):
            if (name, changed) == ("model.loss", own_loss):
                continue  # what "auto" is for this head
            try:
                if _effect(resolve(config, {name: changed})) == before:
                    ignored.append((name, changed))
            except DPVisionError:
                pass
    assert not ignored


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[] if name in ("vip.micro", "transfer.prototypes") else pytest.mark.slow
        )
        for name in SHAPES
    ],
)
def test_every_setting_of_every_recipe_is_read_or_refused(
    name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny run of each shape of recipe records what is read outside of ``config/``; every other
    setting must be refused, for each recipe of that shape, by the command line's, Python's and
    tune's one resolution.
    """
    folder = tmp_path_factory.mktemp("read")
    config, read = read_by_a_run(RECIPES[name](), folder, monkeypatch)
    accepted = []
    for recipe in SHAPES[name]:
        made = RECIPES[recipe]()
        # A head's last checks need its store and encoder.
        asked = (
            config
            if made.model.kind == "head"
            else replace(made, data=replace(made.data, store=config.data.store))
        )
        for leaf, value in leaves(asked):
            if leaf in ("recipe", "model.kind", "model.encoder.kind", "privacy.delta_for") or (
                leaf in read and leaf not in unread(asked)
            ):
                continue
            for changed in other(leaf, value):
                try:
                    changed_config = resolve(asked, {leaf: changed})
                    if asked.model.kind == "head":
                        prepare(changed_config)
                    accepted.append((recipe, leaf, changed))
                except ConfigError as error:
                    assert leaf.rpartition(".")[2] in str(error), error
    assert not accepted


def test_nothing_parses_words_beside_tyro() -> None:
    """A setting's name in the words of a command line is read by tyro alone; and no function reads
    its own variables by name.
    """
    source = Path(dpvision.__file__).parent
    for path in [*(source / "cli").glob("*.py"), *(source / "adapt").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("locals", "globals"), path
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "startswith"
                and node.args
            ):
                dashes = isinstance(node.args[0], ast.Constant) and str(
                    node.args[0].value
                ).startswith("-")
                assert not dashes, f"{path}:{node.lineno}"
