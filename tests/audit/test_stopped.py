"""Black-box audits that are stopped and go on: the coins stay, what is made is not made again, and
a process that is killed loses steps of which the result has the number.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dpvision.audit import lira
from dpvision.audit.black_box import HEAD_SHADOWS, black_box, forget, in_progress
from dpvision.audit.results import one_audit
from dpvision.audit.time_given import NotInTime
from dpvision.checkpoint import list_checkpoints
from dpvision.config import RunConfig
from dpvision.config.resolve import resolve
from dpvision.errors import CheckpointError
from dpvision.privacy.plan import DPPlan
from dpvision.recipes import get_recipe

from ..statement.runs import PRIVACY, make_run, make_store

pytestmark = pytest.mark.usefixtures("gates_once")


def until(last: int):
    """Progress of an audit whose time is over after a step."""

    def say(what: str, done: int, total: int) -> None:
        if done >= last:
            raise NotInTime(60.0)

    return say


def test_a_network_goes_on_where_its_time_was_over_with_the_same_coins(
    config: RunConfig, plan: DPPlan, tmp_path: Path
) -> None:
    keep = tmp_path / "kept"
    first = keep / "model-00"
    for last in (2, 4):
        with pytest.raises(NotInTime):
            black_box(config, plan, 20, say=until(last), keep=keep)
        (newest,) = list_checkpoints(first / "run")[-1:]
        # Steps take as long as their secret batches are large.
        assert (
            newest
            == keep / "model-00" / "run" / "confidential" / "checkpoints" / f"step-{last:08d}"
        )
    coins = json.loads((first / "canaries.json").read_text())["inside"]
    steps: list[int] = []
    begun = in_progress(keep)
    found = black_box(config, plan, 20, say=lambda what, done, total: steps.append(done), keep=keep)
    assert steps == [5, 6] and found["steps_without_update"] == 0
    assert found["canary_inside"] == coins and found["audit_id"] == begun
    ledger = (first / "run" / "ledger.jsonl").read_text()
    assert ledger.count('"kind":"step"') == found["plan"]["steps"] == 6, "each step is charged once"
    # A crash before the result was written: the same result, not another one.
    again = black_box(config, plan, 20, keep=keep)
    assert again == found
    forget(keep)
    assert in_progress(keep) is None and not keep.exists()


def test_an_audit_of_other_settings_does_not_go_on(
    config: RunConfig, plan: DPPlan, tmp_path: Path
) -> None:
    """Nor is it dropped, or whoever looked at its coins and weights could begin anew."""
    keep, link, moved = (tmp_path / name for name in ("kept", "link", "moved"))
    with pytest.raises(NotInTime):
        black_box(config, plan, 20, say=until(1), keep=keep)
    first, drawn = in_progress(keep), keep / "model-00" / "canaries.json"
    coins = drawn.read_bytes()
    with pytest.raises(CheckpointError, match="or remove the folder to give it up"):
        black_box(config, plan, 24, say=until(1), keep=keep)
    link.symlink_to(keep)
    with pytest.raises(NotInTime):
        black_box(config, plan, 20, say=until(1), keep=link)
    assert in_progress(keep) == first and drawn.read_bytes() == coins
    keep.rename(moved)
    with pytest.raises(CheckpointError, match="other settings, code or place"):
        black_box(config, plan, 20, say=until(1), keep=moved)
    assert in_progress(moved) == first


def test_the_folder_of_a_stopped_audit_does_not_name_the_private_store(
    config: RunConfig, plan: DPPlan, tmp_path: Path
) -> None:
    private = resolve(config, {"data.store": "/cohort/hiv-positive"})
    with pytest.raises(NotInTime):
        black_box(private, plan, 20, say=until(1), keep=tmp_path / "kept")
    files = [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]
    assert files and all(b"hiv-positive" not in path.read_bytes() for path in files)


def test_heads_that_are_trained_are_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve(get_recipe("transfer.one_step"), {"model.encoder.spec": "pixels"})
    rows: list[np.ndarray] = []
    trained = lira.trained_head
    monkeypatch.setattr(
        lira,
        "trained_head",
        lambda made, stream, taken, keys: rows.append(taken) or trained(made, stream, taken, keys),
    )
    keep = tmp_path / "kept"
    with pytest.raises(NotInTime):
        black_box(config, None, 20, say=until(5), keep=keep)
    before = {path.name: path.read_bytes() for path in keep.glob("model-*.json")}
    assert len(rows) == len(before) == 5
    found = black_box(config, None, 20, keep=keep)
    assert len(rows) == HEAD_SHADOWS + 1
    assert all((keep / name).read_bytes() == data for name, data in before.items())
    # The first head is the one that is attacked.
    assert found["canary_inside"] == lira.Scored.read(keep / "model-00.json", 20).inside_M.tolist()
    assert len(rows[0]) == 60 + sum(found["canary_inside"])


def test_a_network_with_shadows_goes_on_in_the_shadow_where_it_was_stopped(
    config: RunConfig, plan: DPPlan, tmp_path: Path
) -> None:
    keep = tmp_path / "kept"
    with pytest.raises(NotInTime):  # of 6 steps a model: in the third one
        black_box(config, plan, 20, shadows=4, say=until(15), keep=keep)
    before = {path.name: path.read_bytes() for path in keep.glob("model-*.json")}
    assert sorted(before) == ["model-00.json", "model-01.json"]
    coins = json.loads((keep / "model-02" / "canaries.json").read_text())["inside"]
    with pytest.raises(CheckpointError, match="other settings"):
        black_box(config, plan, 20, shadows=0, say=until(1), keep=keep)
    steps: list[tuple[int, int]] = []
    found = black_box(
        config,
        plan,
        20,
        shadows=4,
        say=lambda what, done, total: steps.append((done, total)),
        keep=keep,
    )
    assert steps == [(done, 30) for done in range(16, 31)]
    models = [lira.Scored.read(keep / f"model-{i:02d}.json", 20) for i in range(5)]
    assert models[2].inside_M.tolist() == coins
    assert found["canary_inside"] == models[0].inside_M.tolist() and found["shadows"] == 4
    assert all((keep / name).read_bytes() == data for name, data in before.items())
    assert len({tuple(m.inside_M.tolist()) for m in models}) == 5, "each has its own coins"
    assert not (keep / "model-02").exists()
    want = lira.likelihood_ratios(
        models[0].score_M,
        np.array([m.score_M for m in models[1:]]),
        np.array([m.inside_M for m in models[1:]]),
    )
    assert found["score_of_canary"] == want.tolist() and np.std(want) > 0


def models(kept: Path, shadows: int = 4) -> lira.Scored:
    made = lira.Scored(np.zeros(20), np.arange(20) % 2 == 0)
    return lira.attack(lambda number, folder: made, 20, shadows, kept)


def test_a_damaged_file_of_a_model_is_named(tmp_path: Path) -> None:
    models(tmp_path)
    path = tmp_path / "model-01.json"
    found = json.loads(path.read_text())
    hostile = [
        "{",
        "[]",
        "NaN",
        '{"score": [1], "inside": [true], "steps_without_update": 0}',
        json.dumps(found | {"inside": [0.5] * 20}),
        json.dumps(found | {"score": [10**400] * 20}),
        json.dumps(found | {"score": [1e308] * 20}),
        json.dumps(found | {"steps_without_update": -7}),
    ]
    for text in hostile:
        path.write_text(text)
        with pytest.raises(CheckpointError, match=rf"{path} .*Remove the folder {tmp_path} to"):
            models(tmp_path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=str(path)):
        models(tmp_path)


def test_no_model_is_trained_anew_beside_others(tmp_path: Path) -> None:
    """Or its coins could be drawn until they please."""
    models(tmp_path)
    (tmp_path / "model-00.json").unlink()
    with pytest.raises(CheckpointError, match=r"model-00\.json is missing, and later models are"):
        models(tmp_path)


def test_what_is_no_folder_of_a_model_is_named(tmp_path: Path) -> None:
    for make in (lambda p: p.write_text(""), lambda p: p.symlink_to("/dev/null")):
        make(tmp_path / "model-03")
        with pytest.raises(CheckpointError, match="model-03 is no folder"):
            models(tmp_path)
        (tmp_path / "model-03").unlink()


def test_coins_that_are_missing_beside_a_run_are_not_drawn_anew(
    config: RunConfig, plan: DPPlan, tmp_path: Path
) -> None:
    keep = tmp_path / "kept"
    with pytest.raises(NotInTime):
        black_box(config, plan, 20, say=until(2), keep=keep)
    (keep / "model-00" / "canaries.json").unlink()
    with pytest.raises(CheckpointError, match=rf"is missing, .*Remove the folder {keep} to"):
        black_box(config, plan, 20, keep=keep)
    (keep / "about.json").unlink()
    (keep / "about.json").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="in progress with other settings"):
        black_box(config, plan, 20, keep=keep)


def start(run: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "dpvision", "audit", str(run), "--black-box", "--canaries", "20"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_steps(run: Path, num: int, process: subprocess.Popen) -> None:
    log, end = (
        run / "audit_black_box" / "model-00" / "run" / "progress.jsonl",
        time.monotonic() + 900,
    )
    while not log.exists() or log.read_text().count("\n") < num:
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_stopped_goes_on(number: signal.Signals, tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    run = make_run(tmp_path / "run", tmp_path / "store", privacy=PRIVACY)
    keep, result = run / "audit_black_box", run / "audit_black_box.json"
    process = start(run)
    wait_for_steps(run, 3, process)
    process.send_signal(number)
    said, _ = process.communicate(timeout=900)
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 75 and "The same command goes on." in said
    assert not result.exists() and keep.exists(), said
    coins = json.loads((keep / "model-00" / "canaries.json").read_text())["inside"]
    second = start(run)
    said, _ = second.communicate(timeout=900)
    assert second.returncode == 0, said
    found = json.loads(result.read_text())
    assert found["canary_inside"] == coins and not keep.exists()
    lost = found["steps_without_update"]
    assert lost >= 3 if number == signal.SIGKILL else lost == 0
    assert (f"{lost} steps were lost" in said) == (number == signal.SIGKILL)
    assert "earlier" not in found


def test_two_audits_of_one_run_at_once_are_refused(tmp_path: Path) -> None:
    with (
        one_audit(tmp_path),
        pytest.raises(CheckpointError, match="audited by another process"),
        one_audit(tmp_path),
    ):
        pass
    with one_audit(tmp_path):
        pass
