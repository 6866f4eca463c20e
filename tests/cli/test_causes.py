"""An error names its cause and the remedy: what is at a path where something else was expected,
permissions, a run that is not there.
"""

import os
import shlex
import stat
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from dpvision.cli import main
from dpvision.cli.scores import scores_table
from dpvision.data.import_labels import LabelRule
from dpvision.data.importer import import_source
from dpvision.data.open import open_store
from dpvision.data.person_names import PersonRule
from dpvision.errors import DataError
from dpvision.eval.score import Score

from ..data.image_files import js, png, write_folder, write_tar


@pytest.fixture(autouse=True)
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _images(num: int = 6) -> dict[str, bytes]:
    return {f"{('cat', 'dog')[i % 2]}/{i}.png": png(i) for i in range(num)}


def _error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 2
    (said,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    return said


def _store(name: str = "store") -> Path:
    write_folder(Path("images"), _images())
    return import_source("images", name, public=True).path


STORE_COMMANDS = [
    "evaluate patches --train {}",
    "evaluate runs/a --test {}",
    "adapt --data {} --num-classes 2 --dataset-size 6",
    "adapt --data store --test {} --num-classes 2 --dataset-size 6 --epsilon 1",
    "train vip.micro_random_start --data {}",
    "data inspect {}",
    "ledger {}",
]


@pytest.mark.parametrize("command", STORE_COMMANDS)
def test_a_folder_of_images_in_place_of_a_store_gets_the_command_that_imports_it(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _store()
    said = _error(command.format("images").split(), capsys)
    assert "No such file" not in said and "images: a folder without store.json" in said
    (imports,) = (part for part in said.split(": ") if part.startswith("dpvision data import"))
    assert main([*shlex.split(imports.partition(",")[0])[1:], "--public"]) == 0
    assert open_store("images-store").num_records == 6


def test_what_is_in_place_of_a_store_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    store = _store()
    write_folder(Path("runs"), {"a/config.json": b"{}"})
    write_tar(Path("some.tar"), {"0.png": png(0), "0.cls": b"1"})
    for place, words in [
        ("runs/a", "a run; expected a store"),
        (".", "Give one: store"),
        ("some.tar", "import some.tar some-store"),
    ]:
        assert words in _error(["data", "inspect", place], capsys)
        with pytest.raises(DataError, match=words):
            open_store(place)
    assert main(["data", "inspect", str(store)]) == 0


@pytest.mark.parametrize(
    "command",
    [
        "train vip.micro",
        "adapt",
        "adapt --epsilon 2 --data store",
        "train vip.micro --optim.learning-rate 1",
    ],
)
def test_resuming_a_run_that_is_not_there_names_those_that_are(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*command.split(), "--resume", "--name", "nosuch"]
    said = _error(argv, capsys)
    assert "runs/nosuch holds no run" in said and "There is no run in runs" in said
    hub = {"hub/config.json": b"{}"}  # what save_pretrained writes
    runs = {
        f"{base}/{name}.json": b"{}"
        for base in ("first", "secret/confidential")
        for name in ("config", "run")
    }
    write_folder(Path("runs"), runs | hub | {"other/x": b""})
    said = _error(argv, capsys)
    assert "runs/nosuch holds no run" in said and "The runs in runs are first, secret:" in said
    assert "runs/hub holds no run" in _error(["export", "runs/hub", "out", "--to", "onnx"], capsys)


def test_verify_of_a_run_gets_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(
        Path("runs"),
        {"a/config.json": b"{}", "b/config.json": b"{}", "b/statement.json": b"{}", "c/x": b""},
    )
    assert _error(["verify", "runs/a"], capsys).endswith("Write it first: dpvision report runs/a")
    said = _error(["verify", "runs/b"], capsys)
    assert said.endswith("Use dpvision verify runs/b/statement.json --run runs/b")
    with pytest.raises(SystemExit) as checked:
        main(shlex.split(said.partition("Use ")[2])[1:])
    assert checked.value.code == 1, "the command that is named checks the statement, which is empty"
    assert "without statement.json" in _error(["verify", "runs/c"], capsys)


def test_a_missing_warm_start_is_named_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the tokenizer is asked for, and before anything slow is imported or read."""
    _store()

    def slow(*args: object) -> None:
        raise AssertionError("the store was opened")

    monkeypatch.setattr("dpvision.data.open.open_store", slow)
    monkeypatch.setattr("dpvision.train.start.open_store", slow)
    for more in ([], ["--dry-run"]):
        said = _error(["train", "dpcap.micro", "--data", "store", *more], capsys)
        assert "dpvision train synthetic.dpcap_micro" in said and "--init-from None" in said
    assert "dpvision train synthetic.vip_micro" in _error(
        ["train", "vip.micro", "--data", "store"], capsys
    )


SOURCES = {
    "folders": lambda: write_folder(Path("source"), _images(400)),
    "persons": lambda: write_folder(
        Path("source"),
        {f"{i}.png": png(i) for i in range(200)}
        | {
            "metadata.csv": (
                "file_name,label,person\n"
                + "".join(f"{i}.png,{'cat' if i else ''},{i}\n" for i in range(200))
            ).encode()
        },
    ),
    "tar": lambda: write_tar(
        Path("source.tar"),
        {
            f"{i}.{end}": data
            for i in range(200)
            for end, data in (("png", png(i)), ("cls", b"cat"))
        },
    ),
    "lists": lambda: write_tar(
        Path("source.tar"),
        {
            f"{i}.{end}": data
            for i in range(200)
            for end, data in (("png", png(i)), ("json", js(label=["cat"])))
        },
    ),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_missing_classes_are_found_before_the_images_are_decoded(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, decoded = SOURCES[kind](), list[int]()
    monkeypatch.setattr("dpvision.data.import_part._check", lambda *args: decoded.append(1))
    said = _error(
        [
            "data",
            "import",
            str(source),
            "store",
            *(["--unit-from", "person"] if kind == "persons" else []),
        ],
        capsys,
    )
    assert "class names ('cat'" in said and "--classes FILE" in said and not decoded
    assert ("'dog'" in said) == (kind == "folders"), "other names follow, for the list"
    assert not Path("store").exists()


def test_a_name_of_an_image_that_does_not_count_needs_no_list(tmp_path: Path) -> None:
    files = {f"{i}.png": png(i) for i in range(3)} | {
        "broken/1.png": png(1)[:60],
        "broken/notes.txt": b"none",
    }
    store = import_source(write_folder(tmp_path / "source", files), tmp_path / "store")
    assert store.num_records == 3 and not store.has_labels
    files = {f"{i}.png": png(i) for i in range(3)}
    table = b"file_name,label,person\n0.png,1,a\n1.png,0,b\n2.png,junk,\n"
    source = write_folder(tmp_path / "persons", files | {"metadata.csv": table})
    assert import_source(
        source, tmp_path / "kept", people=PersonRule("person", unmatched="drop")
    ).labels.tolist() == [1, 0]
    with pytest.raises(DataError, match="junk"):
        import_source(source, tmp_path / "all", people=PersonRule("person", unmatched="own-person"))
    kept = import_source(
        source,
        tmp_path / "both",
        people=PersonRule("person", unmatched="own-person"),
        labels=LabelRule(unknown_classes="unlabelled"),
    )
    assert kept.labels.tolist() == [1, 0, -1]


@pytest.fixture
def somebody(tmp_path: Path) -> Iterator[None]:
    """Run the test as a user whom permissions bind: root is bound by none."""
    if os.geteuid() != 0:
        yield
        return
    opened = [
        folder
        for folder in (tmp_path, *tmp_path.parents)
        if not folder.stat().st_mode & stat.S_IXOTH
    ]
    before = {folder: stat.S_IMODE(folder.stat().st_mode) for folder in opened}
    for folder in opened:
        folder.chmod(0o755)
    for below, _, names in os.walk(tmp_path):
        for name in ("", *names):
            os.chown(Path(below, name), 65534, 65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        for folder, mode in before.items():
            folder.chmod(mode)


@pytest.fixture
def files(tmp_path: Path, at: Path) -> Path:
    """A private store, images and a closed folder; made before ``somebody``, who may not be able to
    import what is not imported yet.
    """
    for name in (
        "cli.data",
        "cli.evaluate",
        "cli.report",
        "cli.train",
        "cli.verify",
        "data.importer",
        "data.inspect",
        "eval.probes.suite",
    ):
        import_module(f"dpvision.{name}")
    for name in (
        "report.gallery",
        "report.operator_page",
        "report.page",
        "statement.verify",
        "train.start",
    ):
        import_module(f"dpvision.{name}")
    write_folder(tmp_path / "images", {f"{i}.png": png(i) for i in range(6)})
    import_source("images", "store")
    write_folder(
        tmp_path / "closed",
        {
            "images/1.png": png(1),
            "run/config.json": b"{}",
            "run/run.json": js(
                format="dpvision-run-1",
                run_id="r",
                store_id="s",
                store_visibility="private",
                guarantee="dp",
            ),
        },
    )
    return tmp_path


@pytest.mark.parametrize(
    ("command", "closed", "mode", "words"),
    [
        ("data import images new/store", ".", 0o555, ["data: ", "may not use it", "ls -ld"]),
        (
            "data import closed/images new",
            "closed",
            0o600,
            ["permission: ", "closed: Permission denied", "may be entered"],
        ),
        ("data import closed new", "closed", 0o000, ["permission: ", "may be entered"]),
        (
            "data import closed new",
            "closed",
            0o100,
            ["closed: Permission denied; expected a readable folder"],
        ),
        (
            "data inspect store",
            "store",
            0o600,
            ["store: store: Permission denied", "may not use it", "/store)"],
        ),
        ("data inspect store", "store/index.npy", 0o000, ["index.npy", "may not use it"]),
        (
            "data inspect store",
            "store/store.json",
            0o000,
            ["store.json: Permission denied", "may not use it"],
        ),
        ("evaluate patches --train store", "store", 0o600, ["store: store: Permission denied"]),
        ("verify closed/run", "closed/run", 0o600, ["permission: ", "may be entered"]),
        ("report closed/run", "closed/run/config.json", 0o000, ["may not use it"]),
        (
            "train vip.micro --resume --name run --runs closed",
            "closed/run/config.json",
            0o000,
            ["may not use it"],
        ),
    ],
)
def test_permissions_are_named_as_the_cause(
    command: str,
    closed: str,
    mode: int,
    words: list[str],
    files: Path,
    somebody: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = stat.S_IMODE(Path(closed).stat().st_mode)
    Path(closed).chmod(mode)
    try:
        said = _error(command.split(), capsys)
    finally:
        Path(closed).chmod(before)
    assert all(part in said for part in words), said
    for wrong in (
        "Import the source again",
        "Restore",
        "free space",
        "Free space",
        "Make one with",
    ):
        assert wrong not in said, said


@pytest.mark.parametrize("number", [13, 1])
def test_any_denied_write_is_an_error_with_its_place(
    number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(argv: list[str]) -> None:
        raise PermissionError(number, "Operation not permitted", str(tmp_path / "new" / "file"))

    monkeypatch.setattr("dpvision.cli.ledger.run", denied)
    said = _error(["ledger", "store"], capsys)
    assert (
        f"{tmp_path / 'new'}: Operation not permitted; expected one that may be written to" in said
    )


@pytest.mark.parametrize("command", ["adapt", "tune"])
def test_a_misspelled_option_without_a_recipe_is_named(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was taken for a recipe called '[]'."""
    with pytest.raises(SystemExit) as left:
        main([command, "--epsilom", "1"])
    printed = "".join(capsys.readouterr())
    assert (
        left.value.code == 2
        and "recipe '[]'" not in printed
        and ("--epsilom" in printed or "usage: dpvision tune RECIPE" in printed)
    )


def test_a_score_below_chance_says_what_it_may_mean() -> None:
    """Labels 1 to 5 without names, scored on labels 0 to 4: 0% in silence."""
    at = Score("head", 0.0, 0.0, 0.02, 200, 0.2, "accuracy", "public")
    assert "count from the same number" in scores_table([at])
    assert "Below chance" not in scores_table([replace(at, value=0.2, high=0.3)])
