"""What SACRO-ML reads: probabilities of the right images, kept where private images are; and the
figures of docs/output_checkers.md.
"""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

from dpvision.cli import main
from dpvision.config import PrivacyConfig
from dpvision.data.store import Store
from dpvision.encoders.predict import predict
from dpvision.errors import ConfigError, DataError
from dpvision.export.sacro import write_target
from dpvision.privacy.composition import parts_of
from dpvision.privacy.plan import make_plan
from dpvision.statement.guarantee import figures_of

from ..adapt.lineage_runs import untrained_run
from ..adapt.runs_of_heads import head_config, run_head, write_digits

pytestmark = pytest.mark.usefixtures("gates_once")

PAGE = Path(__file__).parents[2] / "docs" / "output_checkers.md"


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_digits(tmp_path_factory.mktemp("sacro") / "private", 0, 120)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_digits(tmp_path_factory.mktemp("sacro") / "other", 400, 440, public=True)


@pytest.fixture(scope="module")
def run(private: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_head(head_config(private, "many_steps"), tmp_path_factory.mktemp("sacro") / "run")


def test_the_arrays_are_the_probabilities_of_training_and_other_images(
    run: Path,
    private: Store,
    other: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "confidential" / "sacro"
    line = ["export", str(run), str(out), "--to", "sacro", "--test", str(other.path)]
    assert main(line) == 0
    said = capsys.readouterr().out
    assert "operator only: " in said and f"cd {out} && sacroml run . attack.yaml" in said
    assert out.stat().st_mode & 0o777 == 0o700
    target = json.loads((out / "target.yaml").read_text())
    for part, store in (("train", private), ("test", other)):
        name = target[f"proba_{part}_path"]
        written = np.loadtxt(out / name, delimiter=",")
        made = np.array([one.probabilities for one in predict(run, store.path)])
        assert written.shape == (store.num_records, 10)
        np.testing.assert_allclose(written, made, rtol=1e-8)
        with (out / name).open(newline="") as file:
            assert all(len(row) == 10 for row in csv.reader(file))  # no header
    attacks = json.loads((out / "attack.yaml").read_text())["attacks"]
    assert [attack["name"] for attack in attacks] == ["worstcase"] * 2
    assert len({attack["params"]["output_dir"] for attack in attacks}) == 2
    stated = json.loads((out / "statement.json").read_text())
    assert stated["guarantee"]["attack"]["auc"] < 1
    assert main(line) == 2
    assert "is not empty; expected a new folder" in capsys.readouterr().err


def test_images_that_took_no_part_are_not_among_the_training_images(
    run: Path, private: Store, other: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dpvision.export import sacro

    drawn = np.array([5, 7, 11])
    monkeypatch.setattr(sacro, "rows_to_draw", lambda store, unit, seed: drawn)
    write_target(run, tmp_path / "confidential" / "few", other.path)
    written = np.loadtxt(tmp_path / "confidential" / "few" / "proba_train.csv", delimiter=",")
    made = predict(run, private.path)
    np.testing.assert_allclose(written, [made[row].probabilities for row in drawn], rtol=1e-8)


def test_what_cannot_be_attacked_is_refused_and_nothing_is_written(
    run: Path,
    private: Store,
    other: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, kept = tmp_path / "sacro", tmp_path / "confidential" / "sacro"
    with pytest.raises(ConfigError, match="single private images; expected a folder called conf"):
        write_target(run, out, other.path)
    with pytest.raises(DataError, match="shares records with the store that the run was trained"):
        write_target(run, kept, private.path)
    gone = private.path.with_name("elsewhere")
    private.path.rename(gone)
    try:
        with pytest.raises(DataError, match=r"is not the store that .* was trained on"):
            write_target(run, kept, other.path)
    finally:
        gone.rename(private.path)
    with pytest.raises(ConfigError, match="model kind 'mae'; expected a run of"):
        write_target(untrained_run(tmp_path / "mae", "public", None), kept, other.path)
    line = ["export", str(run), str(kept), "--to"]
    for words, problem in (
        (["sacro"], "--to sacro without --test; expected a store"),
        (["sacro", "--test", str(tmp_path / "none")], "no such folder"),
        (["onnx", "--test", str(other.path)], "expected it with sacro alone"),
        (["sacro", "--test", str(other.path), "--declared", "d.json"], "with --to sacro"),
    ):
        assert main([*line, *words]) == 2
        assert problem in capsys.readouterr().err
    assert not out.exists() and not kept.exists()


def table(heading: str) -> list[list[float]]:
    """The numbers of the page's table whose first column has this heading."""
    lines = iter(PAGE.read_text().splitlines())
    next(line for line in lines if line.startswith(f"| {heading} |"))
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            return rows
        cells = line.strip("|").split("|")
        rows.append([float(re.sub(r"[,% ]", "", cell)) for cell in cells])
    return rows


def limits(epsilon: float, num_images: int) -> tuple[float, float, float]:
    """The largest area under the ROC curve for one image added and for one replaced by another, and
    the noise multiplier.
    """
    count = float(num_images)
    base = PrivacyConfig(
        dataset_size=num_images,
        expected_batch_size=count,
        sampling="full_batch",
        steps=1,
        max_grad_norm=1.0,
        target_epsilon=epsilon,
    )
    plan = make_plan(base)
    pair = replace(
        base,
        target_epsilon=None,
        noise_multiplier=plan.noise.multiplier,
        num_units=num_images // 2,
        max_records_per_unit=2,
        allow_weak_guarantee=True,
    )
    one, two = (figures_of(parts_of([(made, 1)]), fixed=True) for made in (plan, make_plan(pair)))
    return one["attack"]["auc"], two["unit_attack"]["auc"], plan.noise.multiplier


def test_the_pages_limits_are_those_that_statements_have() -> None:
    rows = table("epsilon")
    assert [row[0] for row in rows] == [0.5, 1, 2, 4, 8]
    for epsilon, small, replaced, large in rows:
        one, two, noise = limits(epsilon, 2000)
        assert (small, replaced) == (round(one, 3), round(two, 3))
        assert large == round(limits(epsilon, 100_000)[0], 3)
        # the closed form of one Gaussian, which the page gives
        for shift, found in ((1, one), (2, two)):
            assert found == pytest.approx(NormalDist().cdf(shift / noise / 2**0.5), abs=2e-6)


def test_measured_areas_stand_beside_the_limits_of_their_epsilons() -> None:
    rows = re.findall(
        r"^\| (\d) \| .* \| ([\d,]+) \| (0\.\d+) \(.*\| (0\.\d+) \|$", PAGE.read_text(), re.M
    )
    assert len(rows) == 4
    for epsilon, tested, measured, limit in rows:
        assert float(limit) == round(limits(float(epsilon), 2000)[0], 3)
        error = NormalDist().inv_cdf(0.999) * (1 / (6 * int(tested.replace(",", "")))) ** 0.5
        assert float(measured) <= float(limit) + error


def test_the_pages_threshold_of_a_flag_is_that_of_chance() -> None:
    """The variance of the area under the ROC curve where scores tell nothing, by simulation."""
    rng, z = np.random.default_rng(0), NormalDist().inv_cdf(0.95)
    for num, flagged in table("images of each kind that the attack is tested on"):
        exact = ((2 * num + 1) / (12 * num * num)) ** 0.5
        assert flagged == round(0.5 + z * exact, 3)
        if num == 40:
            ranks = np.argsort(np.argsort(rng.random((20_000, 80)), axis=1), axis=1) + 1
            area = (ranks[:, :40].sum(axis=1) - 40 * 41 / 2) / 1600
            assert area.std() == pytest.approx(exact, rel=0.02)  # its error is 0.5%
            assert (area >= flagged).mean() == pytest.approx(0.05, abs=0.01)
