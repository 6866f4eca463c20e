"""``dpvision data overlap`` as a person meets it."""

import json
from pathlib import Path

import pytest

from dpvision.cli import main
from dpvision.config import PrivacyConfig
from dpvision.data.open import open_store
from dpvision.data.synthetic_store import write_scenes
from dpvision.privacy.plan import make_plan
from dpvision.runs.lineage import own_entry

pytest.importorskip("imagehash", reason='imagehash is not installed: pip install ".[overlap]"')
pytest.importorskip("faiss", reason='faiss is not installed: pip install ".[overlap]"')


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenes 0 to 29, public, and 25 to 54, private: five in common."""
    folder = tmp_path_factory.mktemp("overlap")
    write_scenes(folder / "public", 30, 48)
    write_scenes(folder / "mine", 30, 48, first=25, public=False)
    return folder


def test_it_says_what_matches_and_keeps_it_where_it_must_stay(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {
        path: path.stat().st_mtime_ns for path in (root / "mine").rglob("*") if path.is_file()
    }
    arguments = [
        "data",
        "overlap",
        str(root / "public"),
        str(root / "mine"),
        "--encoder",
        "hog",
        "--out",
        str(root / "clean"),
        "--json",
    ]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["by"]["bytes"] == 5 and found["public_pictures"] == 30
    assert found["recall_on_public_copies"]["mirror image"] == 1.0
    folder = root / "mine" / "confidential" / "overlap-public"
    assert {path.name for path in folder.iterdir()} == {
        "pairs.jsonl",
        "overlap.html",
        "summary.json",
    }
    assert folder.stat().st_mode & 0o077 == 0
    page = (folder / "overlap.html").read_text()
    assert (
        "Confidential" in page and page.count("<figure>") == found["public_pictures_with_a_match"]
    )
    clean = open_store(root / "clean")
    assert clean.num_records == 30 - found["public_pictures_with_a_match"] <= 25
    assert (
        str(root) not in json.dumps(clean.meta["deduplicated"])
        and "hog" in clean.meta["deduplicated"]["methods"][-1].lower()
    )
    assert all(path.stat().st_mtime_ns == time for path, time in before.items()), (
        "the private store is never changed"
    )
    assert main([*arguments[:4], "--exact"]) == 0
    assert "5 of 30 public images have a match" in capsys.readouterr().out
    assert main(arguments) == 2 and "exists" in capsys.readouterr().err


def test_what_is_trained_on_a_cleared_store_names_it_in_its_lineage(root: Path) -> None:
    assert (
        main(
            [
                "data",
                "overlap",
                str(root / "public"),
                str(root / "mine"),
                "--exact",
                "--out",
                str(root / "exact"),
            ]
        )
        == 0
    )
    plan = make_plan(PrivacyConfig(30, 10, 2, max_grad_norm=None, guarantee="none"))
    entry = own_entry(plan, open_store(root / "exact"), "r", 2)
    assert entry["deduplicated"]["against"] == [open_store(root / "mine").store_id]
    assert "deduplicated" not in own_entry(plan, open_store(root / "public"), "r", 2)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--radius", "40"], "radius=40"),
        (["--threshold", "0.9"], "without an encoder"),
        (["--exact", "--encoder", "hog"], "--exact"),
        (["--encoder", "nothing"], "encoder: 'nothing'"),
        (["--encoder", "hog", "--threshold", "2"], "threshold=2"),
        (["--out", "elsewhere/clean"], "beside the public store"),
    ],
)
def test_what_cannot_be_is_one_clear_error(
    root: Path, capsys: pytest.CaptureFixture[str], more: list[str], problem: str
) -> None:
    assert main(["data", "overlap", str(root / "public"), str(root / "mine"), *more]) == 2
    assert problem in capsys.readouterr().err
    assert main(["data", "overlap", str(root / "mine"), str(root / "public")]) == 2
    assert "expected the public store first" in capsys.readouterr().err
