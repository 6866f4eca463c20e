"""The command line as people use it: help for everything, JSON for machines, one clear error and
exit 2 for wrong input.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from dpvision.cli import COMMANDS, main
from dpvision.data.importer import import_source
from dpvision.data.synthetic_store import write_scenes
from dpvision.recipes import RECIPES

pytestmark = pytest.mark.usefixtures("gates_once")

ONE_OF_EACH_MODEL = {
    repr(config.model): name for name in RECIPES if (config := RECIPES[name]()).model.kind != "head"
}
FEW = {"synthetic.vip_nano", "dpcap.micro_non_private", "supervised.micro", "transfer.micro_lora"}
"""One of each kind, small, for the quick tests."""
NUM = 240  # enough for all eight classes to be on both sides of an evaluation's own split


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "scenes"
    write_scenes(folder, NUM, 32, workers=1, public=False)
    return folder


def _tiny(store: Path, runs: Path, name: str = "first") -> list[str]:
    sizes = (
        f"--privacy.dataset-size {NUM} --privacy.expected-batch-size 20 --privacy.steps 2 "
        "--hardware.physical-batch-size 20"
    )
    sizes += " --model.encoder.depth 1 --model.encoder.width 32 --model.encoder.num-heads 2"
    sizes += " --model.decoder-depth 1 --model.decoder-width 16 --model.decoder-num-heads 2"
    return [
        "train",
        "vip.micro",
        "--data",
        str(store),
        "--runs",
        str(runs),
        "--name",
        name,
        "--init-from",
        "None",
        "--quiet",
        *sizes.split(),
    ]


def _run(capsys: pytest.CaptureFixture[str], argv: list[str]) -> dict:
    assert main(argv) == 0
    return json.loads(capsys.readouterr().out)


def _refused(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    try:
        status = main(argv)
    except SystemExit as stop:  # tyro's own exit on wrong usage
        status = stop.code if isinstance(stop.code, int) else 1
    out, err = capsys.readouterr()
    assert status == 2, (out, err)
    assert words in err and "Traceback" not in err, err


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_that_teaches(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        main([command, "--help"])
    except SystemExit as stop:
        assert stop.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 5


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_names_resume_where_the_command_has_it(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        main([command, *(["vip.micro"] if command == "train" else []), "--help"])
    has_resume = "--resume" in capsys.readouterr().out

    def stopped(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dpvision.cli.importlib.import_module", stopped)
    assert main([command]) == 130
    assert ("--resume" in capsys.readouterr().err) == has_resume


def test_plan_prints_the_published_figures(capsys: pytest.CaptureFixture[str]) -> None:
    plan = (
        "plan --dataset-size 233804767 --expected-batch-size 98304 --noise-multiplier 0.48 "
        "--steps 6100 --delta 2.1385e-09 --json"
    )
    result = _run(capsys, plan.split())
    assert result["epsilon"] == pytest.approx(6.84, abs=0.01) and result[
        "epsilon_rdp"
    ] == pytest.approx(8.00, abs=0.01)


def test_plan_calibrates_and_takes_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    result = _run(capsys, ["plan", "vip.micro", "--target-epsilon", "2", "--json"])
    assert (
        1.9 < result["epsilon"] <= 2.0
        and result["noise_multiplier"] > 0
        and result["signal"]["num_parameters"] > 0
    )


@pytest.mark.parametrize(
    "recipe",
    [
        r if r in FEW else pytest.param(r, marks=pytest.mark.slow)
        for r in sorted(ONE_OF_EACH_MODEL.values())
    ],
)
def test_doctor_counts_what_the_model_trains(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = _run(capsys, ["doctor", recipe, "--json"])
    assert sum(result["parts"].values()) == result["num_parameters"] > 1_000


@pytest.mark.slow
def test_a_check_that_takes_minutes_is_announced(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [word for word in _tiny(store, tmp_path) if word != "--quiet"] + ["--dry-run"]
    assert main(argv) == 0 and "Checking the network" not in capsys.readouterr().out
    monkeypatch.setattr("dpvision.cli.train._SLOW_TO_CHECK", 1000)
    assert main(argv) == 0 and capsys.readouterr().out.startswith("Checking the network (")
    assert (
        main([*argv, "--non-private"]) == 0
        and "Checking the network" not in capsys.readouterr().out
    )


def test_the_way_from_training_to_statement(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dry = _run(capsys, [*_tiny(store, tmp_path), "--dry-run", "--json"])
    assert dry["dry_run"] and not (tmp_path / "first").exists()
    done = _run(capsys, [*_tiny(store, tmp_path), "--json"])
    assert (
        done["complete"] and done["steps"] == 2 and done["epsilon"] == pytest.approx(dry["epsilon"])
    )
    again = _run(
        capsys,
        [
            "train",
            "vip.micro",
            "--name",
            "first",
            "--runs",
            str(tmp_path),
            "--resume",
            "--quiet",
            "--json",
        ],
    )
    assert again["steps"] == 2 and again["epsilon"] == done["epsilon"]
    run = str(tmp_path / "first")
    scores = _run(capsys, ["evaluate", run, "--train", str(store), "--json"])["scores"]
    assert {s["name"] for s in scores} >= {"encoder", "random weights", "raw pixels"}
    assert not (tmp_path / "first" / "scores.json").exists(), (
        "scores on a private store must not leave"
    )
    written = _run(capsys, ["report", run, "--json"])
    statement = json.loads(Path(written["statement"]).read_text())
    assert statement["guarantee"]["epsilon"] == pytest.approx(done["epsilon"])
    assert "not at" not in capsys.readouterr().err
    store.rename(tmp_path / "moved")
    assert main(["report", run]) == 0
    assert f"The store is not at {store} any more" in capsys.readouterr().err
    (tmp_path / "moved").rename(store)
    out = tmp_path / "confidential" / "features.npz"
    out.parent.mkdir()
    assert (
        _run(capsys, ["embed", run, str(store), str(out), "--json"])["num_records"] == NUM
        and out.exists()
    )
    account = _run(capsys, ["ledger", str(store), "--json"])
    assert any(r["spent"]["steps"] == 2 for r in account["runs"])


def test_an_owners_cap_stops_the_next_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_scenes(tmp_path / "s", NUM, 32, workers=1, public=False)
    account = _run(
        capsys, ["ledger", str(tmp_path / "s"), "--set-cap", "5", "--cap-delta", "0.0008", "--json"]
    )
    assert account["cap"]["epsilon"] == 5
    _refused(capsys, _tiny(tmp_path / "s", tmp_path), "cap")
    assert not (tmp_path / "first").exists(), "a refused run leaves its name free"
    assert (
        _run(
            capsys,
            ["ledger", str(tmp_path / "s"), "--set-cap", "9", "--cap-delta", "0.0008", "--json"],
        )["cap"]["epsilon"]
        == 9
    )
    assert main(_tiny(tmp_path / "s", tmp_path)) == 0


def test_data_commands(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = _run(capsys, ["data", "inspect", str(store), "--json"])
    assert result["num_records"] == NUM
    sheet = Path(result["contact_sheet"])
    assert sheet.exists() and "confidential" in sheet.parts
    parts = _run(
        capsys,
        ["data", "split", str(store), str(store.parent / "a"), str(store.parent / "b"), "--json"],
    )
    assert parts["operator_only"]
    assert sum(part["records"] for part in parts["parts"].values()) == NUM
    assert all(part["people"] is None for part in parts["parts"].values())
    _refused(
        capsys, ["data", "split", str(store), str(tmp_path / "a"), str(tmp_path / "b")], "ledgers"
    )


def test_names_print_on_a_terminal_without_utf_8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Image.new("RGB", (8, 8)) as image:
        (tmp_path / "src" / "Händ").mkdir(parents=True)
        image.save(tmp_path / "src" / "Händ" / "a.png")
    store = str(import_source(tmp_path / "src", tmp_path / "Läden", public=True).path)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True))
    assert main(["data", "inspect", store]) == 0
    assert main(["data", "inspect", f"{store}-x"]) == 2
    assert rb"H\xe4nd" in sys.stdout.buffer.getvalue()
    assert rb"L\xe4den-x" in sys.stderr.buffer.getvalue()


def test_non_private_drops_noise_target_and_clipping(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*_tiny(store, tmp_path), "--non-private", "--dry-run", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (
        made["guarantee"] == "none"
        and made["noise_multiplier"] == 0
        and made["max_grad_norm"] is None
        and made["epsilon"] is None
    )


def test_import_names_the_file_of_what_it_left_out_and_what_heif_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)  # as where it is not installed
    folder = tmp_path / "images"
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    (folder / "b.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    assert main(["data", "import", str(folder), str(tmp_path / "store")]) == 0
    said = capsys.readouterr().out
    named = tmp_path / "store" / "confidential" / "left_out.jsonl"
    assert str(named) in said and "pip install pillow-heif" in said
    assert json.loads(named.read_text())["reason"] == "HEIF"


def test_wrong_input_gets_one_clear_error(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    tiny = _tiny(store, tmp_path)
    for argv, words in [
        (["fly"], "expected one of"),
        (["train", "vip.giant", "--data", str(store)], "vip.giant"),
        (["train", "vip.micro"], "--data"),
        (
            [
                "train",
                "vip.micro",
                "--data",
                str(store),
                "--privacy.dataset-size",
                str(NUM),
                "--privacy.expected-batch-size",
                "5",
            ],
            "train synthetic.",
        ),
        ([*tiny, "--privacy.dataset-size", "50"], "declared dataset_size=50"),
        ([*tiny, "--privacy.expected-batch-size", str(NUM + 1)], "at most dataset_size"),
        ([*tiny, "--privacy.target-epsilon", "-1"], "target_epsilon"),
        ([*tiny, "--privacy.target-epsilon", "nan"], "target_epsilon"),
        ([*tiny, "--privacy.delta", "0.5"], "delta"),
        ([*tiny, "--non-private", "--privacy.target-epsilon", "2"], "guarantee=none"),
        ([*tiny, "--resume"], "holds no run"),
        (
            ["train", "vip.micro", "--data", str(tmp_path / "nowhere"), "--runs", str(tmp_path)],
            "store",
        ),
        (["data", "import", str(tmp_path / "empty"), str(tmp_path / "s")], "empty"),
        (["data", "import", str(tmp_path / "nowhere"), str(tmp_path / "s")], "nowhere"),
        (["plan", "--steps", "3"], "--dataset-size"),
        (
            [
                "plan",
                "--dataset-size",
                "0",
                "--expected-batch-size",
                "1",
                "--steps",
                "1",
                "--noise-multiplier",
                "1",
            ],
            "dataset_size",
        ),
        (["ledger", str(tmp_path / "nowhere")], "store"),
        (["ledger", str(store), "--set-cap", "3"], "--cap-delta"),
        (["report", str(tmp_path / "nowhere")], "run"),
        (["evaluate", str(tmp_path / "nowhere"), "--train", str(store)], "nowhere"),
        (["doctor", "vip.giant"], "vip.giant"),
    ]:
        _refused(capsys, argv, words)


def test_a_changed_setting_with_resume_is_refused(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_tiny(store, tmp_path)) == 0
    resume = [
        "train",
        "vip.micro",
        "--name",
        "first",
        "--runs",
        str(tmp_path),
        "--resume",
        "--quiet",
    ]
    _refused(capsys, [*resume, "--optim.learning-rate", "0.5"], "only --hardware")
    assert main([*resume, "--hardware.physical-batch-size", "7"]) == 0
