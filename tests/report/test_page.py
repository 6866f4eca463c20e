"""Both pages stand alone, hold what belongs to them and nothing else, and can be read by
everybody.
"""

import base64
import html
import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dpvision.config import PrivacyConfig
from dpvision.data.open import open_store
from dpvision.data.synthetic_store import write_scenes
from dpvision.errors import CheckpointError, PrivacyError
from dpvision.eval.class_scores import class_scores
from dpvision.eval.score import Visibility
from dpvision.files import write_json
from dpvision.privacy.plan import make_plan
from dpvision.privacy.printed import percent_up, up
from dpvision.report.operator_page import make_operator_page
from dpvision.report.page import _score_groups, make_report, recompute_code
from dpvision.report.reconstructions import reconstruct_some
from dpvision.statement.declarations import Declared
from dpvision.statement.statement import make_statement

from ..statement.runs import POISSON, PRIVACY, PUBLIC_SCORES, make_run, make_store, score_entry

SENTINEL = "31.4159265"
DECLARED = Declared(
    "Sorter <1>",
    ["A hospital", "B & C"],
    "sorting scans",
    "EU",
    "2026-11-26",
    "Healthcare",
    "set by the board",
    data_set="scans of one ward",
)
VOID = {"meta", "img", "br", "hr", "link", "input"}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes") / "public"
    write_scenes(folder, 12, 32)
    return folder


def classes_of(visibility: Visibility, name: str) -> dict[str, Any]:
    """Figures per class of 40 images in two groups."""
    rng = np.random.default_rng(0)
    on_N = np.arange(40) % 2
    score_N = np.clip(0.3 * on_N + 0.7 * rng.random(40), 0, 1)
    return class_scores(
        np.stack([1 - score_N, score_N], axis=1),
        np.stack([1 - on_N, on_N], axis=1),
        ("cat", name),
        np.arange(40),
        groups={"site": np.where(np.arange(40) < 20, "north", "south")},
        visibility=visibility,
    ).to_dict()


@pytest.fixture(scope="module")
def pages(
    finished_run: Path, scenes: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    shutil.copytree(finished_run.parent, folder / "copy")
    run = folder / "copy" / "run"
    private = [score_entry(SENTINEL, 0.4, "linear probe, mean", "private", "ward-b")]
    write_json(run / "confidential" / "scores.json", private)
    write_json(run / "class_scores.json", {"pets": classes_of("public", "<dog>")})
    write_json(
        run / "confidential" / "class_scores.json", {"ward-b": classes_of("private", SENTINEL)}
    )
    lines = (run / "confidential" / "metrics.jsonl").read_text().splitlines()
    lines[-1] = json.dumps({**json.loads(lines[-1]), "loss": float(SENTINEL)})
    (run / "confidential" / "metrics.jsonl").write_text(
        "\n".join(lines) + "\n" + '{"step": 61, "lo'
    )  # cut by a crash
    written = {
        "report": make_report(run, scenes, declared=DECLARED),
        "operator": make_operator_page(run, scenes),
    }
    assert written["operator"].parent.name == "confidential"
    return {name: path.read_text() for name, path in written.items()}


@pytest.mark.parametrize("name", ["report", "operator"])
def test_a_page_asks_nothing_of_other_machines_and_runs_no_script(
    pages: dict[str, str], name: str
) -> None:
    page = pages[name]
    assert (
        "<script" not in page
        and "javascript:" not in page
        and "@import" not in page
        and "url(http" not in page
    )
    assert "default-src 'none'" in page
    for target in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert target.startswith(("data:image/png;base64,", "#")), target[:80]


@pytest.mark.parametrize("name", ["report", "operator"])
def test_every_image_is_described_in_words(pages: dict[str, str], name: str) -> None:
    for tag in re.findall(r"<(?:img|svg)\b[^>]*>", pages[name]):
        assert re.search(r'(?:alt|aria-label)="[^"]{10,}"', tag), tag[:200]


@pytest.mark.parametrize("name", ["report", "operator"])
def test_tags_are_closed_and_ids_are_unique(pages: dict[str, str], name: str) -> None:
    class Checker(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []
            self.ids: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.ids += [value for key, value in attrs if key == "id" and value]
            if tag not in VOID:
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open and self.open.pop() == tag, (tag, self.getpos())

        def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.ids += [value for key, value in attrs if key == "id" and value]

    checker = Checker()
    checker.feed(pages[name])
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))


