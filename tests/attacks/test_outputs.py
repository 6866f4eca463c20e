"""What left with outputs: how many public images have private twins, features and captions of
private images, and the key of the ids.
"""

import json
import stat
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from made import secrets

from dpvision.checkpoint import find_checkpoint
from dpvision.cli import main
from dpvision.config import PrivacyConfig, RunConfig, to_dict
from dpvision.data.open import open_store
from dpvision.data.overlap import write_without
from dpvision.data.rows import keyed_hash
from dpvision.data.split import split_store
from dpvision.data.store_writer import KEY_FILE, read_key
from dpvision.data.synthetic_store import write_scenes
from dpvision.errors import PrivacyError
from dpvision.files import write_json
from dpvision.privacy.plan import make_plan
from dpvision.recipes import RECIPES
from dpvision.report.gallery import made_of_public_images
from dpvision.runs.store_checks import check_store
from dpvision.statement.statement import make_statement
from dpvision.train import loop
from dpvision.train.loop import fit
from dpvision.train.start import check_run, new_session, resumed_session

from .test_ranks import config_of

pytestmark = pytest.mark.usefixtures("gates_once")

TWINS = 7


def config_for(store: Path) -> RunConfig:
    """Settings of a quick run on 40 records."""
    config = config_of(store)
    return replace(config, privacy=replace(config.privacy, dataset_size=40, expected_batch_size=40))


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Public scenes to learn from and to score on, private ones of which ``TWINS`` are among the
    latter, and the cleared test store.
    """
    folder = tmp_path_factory.mktemp("stores")
    write_scenes(folder / "train", 40, 16, first=1000)
    public = write_scenes(folder / "test", 40, 16)
    private = write_scenes(folder / "mine", 40, 16, first=40 - TWINS, public=False)
    write_without(public, folder / "clean", np.arange(40 - TWINS, 40), private, ["identical bytes"])
    return folder


def test_scores_on_a_cleared_store_which_show_its_size_stay_confidential(
    stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were public, with n = 33 of the public store's 40: seven twins, exactly."""
    argv = [
        "evaluate",
        "pixels",
        "--train",
        str(stores / "train"),
        "--test",
        str(stores / "clean"),
        "--protocols",
        "knn",
        "--json",
    ]
    assert main([*argv, "--out", str(tmp_path / "scores.json")]) == 2
    assert (
        "would hold scores of private images; expected a folder called confidential"
        in capsys.readouterr().err
    )
    (tmp_path / "confidential").mkdir()
    assert main([*argv, "--out", str(tmp_path / "confidential" / "scores.json")]) == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert scores and all(
        score["visibility"] == "private" and score["n"] == 40 - TWINS for score in scores
    )
    argv[3], argv[5] = str(stores / "clean"), str(stores / "test")
    assert main([*argv, "--out", str(tmp_path / "scores.json")]) == 2, (
        "nor may a probe that learned on it be scored in public"
    )
    plain = [
        "evaluate",
        "pixels",
        "--train",
        str(stores / "train"),
        "--test",
        str(stores / "test"),
        "--protocols",
        "knn",
        "--json",
    ]
    capsys.readouterr()
    assert main([*plain, "--out", str(tmp_path / "scores.json")]) == 0
    assert json.loads(capsys.readouterr().out)["scores"][0]["visibility"] == "public"


def test_the_number_that_a_run_on_a_cleared_store_declares_is_the_public_one(stores: Path) -> None:
    """Within 1% of what is left it was a coarse count of the twins: 7 of 40 are 17%."""
    clean = open_store(stores / "clean")
    plan = make_plan(PrivacyConfig(40, 8, 2, max_grad_norm=None, guarantee="none"))
    check_store(plan, clean, np.arange(clean.num_records))
    said = {
        name: value for name, value in clean.meta["deduplicated"].items() if name != "against"
    }  # random ids of stores
    assert "33" not in json.dumps(said)


def test_halves_of_a_cleared_store_and_a_store_cleared_twice_are_cleared_stores(
    stores: Path,
) -> None:
    """A half forgot it: its scores were public again, and so was the store in the lineage."""
    clean, private = open_store(stores / "clean"), open_store(stores / "mine")
    for half in split_store(clean.path, stores / "clean-a", stores / "clean-b", 0.5):
        assert (
            half.results_visibility == "private"
            and half.meta["deduplicated"] == clean.meta["deduplicated"]
        )
    twice = write_without(clean, stores / "twice", np.arange(3), private, ["identical pixels"])
    assert twice.meta["cleared_from"] == 40 and twice.results_visibility == "private"


