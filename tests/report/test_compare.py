"""The page that compares runs says what was executed, and losses of private images cannot be
written where they could leave.
"""

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

from dpvision.checkpoint import find_checkpoint, load_checkpoint, read_manifest, save_checkpoint
from dpvision.cli import main
from dpvision.config import PrivacyConfig
from dpvision.errors import CheckpointError, ConfigError, PrivacyError
from dpvision.files import write_json
from dpvision.models import make_model
from dpvision.privacy.plan import make_plan
from dpvision.privacy.printed import up
from dpvision.report.compare_page import make_compare_page, run_colors
from dpvision.report.compared_run import made_of_public_images, read_compared, read_losses
from dpvision.report.figures import SERIES

from .runs import MODEL, PUBLIC_SCORES, make_run, make_store, score_entry

SENTINEL = "ward-b"
SIZE = f"{sum(p.numel() for p in make_model(MODEL, 0).parameters()) / 1e3:.0f} k"

Maker = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, small_privacy: PrivacyConfig) -> Maker:
    """Makes a run: ``make(name, public=False, width=32, warm=None, **privacy)``; runs of one
    visibility share a store.
    """

    def made(
        name: str,
        *,
        public: bool = False,
        width: int = 32,
        warm: str | None = None,
        charged: int = 4,
        **privacy: Any,
    ) -> Path:
        store = tmp_path / ("public" if public else "private")
        if not store.exists():
            make_store(store, store.name)
        run = make_run(
            tmp_path / name,
            store,
            privacy=replace(small_privacy, **privacy),
            run_id=name.encode().hex() + "0" * 8,
            charged=charged,
        )
        base = run if (run / "config.json").exists() else run / "confidential"
        config = json.loads((base / "config.json").read_text())
        config["model"]["encoder"]["width"], config["init_from"] = width, warm
        write_json(base / "config.json", config)
        return run

    return made


NO_GUARANTEE: dict[str, Any] = {
    "guarantee": "none",
    "noise_multiplier": None,
    "max_grad_norm": None,
}


def test_losses_of_private_images_are_refused_outside_of_a_confidential_folder(
    make: Maker, tmp_path: Path
) -> None:
    runs = [make("open", public=True), make("closed")]
    with pytest.raises(PrivacyError, match=r"Drop --out.*confidential/"):
        make_compare_page(runs, tmp_path / "compare.html")
    assert not (tmp_path / "compare.html").exists()
    with pytest.raises(PrivacyError):
        make_compare_page(runs, tmp_path / "confidential" / ".." / "compare.html")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "confidential").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PrivacyError):
        make_compare_page(runs, tmp_path / "confidential" / "compare.html")


def test_the_page_goes_under_confidential_by_itself_or_where_it_is_told(
    make: Maker, tmp_path: Path
) -> None:
    run = make("a")
    page = make_compare_page([run])
    assert (
        page == run / "confidential" / "compare.html"
        and "Confidential: do not release" in page.read_text()
    )
    told = make_compare_page([run], tmp_path / "new" / "confidential" / "compare.html")
    assert told.exists() and told.parent.stat().st_mode & 0o077 == 0


def test_losses_of_public_images_may_lie_anywhere_but_private_scores_not_beside_them(
    make: Maker, tmp_path: Path
) -> None:
    run = make("a", public=True)
    write_json(run / "scores.json", PUBLIC_SCORES[:5])
    write_json(
        run / "confidential" / "scores.json",
        [score_entry("encoder", 0.4, "linear probe, mean", "private", SENTINEL)],
    )
    page = make_compare_page([run], tmp_path / "compare.html").read_text()
    assert SENTINEL not in page and "Confidential" not in page and "cifar10-test" in page
    assert SENTINEL in make_compare_page([run]).read_text()