@pytest.mark.parametrize("name", ["report", "operator"])
def test_figures_follow_the_theme_of_the_page(pages: dict[str, str], name: str) -> None:
    drawn = "".join(re.findall(r"<svg.*?</svg>", pages[name], re.DOTALL))
    assert "var(--accent)" in drawn and "#0102" not in drawn and "DejaVu" not in drawn


def test_nothing_confidential_reaches_the_report(pages: dict[str, str]) -> None:
    assert SENTINEL not in pages["report"] and "ward-b" not in pages["report"]
    assert (
        SENTINEL in pages["operator"]
        and "ward-b" in pages["operator"]
        and "Confidential: do not release" in pages["operator"]
    )


def test_each_pages_classes_are_those_that_it_may_show(
    pages: dict[str, str], copy_of: Callable[[], Path]
) -> None:
    whole = classes_of("public", "<dog>")["rows"][1]["figures"]["AUROC"]
    figure = "{:.1f}% ({:.1f} to {:.1f})".format(*(100 * share for share in whole.values()))
    report, operator = pages["report"], pages["operator"]
    assert "&lt;dog&gt;" in report and figure in report and "site=north" in report
    assert "Tested on ward-b" in operator and SENTINEL in operator and figure in operator
    run = copy_of()
    write_json(run / "class_scores.json", {"ward-b": classes_of("private", "dog")})
    with pytest.raises(PrivacyError, match=r"class_scores.json has private figures; expected"):
        make_report(run)
    (run / "class_scores.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"class_scores.json cannot be read"):
        make_report(run)


def test_the_guarantee_comes_in_words_before_figures_and_settings(pages: dict[str, str]) -> None:
    places = [
        pages["report"].index(text)
        for text in ("strongest attacker", "<h2>Figures", "Settings", "The full statement")
    ]
    assert places == sorted(places)


def test_tuning_other_runs_and_attacks_stand_at_the_headline(
    finished_run: Path, pages: dict[str, str]
) -> None:
    page, history = html.unescape(pages["report"]), make_statement(finished_run)["history"]
    for part in ("tuning", "other_runs", "audits"):
        place = page.index(history[part]["text"])
        assert page.index("<h2>What is promised") < place < page.index("strongest attacker")


def test_what_was_declared_is_shown_and_what_was_not_is_left_to_fill_in(
    pages: dict[str, str],
) -> None:
    page = pages["report"]
    own, officer = page.index("Declared by the operator"), page.index("Questions of EDPB")
    for told in ("Sorter &lt;1&gt;", "A hospital; B &amp; C", "2026-11-26", "scans of one ward"):
        assert own < page.index(told) < page.index('<ul class="facts"')
    assert "Sorter <1>" not in page
    blank = '<span class="blank">to fill in</span>'  # organisation, held by, kept until
    assert page[:officer].count(blank) == 3 == page[officer:].count(blank)


def test_questions_of_law_have_facts_of_the_statement_and_open_judgements(
    finished_run: Path, pages: dict[str, str]
) -> None:
    page, statement = pages["report"], make_statement(finished_run)
    titles = ["Questions of EDPB Opinion 28/2024", "Draft data protection impact assessment"]
    titles += ["(a) Desc", "(b) Nec", "(c) Risks", "(d) Measures", "How to check it"]
    places = [page.index(title) for title in titles]
    assert places == sorted(places)
    opinion, assessment = page[places[0] : places[1]], page[places[1] : places[-1]]
    attack = statement["guarantee"]["attack"]
    for part in (opinion, assessment):
        assert statement["headline"] in part and part.count('<p class="judge">') >= 7
        figures = re.findall(r"[\d.]+%", re.sub(r"<[^>]*>", "", part))
        stated = [percent_up(attack[name]) for name in ("tpr_at_fpr_0.01", "auc")]
        assert figures == [stated[0], "1%", stated[1], "50%"]
    for heading in ("Privacy parameters", "Unit of privacy", "Algorithms and correctness"):
        assert page.index("NIST SP 800-226") < page.index(f"<h3>{heading}") < places[0]


def test_without_declarations_there_are_no_questions_of_law(copy_of: Callable[[], Path]) -> None:
    page = make_report(copy_of()).read_text()
    assert "EDPB" not in page and "to fill in" not in page and "judge" not in body(page)


def body(page: str) -> str:
    return page[page.index("<body>") :]


def test_settings_are_those_that_the_run_read(finished_run: Path, pages: dict[str, str]) -> None:
    settings = make_statement(finished_run)["settings"]
    shown = set(re.findall(r"<dt>((?:model|data|optim|hardware)\.[\w.]+)</dt>", pages["report"]))
    assert settings["optim"]["name"] == "adamw" and settings["optim"]["momentum"] == 0.9
    assert "optim.betas" in shown and "optim.momentum" not in shown  # read by SGD alone
    assert settings["optim"]["ema_decay"] is None and "optim.ema_decay" not in shown
    assert {"model.encoder.patch_size", "optim.learning_rate", "data.crop_scale"} <= shown


def test_the_page_shows_every_text_of_the_statement(
    finished_run: Path, pages: dict[str, str]
) -> None:
    made = make_statement(finished_run)
    shown = html.unescape(pages["report"])
    for part in (
        made["scope"],
        made["mechanism"],
        {k: v for k, v in made["history"].items() if k not in ("lineage", "ledger")},
    ):
        for text in texts(part):
            assert text in shown, text
    for digest in (
        *made["hashes"]["weights"].values(),
        made["hashes"]["ledger"],
        made["hashes"]["config"],
        made["hashes"]["code"],
        made["hashes"]["manifest"],
    ):
        assert digest in shown


def texts(value: object) -> list[str]:
    """All sentences (strings with a space) in nested values."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for item in value for text in texts(item)]
    return [value] if isinstance(value, str) and " " in value else []


@pytest.mark.parametrize(
    "privacy",
    [
        replace(POISSON, noise_multiplier=2.0, steps=5),
        replace(
            POISSON,
            noise_multiplier=2.0,
            steps=5,
            sampling="truncated_poisson",
            max_batch_size=5600,
        ),
        PRIVACY,
    ],
    ids=lambda privacy: privacy.sampling,
)
def test_the_code_on_the_page_computes_epsilon_without_us(
    privacy: PrivacyConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(privacy)
    code = recompute_code(plan, {"guarantee": {}, "mechanism": {"steps_executed": 3}})
    assert code is not None and "dpvision" not in code
    exec(code, {})
    assert float(capsys.readouterr().out) == pytest.approx(
        plan.spent(plan.steps).epsilon, rel=1e-4
    )  # of the plan, after 3 steps


def test_the_curve_marks_the_stated_epsilon(tmp_path: Path) -> None:
    """60 of 6,000 steps: that of the plan."""
    make_store(tmp_path / "store")
    run = make_run(
        tmp_path / "run",
        tmp_path / "store",
        privacy=replace(PRIVACY, steps=6000, noise_multiplier=60.0),
    )
    page = make_report(run).read_text()
    stated = up(make_statement(run)["guarantee"]["epsilon"], 2)
    assert f"to {stated} after the 6,000 planned ones" in page and f">{stated} stated<" in page


def test_no_two_bars_of_a_group_have_one_name_and_no_chance_is_another_tests() -> None:
    classes = '10 classes of cifar10, "this is a photo of a", squash'
    asked = [
        ("captioner", f"zero-shot, walk through the label tree, {classes}", "nothing", 0.1),
        ("captioner", f"zero-shot, lowest loss, {classes}", "nothing", 0.1),
        ("random weights", f"zero-shot, lowest loss, {classes}", "nothing", 0.1),
        *(
            ("captioner", f"scene composition, {what}, lowest loss, squash", "nothing", chance)
            for what, chance in (
                ("micro", 0.5),
                ("macro over 3 kinds of swap", 0.5),
                ("swapped object", 0.4),
                ("swapped relation", 0.3),
            )
        ),
        ("encoder", "linear probe, mean", "scenes", 0.2),
        ("encoder", "linear probe, mean", "flowers", 0.2),
        ("encoder", "linear probe, 2x2", "flowers", 0.2),
        ("raw pixels", "linear probe, pixels", "flowers", 0.2),
    ]
    scores = [
        score_entry(name, 0.5, how) | {"train_data": data, "chance": chance}
        for name, how, data, chance in asked
    ]
    groups, chances = _score_groups(scores)
    assert len({title for title, _ in groups}) == len(groups) == 8 and sum(
        len(bars) for _, bars in groups
    ) == len(scores)
    for _, bars in groups:
        assert len({label for label, *_ in bars}) == len(bars)
    titles = [title for title, _ in groups]
    assert (
        sum("walk through the label tree" in title for title in titles)
        == 1
        == sum("fitted to flowers" in title for title in titles)
    )
    assert chances == [
        next(
            s["chance"]
            for s in scores
            if s["value"] == 0.5 and s["protocol"].rpartition(", ")[0] in t
        )
        for t in titles
    ]


def test_cider_is_no_share_and_is_on_no_axis_with_shares(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    run = make_run(tmp_path / "run", tmp_path / "store")
    cider = score_entry("captioner", 0.513, "CIDEr-D, greedy captions, 5 references, squash") | {
        "low": 0.49,
        "high": 0.536,
    }
    share = score_entry("captioner", 0.42, "zero-shot, trie")
    pages = []
    for scores in ([cider], [cider, share]):
        write_json(run / "scores.json", scores)
        pages.append(make_report(run, store_dir=tmp_path / "store").read_text())
    assert all(
        ">51.3<" in page and "49.0 to 53.6<" in page and "51.3%" not in page for page in pages
    )
    assert ">42.0%<" in pages[1] and pages[1].count("<svg") == pages[0].count("<svg") + 1


def test_names_are_escaped(copy_of: Callable[[], Path]) -> None:
    run = copy_of()
    write_json(
        run / "scores.json", [{**PUBLIC_SCORES[0], "test_data": "<script>alert(1)</script>"}]
    )
    assert "<script" not in make_report(run).read_text()


def test_images_of_a_private_store_are_refused_on_the_report(
    copy_of: Callable[[], Path], tmp_path: Path
) -> None:
    write_scenes(tmp_path / "private", 2, 32, public=False)
    run = copy_of()
    with pytest.raises(PrivacyError, match="--public"):
        make_report(run, tmp_path / "private")
    assert not (run / "report.html").exists()


def test_a_report_of_a_run_without_a_guarantee_says_so_first(
    tmp_path: Path, small_privacy: PrivacyConfig
) -> None:
    make_store(tmp_path / "store", "public")
    privacy = replace(small_privacy, guarantee="none", noise_multiplier=None, max_grad_norm=None)
    run = make_run(tmp_path / "run", tmp_path / "store", privacy=privacy, charged=2)
    assert "can be identified" not in make_report(run, declared=DECLARED).read_text()
    page = make_report(run).read_text()
    assert re.search(r"<h1>(.*?)</h1>", page, re.DOTALL)[1] == "This run guarantees nothing."  # type: ignore[index]
    assert "epsilon" not in page.split("</h1>")[1].split("Settings")[0]


def test_the_operator_has_a_page_where_a_report_is_refused(
    tmp_path: Path, small_privacy: PrivacyConfig
) -> None:
    make_store(tmp_path / "store")
    privacy = replace(small_privacy, guarantee="none", noise_multiplier=None, max_grad_norm=None)
    run = make_run(tmp_path / "run", tmp_path / "store", privacy=privacy, charged=3)
    with pytest.raises(PrivacyError):
        make_report(run)
    assert make_operator_page(run) == run / "confidential" / "operator.html"
    assert [path.name for path in run.iterdir()] == ["confidential"]


def test_a_run_that_has_just_begun_has_an_operator_page(copy_of: Callable[[], Path]) -> None:
    run = copy_of()
    (run / "confidential" / "metrics.jsonl").unlink()
    assert "No step has been logged yet" in make_operator_page(run).read_text()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    for make in (make_report, make_operator_page):
        with pytest.raises(CheckpointError, match="no run"):
            make(tmp_path)


def test_a_reconstruction_keeps_what_the_model_saw(finished_run: Path, scenes: Path) -> None:
    made = reconstruct_some(finished_run, open_store(scenes), 5)
    seen, filled, original = (
        np.asarray(Image.open(io.BytesIO(base64.b64decode(strip.split(",")[1]))))
        for strip in (made.seen, made.filled, made.original)
    )
    assert made.count == 5 and seen.shape == filled.shape == original.shape == (
        32,
        5 * 32 + 4 * 2,
        4,
    )
    visible = seen[..., 3] > 0
    assert visible.sum() == 5 * 16 * 16  # a quarter of the patches
    assert np.array_equal(filled[visible], original[visible]) and np.array_equal(
        seen[visible], original[visible]
    )
    images = original[..., 3] > 0
    assert (filled[images & ~visible] != original[images & ~visible]).mean() > 0.5