def test_sheets_of_a_cleared_store_are_the_operators(
    stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("clean", "mine"):
        assert (
            main(["data", "inspect", str(stores / name), "--sheet", str(tmp_path / "sheet.png")])
            == 2
        )
        assert (
            "would hold private images" in capsys.readouterr().err
            and not (tmp_path / "sheet.png").exists()
        )
        assert main(["data", "inspect", str(stores / name), "--json"]) == 0
        assert "confidential" in Path(json.loads(capsys.readouterr().out)["contact_sheet"]).parts
    assert (
        main(
            [
                "data",
                "inspect",
                str(stores / "mine"),
                "--sheet",
                str(tmp_path / "sheet.png"),
                "--release-private-outputs",
            ]
        )
        == 0
    )


def test_losses_on_a_cleared_store_are_no_public_figure(tmp_path: Path) -> None:
    about = {
        "format": "dpvision-run-1",
        "run_id": "r",
        "store_id": "s",
        "store_visibility": "public",
        "guarantee": "none",
    }
    for name, seen_by in (("clean", "private"), ("whole", "public")):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "config.json", to_dict(RECIPES["synthetic.vip_micro"]()))
        write_json(tmp_path / name / "run.json", about | {"results_visibility": seen_by})
        assert made_of_public_images(tmp_path / name) == (seen_by == "public")


def test_no_record_id_is_in_what_leaves_a_run(stores: Path, tmp_path: Path) -> None:
    with new_session(config_for(stores / "mine"), tmp_path / "run") as session:
        fit(session, quiet=True)
        ids = session.store.index["id"].tolist()
    files = [
        path
        for path in (tmp_path / "run").rglob("*")
        if path.is_file() and "confidential" not in path.parts
    ]
    assert {"model.safetensors", "manifest.json", "ledger.jsonl", "run.json"} <= {
        path.name for path in files
    }
    content = b"".join(path.read_bytes() for path in files)
    for record in ids:
        forms = [
            str(record).encode(),
            f"{record:016x}".encode(),
            record.to_bytes(8, "little"),
            record.to_bytes(8, "big"),
        ]
        assert not any(form in content for form in forms)
    assert read_key(stores / "mine").hex().encode() not in content


def leaving(run: Path) -> dict[str, bytes]:
    """Files of a run outside ``confidential/``, by path."""
    files = [path for path in run.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in files
        if "confidential" not in path.relative_to(run).parts
    }


def test_no_path_of_a_store_is_in_what_leaves_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: config.json and every manifest had it. A folder's name tells what the images are, and
    whose.
    """
    ward, runs = tmp_path / "hospital-ward-7", tmp_path / "runs"
    write_scenes(ward / "patients-with-melanoma", 40, 16, public=False)
    write_scenes(tmp_path / "public", 40, 16, first=1000)
    monkeypatch.chdir(ward)  # as a relative path, too
    private = [
        "--dataset-size",
        "40",
        "--epsilon",
        "8",
        "--num-classes",
        "8",
        "--encoder",
        "pixels",
    ]
    for name, store in (
        ("absolute", str(ward / "patients-with-melanoma")),
        ("relative", "patients-with-melanoma"),
    ):
        argv = [
            "adapt",
            "--data",
            store,
            *private,
            "--runs",
            str(runs),
            "--name",
            name,
            "--test",
            str(tmp_path / "public"),
        ]
        assert main(argv) == 0, capsys.readouterr().err
        assert main(["report", str(runs / name)]) == 0, "the run still finds its store"
    with new_session(config_for(ward / "patients-with-melanoma"), runs / "trained") as session:
        fit(session, quiet=True)
    assert main(["report", str(runs / "trained")]) == 0
    for name in ("absolute", "relative", "trained"):
        files = leaving(runs / name)
        assert (
            any(path.endswith("manifest.json") for path in files)
            and {"config.json", "statement.json", "report.html"} <= files.keys()
        )
        for path, content in files.items():
            assert b"melanoma" not in content and b"ward-7" not in content, path


def test_a_run_is_not_scored_on_its_own_images_although_no_file_that_leaves_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_scenes(tmp_path / "mine", 40, 16, public=False)
    argv = [
        "adapt",
        "--data",
        str(tmp_path / "mine"),
        "--dataset-size",
        "40",
        "--epsilon",
        "8",
        "--num-classes",
        "8",
        "--encoder",
        "pixels",
    ]
    assert main([*argv, "--runs", str(tmp_path), "--name", "run"]) == 0
    assert (
        main(
            [
                "evaluate",
                str(tmp_path / "run"),
                "--test",
                str(tmp_path / "mine"),
                "--protocols",
                "own_head",
            ]
        )
        == 2
    )
    assert "shares records with the store that the run was trained on" in capsys.readouterr().err


def test_no_name_of_what_leaves_depends_on_the_time_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps take as long as their secret batches are large: a checkpoint written every few seconds
    has a step's number that shows them.
    """
    store = write_scenes(tmp_path / "mine", 40, 16, public=False)
    config = config_for(store.path)
    privacy = replace(config.privacy, expected_batch_size=10, sampling="poisson", steps=12)
    config = replace(
        config,
        privacy=privacy,
        hardware=replace(config.hardware, checkpoint_every_s=35.0, keep_checkpoints=9),
    )
    clock, real = [0.0], loop.step_sum

    def timed(*args, **more):
        total, metrics = real(*args, **more)
        clock[0] += metrics.batch_size  # a second for each record
        return total, metrics

    monkeypatch.setattr(loop, "step_sum", timed)
    monkeypatch.setattr(loop.time, "monotonic", lambda: clock[0])
    names, timings = [], []
    for start in range(4):
        run = tmp_path / f"run{start}"
        with new_session(config, run) as session:
            fit(session, secrets=secrets(bytes([start]) * 32, bytes(32)), quiet=True)
        names.append(sorted(leaving(run)))
        timings.append([path.parent.name for path in sorted(run.rglob("manifest.json"))])
    assert all(timings) and any(timing != timings[0] for timing in timings), (
        "the clock shows: the test would see a leak"
    )
    assert all(other == names[0] for other in names)
    assert [name for name in names[0] if name.endswith("manifest.json")] == [
        "checkpoints/step-00000012/manifest.json"
    ]


