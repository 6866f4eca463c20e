"""Claims of the papers: the page's figures are the computed ones, and these agree with accountants
that others wrote.
"""

import json
import math
from pathlib import Path

import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant

from dpvision.cli import main
from dpvision.privacy import second_accountant
from dpvision.privacy.claims import CLAIMS, Claim, recompute

PAGE = Path(__file__).parents[2] / "docs" / "claims.md"
SOME = ("vip-icml-4.1", "vip-A.5-imagenet-ft", "dpcap-T4-eps1", "vip-T3-2M-n2.0M")


def page_rows() -> dict[str, list[str]]:
    lines = [
        line.strip("| ").split(" | ")
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ")
    ]
    return {cells[0]: cells for cells in lines[1:]}


def as_on_the_page(claim: Claim) -> list[str]:
    found = recompute(claim)
    return [
        f"{claim.dataset_size:,}",
        f"{claim.expected_batch_size:,}",
        f"{claim.noise_multiplier:g}",
        f"{claim.steps:,}{'' if claim.steps_stated else ' *'}",
        f"{claim.delta:.4g}",
        "" if claim.claimed_epsilon is None else f"{claim.claimed_epsilon:g}",
        f"{found.epsilon_rdp_mironov:.2f}",
        f"{found.epsilon_rdp:.2f}",
        f"{found.epsilon:.2f}",
        "" if found.holds is None else "yes" if found.holds else "no",
    ]


def check_page(names: list[str]) -> None:
    rows = page_rows()
    for claim in CLAIMS:
        if claim.name in names:
            assert [cell.strip() for cell in (rows[claim.name] + [""])[1:11]] == as_on_the_page(
                claim
            ), claim.name


def test_the_page_has_every_claim_once() -> None:
    assert list(page_rows()) == [claim.name for claim in CLAIMS] and len(
        {claim.name for claim in CLAIMS}
    ) == len(CLAIMS)


def test_the_page_has_the_computed_figures() -> None:
    check_page(list(SOME))


@pytest.mark.slow
def test_the_page_has_the_computed_figures_of_every_claim() -> None:
    check_page([claim.name for claim in CLAIMS])


@pytest.mark.parametrize(
    "claim", [claim for claim in CLAIMS if claim.name in SOME], ids=lambda claim: claim.name
)
def test_figures_agree_with_other_accountants(claim: Claim) -> None:
    """Renyi with dp-accounting's, up to its coarser orders; PLD with the package's second
    accountant, which shares no code with it.
    """
    found, rate = recompute(claim), claim.expected_batch_size / claim.dataset_size
    step = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(claim.noise_multiplier))
    theirs = RdpAccountant().compose(step, claim.steps).get_epsilon(claim.delta)
    assert 0.98 * theirs <= found.epsilon_rdp <= theirs * (1 + 1e-6)
    assert found.epsilon < found.epsilon_rdp < found.epsilon_rdp_mironov
    second = second_accountant.epsilon(
        [second_accountant.release(rate, claim.noise_multiplier, claim.steps)], claim.delta
    )
    assert math.isclose(found.epsilon, second, rel_tol=0.01)


def test_the_command_prints_all_of_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two = tuple(claim for claim in CLAIMS if claim.name in SOME[2:])
    monkeypatch.setattr("dpvision.privacy.claims.CLAIMS", two)
    assert main(["plan", "--claims", "--json"]) == 0
    made = {row["claim"]["name"]: row for row in json.loads(capsys.readouterr().out)["claims"]}
    assert made[SOME[2]]["holds"] and not made[SOME[3]]["holds"]
    assert main(["plan", "--claims"]) == 0
    assert "NO" in capsys.readouterr().out
    assert main(["plan", "vip.base", "--claims"]) == 2
    assert "--claims with recipe" in capsys.readouterr().err
