"""docs/papers.md: every row leads to a recipe and a command that exist, and every figure of ours to
the JSON that it was measured in.
"""

import json
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
from scipy import stats

from dpvision.recipes import RECIPES

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import papers  # noqa: E402
import papers_page  # noqa: E402

FACTS = json.loads((ROOT / "benchmarks" / "papers.json").read_text())
ROWS = [r for paper in FACTS["papers"] for table in paper["tables"] for r in table["rows"]]
PAGE = (ROOT / "docs" / "papers.md").read_text()


def _cells(name: str) -> list[str]:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_is_what_the_runner_writes() -> None:
    assert papers_page.page() == PAGE


def test_a_row_stands_once_with_its_facts_and_an_existing_recipe() -> None:
    names = [row["row"] for row in ROWS]
    assert len(names) == len(set(names))
    for row in ROWS:
        _, what, paper, recipe, here = _cells(row["row"])
        assert (what, paper, recipe) == (
            row["what"],
            row["paper"],
            f"`{row['recipe']}`" if "recipe" in row else "",
        )
        assert here and row.get("recipe", "vip.base") in RECIPES, row


def test_each_figure_of_ours_is_the_middle_of_its_results_after_rounding() -> None:
    """Read from the page, and found anew in benchmarks/results."""
    figure = re.compile(
        r"(?:(?P<label>.*): )?([-\d.,]+)(?: \(([-\d.,]+) to ([-\d.,]+)\))?(?: \[(\w+)\]\(#\w+\))?"
    )
    seen = 0
    for row in ROWS:
        run = [ours for ours in row.get("ours", []) if papers_page.result_files(ours[1])]
        cell = _cells(row["row"])[-1].split("; ")
        printed = [found.groups() for part in cell[: len(run)] if (found := figure.fullmatch(part))]
        assert len(printed) == len(run), row
        for (label, value, low, high, key), (name, result, case, variant, metric) in zip(
            printed, run, strict=True
        ):
            entries = [
                entry
                for file in papers_page.result_files(result)
                for entry in json.loads(file.read_text())["rows"]
                if (entry["case"], entry["variant"], entry["metric"]) == (case, variant, metric)
            ]
            values = sorted(entry["value"] for entry in entries)
            truth = (
                values[len(values) // 2],
                min(entry["low"] for entry in entries),
                max(entry["high"] for entry in entries),
            )
            assert (label or "") == name and key in (None, result), row
            for text, number in zip((value, low or value, high or value), truth, strict=True):
                digits = len(text.partition(".")[2])
                assert float(text.replace(",", "")) == pytest.approx(
                    number, abs=0.5 * 10**-digits + 1e-9
                ), row
            seen += 1
    assert seen > 100


def test_a_row_is_marked_at_chance_where_an_exact_test_cannot_tell_it_from_chance() -> None:
    """Against the binomial law, one-sided at 2.3%: two standard errors of the normal law."""
    marked = 0
    for row in ROWS:
        if "chance" not in row:
            continue
        figure = papers_page.figures(row)[-1]
        right = round(figure.value / 100 * row["of"])
        tail = stats.binom.sf(right - 1, row["of"], row["chance"] / 100)
        if not 0.015 < tail < 0.035:  # the normal law is only near the binomial
            assert ("**at chance**" in _cells(row["row"])[-1]) == (tail > 0.0228), row
        marked += tail > 0.0228
    assert marked >= 2, "relations and objects of scenes"


def test_each_result_has_a_miniature_or_what_made_it() -> None:
    modules: dict[str, set[str]] = {}
    for key, result in FACTS["results"].items():
        assert "module" in result or "by" in result, key
        assert ("by" in result) == ("file" in result), key
        if "module" in result:
            modules.setdefault(result["module"], set()).add(key)
        if "by" in result:
            assert all(file.exists() for file in papers_page.result_files(key)), key
        if "log" in result:
            assert (ROOT / "docs" / "log" / result["log"]).exists()
    for module, keys in modules.items():
        assert set(import_module(module).MINIATURES) == keys


def test_a_dry_run_names_each_miniature_once_and_runs_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["papers.py", "--rows", "vip-t3-base,cap-t6-tiny,vip-f6", "--dry-run"]
    )
    papers.main()
    assert capsys.readouterr().out == "miniatures: parameters, accounting\n"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("vip-t99", "expected rows of --list. Correct the name."),
        ("vip-t1-simclr", "its published weights are not at hand"),
    ],
)
def test_an_unknown_row_and_one_without_a_miniature_are_refused(
    rows: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["papers.py", "--rows", rows])
    with pytest.raises(SystemExit) as stopped:
        papers.main()
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_the_exact_miniatures_give_their_results_again() -> None:
    import papers_exact

    (file,) = papers_page.result_files("parameters")
    again = papers_exact.parameters(papers.Work(ROOT, ROOT))
    assert again == json.loads(file.read_text())["rows"]


