"""A study from Python: it is priced before anything runs, and its result is a value."""

from dataclasses import replace
from pathlib import Path

import pytest

from dpvision.config.resolve import resolve
from dpvision.data.synthetic_store import write_scenes
from dpvision.errors import ConfigError
from dpvision.recipes import RECIPES
from dpvision.tune import Question, plan_study, search


@pytest.mark.parametrize(("trials", "space", "different"), [(3, 3, 3), (8, 30, 8), (12, 10, 10)])
def test_no_combination_is_drawn_again_before_all_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trials: int, space: int, different: int
) -> None:
    pytest.importorskip("optuna")
    stores = [
        write_scenes(tmp_path / f"s{first}", 20, 32, first=first, label="colour", public=True)
        for first in (0, 1000)
    ]
    settings = {
        "data.store": str(stores[0].path),
        "model.encoder.spec": "pixels",
        "model.num_classes": 10,
        "privacy.dataset_size": 20,
        "privacy.steps": 2,
        "epsilon": 8,
    }
    config = resolve(RECIPES["transfer.many_steps"](), settings)
    rates = ",".join(map(str, range(1, space + 1)))
    asked = Question("public", (f"optim.learning_rate={rates}",), trials, test=stores[1].path)
    study = plan_study(asked, config, tmp_path / "runs" / "a")
    monkeypatch.setattr("dpvision.tune.trials._run_trial", lambda study, number, *_, **__: number)
    found = search(study).trials
    assert len(found) == trials
    assert len({trial.settings["optim.learning_rate"] for trial in found}) == different


@pytest.mark.slow
def test_a_public_study_is_planned_and_searched_without_printing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    stores = [
        write_scenes(tmp_path / f"s{first}", 60, 32, first=first, label="colour", public=True)
        for first in (0, 1000)
    ]
    config = resolve(
        RECIPES["transfer.many_steps"](),
        {
            "data.store": str(stores[0].path),
            "model.encoder.spec": "pixels",
            "model.num_classes": 10,
            "privacy.dataset_size": 60,
            "privacy.steps": 2,
            "epsilon": 8,
        },
    )
    asked = Question("public", ("optim.learning_rate=1,10",), trials=2, test=Path(stores[1].path))
    study = plan_study(asked, config, tmp_path / "runs" / "a")
    assert study.objective == "own_head" and not study.confidential and study.budget is None
    assert study.price.to_dict()["public"]["epsilon"] == "0 on your private images"
    assert not study.root.exists(), "planning writes nothing"
    lines: list[str] = []
    found = search(study, lambda line, detail: lines.append(line))
    assert found.refused is None and found.best is not None and len(found.trials) == 2
    assert found.best.score == max(trial.score or 0.0 for trial in found.trials)
    assert [line[:7] for line in lines] == ["Trial 0", "Trial 1"]
    said = capsys.readouterr()
    assert not said.out
    with pytest.raises(ConfigError, match="trials differ from those of"):
        more = replace(study, asked=replace(asked, trials=3))
        search(more, resume=True)
