"""The planner's page: what its sliders show is what the accountant computes, and it asks nothing of
other machines.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from dpvision.cli import main
from dpvision.config import PrivacyConfig
from dpvision.plan import tables
from dpvision.privacy.plan import DPPlan, draft_plan
from dpvision.privacy.planner import what_if
from dpvision.privacy.printed import percent_up, up
from dpvision.report.plan_page import grid_of, make_plan_page

pytestmark = pytest.mark.slow  # the grid of a page takes half a minute
CONFIG = PrivacyConfig(
    dataset_size=50_000, expected_batch_size=2_000, steps=300, noise_multiplier=1.1
)
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = draft_plan(CONFIG)
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    return make_plan_page(
        path, None, plan, what_if(CONFIG, num_parameters=10**6), tables.all_tables(plan)
    )


def embedded(page: Path) -> dict:
    found = re.search(
        r'<script type="application/json" id="grid">(.*?)</script>', page.read_text(), re.DOTALL
    )
    assert found is not None
    return json.loads(found[1])


def spent(noise: float, batch: float, steps: int) -> float:
    plan = draft_plan(
        PrivacyConfig(
            dataset_size=50_000,
            expected_batch_size=batch,
            steps=steps,
            noise_multiplier=noise,
            delta=1e-5,
        )
    )
    assert plan.epsilon is not None
    return plan.epsilon


def test_the_sliders_start_at_the_plan(page: Path) -> None:
    grid = embedded(page)
    at = {
        name: grid[name][i]
        for name, i in zip(("batch", "noise", "steps"), grid["start"], strict=True)
    }
    assert at == {"batch": 2_000, "noise": 1.1, "steps": 300}


def test_embedded_values_are_the_accountants_rounded_up(page: Path) -> None:
    grid = embedded(page)
    for b, n, s in ((0, 0, 0), (3, 3, 2), (6, 2, 4), (2, 8, 1), (5, 4, 3)):
        stated = spent(grid["noise"][n], grid["batch"][b], grid["steps"][s])
        assert stated <= grid["epsilon"][b][n][s] <= 1.01 * stated + 2e-3
    whole = draft_plan(
        PrivacyConfig(
            **{**CONFIG.__dict__, "expected_batch_size": 50_000, "sampling": "full_batch"}
        )
    )  # a closed form: fast
    table = tables.grid(whole)
    shown = np.array(grid_of(None, whole, table, None)["epsilon"]).ravel()
    assert np.all(shown >= table.column("epsilon")) and shown == pytest.approx(
        table.column("epsilon"), rel=1.1e-5
    )


def test_the_page_requests_nothing_and_runs_its_own_script_only(page: Path) -> None:
    text = page.read_text()
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "").replace(
        "http://www.w3.org/1999/xlink", ""
    )
    assert "https://" not in text and "default-src 'none'" in text and "script-src 'sha256-" in text
    assert text.count("<script") == 2 and " onclick" not in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: the sliders run in a browser")
def test_a_browser_shows_the_epsilon_of_the_sliders(page: Path) -> None:
    grid = embedded(page)
    for b, n, s in ((3, 3, 2), (0, 8, 4), (6, 0, 1)):
        command = [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--virtual-time-budget=2000",
            "--dump-dom",
        ]
        shown = subprocess.run(
            [*command, f"{page.as_uri()}#{b}-{n}-{s}"], capture_output=True, text=True, timeout=900
        ).stdout
        value = re.search(r'id="epsilon">([^<]*)<', shown)
        assert value is not None
        exact = grid["epsilon"][b][n][s]
        assert exact - 1e-6 <= float(value[1]) < exact + 0.0101
        words = re.search(r'id="command">([^<]*)<', shown)
        assert (
            words is not None
            and f"--noise-multiplier {grid['noise'][n]} " in words[1]
            and f"--steps {grid['steps'][s]}" in words[1]
        )


def test_a_plan_for_people_is_told_by_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = draft_plan(
        PrivacyConfig(**{**CONFIG.__dict__, "num_units": 25_000, "max_records_per_unit": 2})
    )
    assert isinstance(plan, DPPlan)
    path = make_plan_page(tmp_path / "p.html", None, plan, what_if(CONFIG), tables.all_tables(plan))
    assert embedded(path)["command"].endswith("--num-units 25000 --max-records-per-unit 2")


def test_the_page_gives_a_person_the_figures_that_the_plan_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: epsilon 1.4201 and an attack of 3.6%, which were those of one image."""
    line = [
        "plan",
        "--dataset-size",
        "2000",
        "--num-units",
        "500",
        "--max-records-per-unit",
        "4",
        "--expected-batch-size",
        "2000",
    ]
    line += [
        "--steps",
        "100",
        "--sampling",
        "full_batch",
        "--target-unit-epsilon",
        "8",
        "--page",
        str(tmp_path / "p.html"),
        "--json",
    ]
    assert main(line) == 0
    told, text = json.loads(capsys.readouterr().out), (tmp_path / "p.html").read_text()
    cells = dict(re.findall(r'<tr><td>([^<]*)</td><td class="n">([^<]*)</td></tr>', text))
    assert cells["best attack at 1.0% false positives"] == percent_up(told["attack_tpr"]["0.01"])
    assert cells["epsilon by PLD, stated"] == up(told["unit_epsilon"], 4)
    assert cells["epsilon by Renyi divergences, as the papers, for one image"] == up(
        told["epsilon_rdp"], 4
    )
    assert "What an attacker can learn about a person" in text