def test_a_checkpoint_of_the_clock_resumes_a_run_and_is_not_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(write_scenes(tmp_path / "mine", 40, 16, public=False).path)
    privacy = replace(config.privacy, steps=4)
    config = replace(
        config, privacy=privacy, hardware=replace(config.hardware, checkpoint_every_s=0.0)
    )
    real = loop.step_sum

    def fails(step: int, *args, **more):
        if step == 2:
            raise OSError("the machine died")
        return real(step, *args, **more)

    monkeypatch.setattr(loop, "step_sum", fails)
    with pytest.raises(OSError, match="died"), new_session(config, tmp_path / "run") as session:
        fit(session, quiet=True)
    monkeypatch.undo()
    assert not any("checkpoints" in path for path in leaving(tmp_path / "run"))
    with pytest.raises(PrivacyError, match=r"written by the clock.*--resume"):
        make_statement(tmp_path / "run")
    with pytest.raises(PrivacyError, match="was written by the clock"):
        check_run(replace(config, init_from=str(tmp_path / "run")))
    with resumed_session(tmp_path / "run") as session:
        assert (session.updates, session.run.ledger.steps) == (2, 3)
        fit(session, quiet=True)
    assert make_statement(tmp_path / "run")["hashes"]["weights"]
    assert find_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "step-00000004"


def test_the_published_id_of_a_store_is_no_key_of_its_hashes(stores: Path, tmp_path: Path) -> None:
    """With the id from a statement and a leaked list of record ids, membership was decided for 40
    of 40 images without a mistake.
    """
    store = open_store(stores / "mine")
    ids = set(store.index["id"].tolist())
    inside = [store.read(row) for row in range(40)]
    outside = [open_store(stores / "train").read(row) for row in range(40)]

    def guess(image: bytes) -> bool:
        hashed = blake2b(image, key=bytes.fromhex(store.store_id), digest_size=8).digest()
        return int.from_bytes(hashed, "little") >> 1 in ids

    assert not any(map(guess, inside + outside))
    key = read_key(store.path)
    assert all(keyed_hash(key, image) in ids for image in inside) and not any(
        keyed_hash(key, image) in ids for image in outside
    )
    assert stat.S_IMODE((store.path / KEY_FILE).stat().st_mode) == 0o600
    leaves = [path.read_bytes() for path in store.path.iterdir() if path.is_file()]
    assert not any(key.hex().encode() in data or key in data for data in leaves)
    for half in split_store(store.path, stores / "a", stores / "b", 0.5):
        assert read_key(half.path) == key and set(half.index["id"].tolist()) < ids
