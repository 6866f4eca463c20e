"""`dpvision adapt --total-epsilon`: a head gets what another run on the same store left of a total
that was fixed before it, and the total is never passed.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from dpvision.cli import main
from dpvision.config import PrivacyConfig
from dpvision.data.store import Store
from dpvision.errors import PrivacyError
from dpvision.privacy import gaussian
from dpvision.privacy.account import epsilon_left, store_account
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.plan import DPPlan, make_plan
from dpvision.privacy.store_marks import StoreLedgers

from ..adapt.runs_of_heads import write_digits

N, TOTAL = 300, 3.0
FULL = PrivacyConfig(
    dataset_size=N,
    expected_batch_size=N,
    sampling="full_batch",
    steps=1,
    max_grad_norm=1.0,
    target_epsilon=1.0,
)
POISSON = replace(FULL, sampling="poisson", expected_batch_size=30, steps=7, target_epsilon=2.0)
HEAD = ["--num-classes", "10", "--dataset-size", str(N), "--quiet", "--json"]


@pytest.fixture
def mine(tmp_path: Path) -> Store:
    return write_digits(tmp_path / "mine", 0, N)


def charge(store: Store, plan: DPPlan, run_id: str) -> None:
    """Charge every step of a plan to a store."""
    with Ledger.open(store.path, run_id, plan, resume=False) as ledger:
        for _ in range(plan.steps):
            ledger.append()


def full(epsilon: float, steps: int = 1) -> DPPlan:
    return make_plan(replace(FULL, steps=steps, target_epsilon=epsilon))


def test_of_two_gaussians_the_rest_is_the_closed_forms(mine: Store) -> None:
    """mu^2 of the total is the sum of the runs' mu^2; mu = 1 / noise multiplier of one release."""
    charge(mine, full(2.0), "a" * 16)
    left = epsilon_left(mine.path, TOTAL, full)
    delta = full(1.0).delta
    mu, first = (1 / gaussian.noise_for(epsilon, delta) for epsilon in (TOTAL, 2.0))
    exact = gaussian.noise_for(left, delta) ** -2
    assert exact <= mu**2 - first**2 and exact == pytest.approx(mu**2 - first**2, rel=5e-3)


@pytest.mark.parametrize("steps", [1, 60])
def test_the_ledgers_total_is_just_below_it(mine: Store, steps: int) -> None:
    assert epsilon_left(mine.path, TOTAL, full) == TOTAL, "nothing was charged before"
    charge(mine, make_plan(POISSON), "a" * 16)
    charge(mine, full(epsilon_left(mine.path, TOTAL, full), steps), "b" * 16)
    found = store_account(mine.path).epsilon
    assert found is not None and 0.998 * TOTAL < found <= TOTAL