def test_a_public_store_does_not_wash_a_parent_without_a_guarantee(
    make: Maker, tmp_path: Path
) -> None:
    run = make("a", public=True)
    assert made_of_public_images(run)
    folder = find_checkpoint(run)
    manifest = read_manifest(folder)
    manifest["lineage"].insert(
        0, {"store_id": "f00d", "visibility": "private", "run_id": "b", "guarantee": None}
    )
    save_checkpoint(folder, manifest, load_checkpoint(folder).model)
    assert not made_of_public_images(run)
    with pytest.raises(PrivacyError):
        make_compare_page([run], tmp_path / "compare.html")


def test_a_start_whose_lineage_is_not_written_yet_is_not_taken_for_public(make: Maker) -> None:
    fresh, started = make("fresh", public=True), make("started", public=True, warm="somewhere")
    for run in (fresh, started):
        shutil.rmtree(run / "checkpoints")
    assert made_of_public_images(fresh) and not made_of_public_images(started)


def test_epsilon_is_that_of_the_plan_in_the_ledger_also_of_a_stopped_run(
    make: Maker, small_privacy: PrivacyConfig
) -> None:
    whole, half = make("whole"), make("half", charged=2)
    plan = make_plan(small_privacy)
    page = make_compare_page([whole, half]).read_text()
    of_all, of_half = (up(plan.spent(steps).epsilon or 0.0, 2) for steps in (4, 2))
    assert of_half not in page and "0.125" not in page  # what the manifest says, wrong on purpose
    assert f"whole: {SIZE}, ε {of_all}" in page and f"half: {SIZE}, ε {of_all}" in page
    assert "4 of 4" in page and "2 of 4" in page


def test_where_people_are_declared_the_epsilon_is_a_persons(
    make: Maker, small_privacy: PrivacyConfig
) -> None:
    people: dict[str, Any] = {
        "num_units": small_privacy.dataset_size // 2,
        "max_records_per_unit": 2,
    }
    page = make_compare_page([make("people", **people)]).read_text()
    spent = make_plan(replace(small_privacy, **people)).spent(4)
    assert (
        spent.unit_epsilon is not None
        and spent.epsilon is not None
        and spent.unit_epsilon > 1.5 * spent.epsilon
    )
    assert f"people: {SIZE}, ε {up(spent.unit_epsilon, 2)} per person" in page


def test_a_ledger_that_was_shortened_is_refused(make: Maker, tmp_path: Path) -> None:
    run = make("a")
    (ledger,) = (tmp_path / "LEDGERS").rglob(f"{b'a'.hex()}00000000.jsonl")
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(PrivacyError):
        make_compare_page([run])


def test_a_run_without_a_guarantee_says_so_in_its_name(make: Maker) -> None:
    run = make("plain", **NO_GUARANTEE)
    assert f"plain: {SIZE}, no guarantee" in make_compare_page([run]).read_text()


def test_parameters_are_counted_as_the_model_has_them(make: Maker) -> None:
    read = read_compared(make("a"), "a")
    assert read.num_parameters == sum(
        p.numel() for p in make_model(MODEL, 0).parameters() if p.requires_grad
    )


def test_work_is_drawn_only_where_batches_differ(make: Maker) -> None:
    small = make("small", sampling="poisson", expected_batch_size=5000, noise_multiplier=3.0)
    large = make("large", sampling="poisson", expected_batch_size=10_000, noise_multiplier=3.0)
    read = read_compared(large, "large")
    assert np.array_equal(read.gradient_N, [10_000, 20_000, 30_000, 40_000])
    assert "Loss against sample-gradients" in make_compare_page([small, large]).read_text()
    assert "Loss against sample-gradients" not in make_compare_page([small]).read_text()


def test_sizes_are_drawn_as_lines_and_one_size_as_bars(make: Maker) -> None:
    runs = [make("s", warm="x"), make("m", width=64, warm="x"), make("r"), make("q", width=64)]
    for i, run in enumerate(runs):
        write_json(
            run / "scores.json", [score_entry("encoder", 0.4 + i / 100, "linear probe, mean")]
        )
    lines, bars = (
        make_compare_page(runs).read_text(),
        make_compare_page([runs[0], runs[2]]).read_text(),
    )
    assert "Score against number of parameters" in lines and "Scores on public images" not in lines
    assert ">warm start<" in lines and ">random start<" in lines
    assert "Scores on public images" in bars and "Score against number of parameters" not in bars
    assert "40.0%  s" in bars and "42.0%  r" in bars