@pytest.mark.parametrize(
    "key", ["vip_masking", "vip_batches", "lab_mae", "cap_starts", "cap_decoders"]
)
def test_the_runs_of_a_miniature_are_valid_and_of_equal_sample_gradients(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their command lines are taken by `dpvision train`, and private arms that are compared with
    one another take as many sample-gradients.
    """
    import papers_captions
    import papers_trained

    from dpvision.cli.train import TrainArgs
    from dpvision.cli.typed import joined, parse_run
    from dpvision.config.resolve import resolve

    configs = {}

    def parsed(root: Path, line: list[str]) -> Path:
        if root.name not in configs:
            recipe = RECIPES[line[0]]()
            args, typed = parse_run(TrainArgs(recipe=line[0]), recipe, line, "train", "")
            configs[root.name] = resolve(recipe, joined(typed, {"data.store": args.data}))
        return root

    store = type("Store", (), {"num_records": 200_000})
    for module in (papers_trained, papers_captions):
        monkeypatch.setattr(module, "trained", parsed)
        monkeypatch.setattr(module, "dpvision", lambda *words: None)
        monkeypatch.setattr(module, "open_store", lambda path: store)
    module = import_module(FACTS["results"][key]["module"])
    arms, work = module.MINIATURES[key].keywords["arms"], papers.Work(tmp_path, tmp_path)
    for arm in arms.values():
        if arm.warm or arm.train != "none":
            if module is papers_trained:
                papers_trained.vip_run(work, arm)
            else:
                papers_captions.captioner_run(arm, work)
    private = [c for c in configs.values() if c.privacy.guarantee == "dp"]
    gradients = {c.privacy.expected_batch_size * c.privacy.steps for c in private}
    assert len(gradients) == 1 and len(configs) > len(private) > 0, gradients


@pytest.mark.parametrize(
    ("module", "key", "case"),
    [
        ("papers_trained", "vip_records", "random weights"),
        ("papers_captions", "cap_starts", "random weights"),
    ],
)
def test_random_weights_get_the_scores_of_the_miniatures_and_are_kept(
    module: str, key: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe is above the chance of six attributes only where the encoder tells scenes apart."""
    import papers_trained

    for name, num in (("NUM_FIT", 400), ("NUM_TEST", 200)):
        monkeypatch.setattr(papers_trained, name, num)
    keywords = import_module(module).MINIATURES[key].keywords
    work = papers.Work(tmp_path, tmp_path)
    arms = {case: keywords["arms"][case]}
    made = import_module(module).MINIATURES[key](work, arms=arms)
    probe = {r["variant"]: r["value"] for r in made}["mean of attributes, 2x2"]
    chance = 100 * sum(1 / len(v) for v in papers_trained.ATTRIBUTES.values()) / 6
    assert probe > chance + 5
    assert import_module(module).MINIATURES[key](work, arms=arms) == made


@pytest.mark.slow
def test_the_smallest_runs_end_in_the_figures_that_the_rows_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm start, a private run and a run without privacy, all of the product, and their
    probes.
    """
    import papers_encoders
    import papers_trained as vip

    for name, value in (
        ("NUM_FIT", 100),
        ("NUM_TEST", 50),
        ("TEXTURES", 20),
        ("WARM", vip.budget(32, 2) | {"privacy.dataset_size": 20}),
    ):
        monkeypatch.setattr(vip, name, value)
    monkeypatch.setattr(vip, "GRADIENTS", 500)
    own, work = tuple(vip.budget(20, 2).items()), papers.Work(tmp_path, tmp_path)
    arms = {
        "private": vip.Arm(own=own, records=300),
        "without privacy": vip.Arm(records=300, train="plain"),
    }
    made = vip.autoencoders(work, arms)
    named = {
        tuple(figure[3:])
        for row in ROWS
        for figure in row.get("ours", [])
        if figure[1] in ("vip_records", "vip_batches", "vip_masking")
    }
    for case in arms:
        assert named <= {(r["variant"], r["metric"]) for r in made if r["case"] == case}
    losses = {r["value"] for r in made if r["variant"] == "masked loss"}
    assert len(losses) == len(arms), "both trained"
    probes = {"probe": "--protocols linear_lars,few_shot_dpcap --shots 1 --lars.epochs 2"}
    probes["probe"] += " --lars.warmup-epochs 1 --lars.no-augment"
    monkeypatch.setattr(papers_encoders, "PROBES", probes)
    store = vip.public_scenes(work, 0, 200)
    spec = str(vip.vip_run(work, arms["private"]))
    found = papers_encoders.probed(work, "private", spec, store, vip.public_scenes(work, 900, 100))
    assert [r["variant"] for r in found] == [
        "LARS probe",
        "1-shot DP-Cap probe, mean",
        "1-shot DP-Cap probe, 2x2",
    ]
    assert all(r["low"] <= r["value"] <= r["high"] for r in found)