def test_where_nothing_is_left_it_is_refused(mine: Store) -> None:
    charge(mine, full(2.0), "a" * 16)
    for total in (0.5, 2.0):
        with pytest.raises(PrivacyError, match=r"epsilon 2.* was charged .* Raise --total-epsilon"):
            epsilon_left(mine.path, total, full)
    charge(mine, make_plan(replace(FULL, guarantee="none", target_epsilon=None)), "b" * 16)
    with pytest.raises(PrivacyError, match=r"without a guarantee .* no total holds"):
        epsilon_left(mine.path, TOTAL, full)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--epsilon", "1"], "with epsilon given"),
        (["--privacy.noise-multiplier", "3"], "with privacy.noise_multiplier given"),
        (["--seeds", "2"], "with seeds given"),
        (["--select", "one_step,prototypes"], "with select given"),
        (["--non-private"], "with non_private given"),
        (["--privacy.sampling", "poisson", "--privacy.expected-batch-size", "30"], "batches"),
        (["--total-epsilon", "-1"], "target_epsilon"),
    ],
)
def test_it_is_for_one_head_whose_noise_nothing_else_fixes(
    mine: Store,
    tmp_path: Path,
    more: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["adapt", "--data", str(mine.path), "--encoder", "pixels", "--runs", str(tmp_path)]
    assert main([*argv, *HEAD, "--total-epsilon", "3", *more]) == 2
    assert words in capsys.readouterr().err
    assert store_account(mine.path).runs == ()


@pytest.mark.slow
@pytest.mark.usefixtures("gates_once")
def test_a_head_after_fine_tuning_with_batch_norm_has_the_total_in_its_statement(
    mine: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The two commands of docs/transfer.md, under a cap set before the first."""
    torch.manual_seed(0)
    file = tmp_path / "weights.safetensors"
    save_file(timm.create_model("test_efficientnet").state_dict(), file)
    assert main(["ledger", str(mine.path), "--set-cap", "3", "--cap-delta", "1e-3"]) == 0
    argv = ["adapt", "--data", str(mine.path), "--runs", str(tmp_path / "runs"), *HEAD]
    tuned = [*argv[:1], "transfer.micro_film", *argv[1:], "--name", "tuned"]
    tuned += ["--encoder", f"timm:test_efficientnet@{file}", "--public-weights", "T; CC0; a test"]
    tuned += ["--model.encoder.image-size", "32", "--privacy.expected-batch-size", "30"]
    tuned += ["--privacy.steps", "7", "--hardware.physical-batch-size", "16"]
    assert main([*tuned, "--epsilon", "3.5"]) == 2
    assert "cap" in capsys.readouterr().err, "refused before either has run"
    assert main([*tuned, "--epsilon", "2"]) == 0
    refit = [*argv, "--encoder", str(tmp_path / "runs" / "tuned"), "--name", "refit"]
    refit += ["--total-epsilon", str(TOTAL)]
    capsys.readouterr()
    assert main([*refit, "--dry-run"]) == 0
    assert 0.998 * TOTAL < json.loads(capsys.readouterr().out)["store_total"]["after"] <= TOTAL
    assert main(refit) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["this_run_epsilon"] < 2.5 and printed["epsilon"] > 0.998 * TOTAL
    root = tmp_path / "runs" / "refit"
    assert main(["report", str(root), "--store", str(mine.path), "--tuning", "none"]) == 0
    guarantee = json.loads((root / "statement.json").read_text())["guarantee"]
    assert 0.998 * TOTAL < guarantee["epsilon"] <= TOTAL
    ledgers = StoreLedgers.of(mine.path).folder
    before = {path.name: path.read_bytes() for path in ledgers.glob("*.jsonl")}
    assert main([*refit, "--resume"]) == 0, "finished: its own epsilon stands"
    assert before == {path.name: path.read_bytes() for path in ledgers.glob("*.jsonl")}


def test_the_plan_that_was_made_is_checked_too(
    mine: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another run may have been charged since, or the head's own plan may cost more."""
    charge(mine, full(2.0), "a" * 16)
    monkeypatch.setattr("dpvision.privacy.account.epsilon_left", lambda *_: 2.9)
    argv = ["adapt", "--data", str(mine.path), "--encoder", "pixels", "--runs", str(tmp_path)]
    assert main([*argv, *HEAD, "--total-epsilon", "3"]) == 2
    assert "epsilon 3.798 together; expected at most 3.0" in capsys.readouterr().err
    assert len(store_account(mine.path).runs) == 1


def test_a_run_that_has_begun_counts_whole_before_its_first_charge(mine: Store) -> None:
    """Two heads that are planned at once would both take what is left: the second is refused when
    its ledger opens, and a third gets nothing, though neither has been charged.
    """
    plan = full(epsilon_left(mine.path, TOTAL, full))
    with Ledger.open(mine.path, "a" * 16, plan, resume=False, total=TOTAL):
        with (
            pytest.raises(PrivacyError, match=r"would have epsilon 4\.\d+ together"),
            Ledger.open(mine.path, "b" * 16, plan, resume=False, total=TOTAL),
        ):
            pass
        with pytest.raises(PrivacyError, match="at least 1% of the total"):
            epsilon_left(mine.path, TOTAL, full)
    assert store_account(mine.path).epsilon == 0.0