def test_two_starts_of_the_same_settings_share_a_colour_and_nothing_else_does(make: Maker) -> None:
    kinds = [{"warm": "x"}, {}, {"width": 64}, {"steps": 3, "charged": 3}, {}]
    runs = [read_compared(make(f"r{i}", **kind), str(i)) for i, kind in enumerate(kinds)]
    assert run_colors(runs) == [0, 0, 1, 2, 3]
    with pytest.raises(ConfigError, match="one per colour"):
        run_colors([runs[1]] * (len(SERIES) + 1))


def test_losses_of_different_things_come_with_a_word_of_caution(make: Maker) -> None:
    same, other = make("a"), make("b")
    assert "have different losses" not in make_compare_page([same, other]).read_text()
    config = json.loads((other / "config.json").read_text())
    config["model"]["mask_ratio"] = 0.5
    write_json(other / "config.json", config)
    assert (
        "have different losses (share of hidden patches)"
        in make_compare_page([same, other]).read_text()
    )
    assert "(store)" in make_compare_page([same, make("c", public=True)]).read_text()


def test_folders_of_one_name_are_told_apart(make: Maker) -> None:
    page = make_compare_page([make("one/run"), make("two/run")]).read_text()
    assert f"one/run: {SIZE}" in page and f"two/run: {SIZE}" in page
    with pytest.raises(ConfigError, match="each once"):
        make_compare_page([Path("runs/a"), Path("runs/../runs/a")])


def test_a_log_that_a_crash_cut_and_a_resume_repeated_is_read(tmp_path: Path) -> None:
    lines = [
        '{"step": 1, "loss": null}',
        '{"step": 3, "loss": 5.0}',
        '{"step": 2, "loss": 4.0}',
        '{"step": 3, "loss": 3.0}',
        '{"step": 4, "lo',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    steps, losses = read_losses(tmp_path / "metrics.jsonl")
    assert steps.tolist() == [1, 2, 3] and np.isnan(losses[0]) and losses[1:].tolist() == [4.0, 3.0]


def test_a_run_without_a_loss_is_refused(make: Maker) -> None:
    run = make("a")
    (run / "confidential" / "metrics.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="no loss yet"):
        make_compare_page([run])


def test_the_page_is_whole_and_stands_alone(make: Maker) -> None:
    run = make("a<b")
    write_json(run / "scores.json", PUBLIC_SCORES)
    page = make_compare_page([run, make("c")]).read_text()
    assert (
        "<script" not in page
        and "url(http" not in page
        and "default-src 'none'" in page
        and "a<b" not in page
    )
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', page)
    for tag in re.findall(r"<svg\b[^>]*>", page):
        assert re.search(r'aria-label="[^"]{10,}"', tag)

    class Checker(HTMLParser):
        still_open: list[str] = []  # noqa: RUF012
        ids: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.ids.extend(value for key, value in attrs if key == "id" and value)
            if tag != "meta":
                self.still_open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.still_open.pop() == tag, (tag, self.getpos())

        def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.ids.extend(value for key, value in attrs if key == "id" and value)

    checker = Checker()
    checker.feed(page)
    assert checker.still_open == [] and len(checker.ids) == len(set(checker.ids))


def test_the_command_prints_the_page_or_one_clear_error(
    make: Maker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(make("a")), str(make("b"))]
    assert main(["compare", *runs, "--json"]) == 0
    assert Path(json.loads(capsys.readouterr().out)["page"]).name == "compare.html"
    for argv, words in (
        ([*runs, "--out", str(tmp_path / "x.html")], "confidential"),
        ([*runs, "--out", str(tmp_path / "confidential" / "x")], ".html"),
        ([str(tmp_path)], "no run"),
    ):
        assert main(["compare", *argv]) == 2
        err = capsys.readouterr().err
        assert words in err and "Traceback" not in err
