"""Commands that are printed as the next steps follow from the store, and pass as printed, through
the command line.
"""

import json
import shlex
from pathlib import Path

import pytest

from dpvision.cli import main

from ..data.image_files import png, write_folder

pytestmark = pytest.mark.usefixtures("gates_once")

NUM = 48  # halves of a split by coins of the import's key lack a class once in ten million
SIZES = (
    "--model.encoder.depth 1 --model.encoder.width 32 --model.encoder.num-heads 2 "
    "--privacy.steps 2 --hardware.physical-batch-size 8"
)
DECODER = "--model.decoder-depth 1 --model.decoder-width 16 --model.decoder-num-heads 2"
Files = dict[str, bytes]


def _images(label: str = "", start: int = 0, num: int = NUM) -> Files:
    """Images i.png, in folders named by ``label`` of i % 3."""
    return {
        f"{label.format(i % 3)}/{i}.png".lstrip("/"): png(i, 32, 32)
        for i in range(start, start + num)
    }


def _table(images: Files, **columns: list[object]) -> Files:
    rows = [
        {"file_name": name, **{column: values[i] for column, values in columns.items()}}
        for i, name in enumerate(images)
    ]
    return images | {"metadata.jsonl": "\n".join(map(json.dumps, rows)).encode()}


def _texts(images: Files, every: int = 1) -> Files:
    return images | {
        f"{name[:-4]}.txt": b"a red circle" for i, name in enumerate(images) if i % every == 0
    }


PERSONS: list[object] = [f"p{i // 2}" for i in range(NUM)]
STORES: dict[str, tuple[Files, str]] = {
    "neither": (_images(), ""),
    "labels": (_images("kind {}"), "--classes names.txt"),
    "numbers": (_images("{}"), ""),
    "public": (_images("kind {}"), "--public"),
    "undeclared": (_images("kind {}"), "--classes two.txt --unknown-classes unlabelled"),
    "captions": (_texts(_images()), ""),
    "public captions": (_texts(_images("kind {}")), "--public"),
    "some captions": (_texts(_images(), 3), ""),
    "persons": (
        _table(_images(), person=PERSONS, label=[i % 3 for i in range(NUM)]),
        "--unit-from person",
    ),
    "persons, captions": (
        _table(_images(), person=PERSONS, text=["a blue square"] * NUM),
        "--unit-from person",
    ),
    "several labels": (_table(_images(), label=[[i % 3] if i % 4 else [] for i in range(NUM)]), ""),
    "one class": (_images("0", num=NUM), ""),
    "some labels": (_table(_images(), label=[i % 3 if i % 2 else None for i in range(NUM)]), ""),
}
QUICK = ("labels",)


@pytest.fixture(autouse=True)
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Start in an empty folder with files of class names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "names.txt").write_text("kind 0\nkind 1\nkind 2\n")
    (tmp_path / "two.txt").write_text("kind 0\nkind 1\n")
    return tmp_path


def _imported(kind: str, capsys: pytest.CaptureFixture[str]) -> tuple[Path, list[str]]:
    """A store with a space in its name, and the commands that its import prints."""
    files, options = STORES[kind]
    write_folder(Path("images"), files)
    store = Path("my stores", "one")
    return store, _commands(["data", "import", "images", str(store), *options.split()], capsys)


def _commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run a command; return the commands that it prints as next steps."""
    assert main(argv) == 0, capsys.readouterr().err
    return [
        line.strip()
        for line in capsys.readouterr().out.splitlines()
        if line.strip().startswith("dpvision ")
    ]


def _pass(commands: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert commands, "no next step"
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0, (command, capsys.readouterr().err)
    capsys.readouterr()


@pytest.mark.parametrize(
    "kind",
    [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in STORES],
)
def test_each_command_after_an_import_passes_as_printed(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, commands = _imported(kind, capsys)
    _pass(commands, capsys)
    said = " ".join(commands)
    assert ("dpcap." in said) == (kind.endswith("captions") and kind != "some captions")
    assert ("dpvision adapt" in said) == (
        kind
        not in (
            "neither",
            "captions",
            "some captions",
            "persons, captions",
            "one class",
            "some labels",
        )
    )
    assert ("--privacy.num-units" in said) == kind.startswith("persons")
    assert ("--model.multi-label" in said) == (kind == "several labels")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("one class", "one class only"),
        ("some labels", "have no label"),
        ("some captions", f"{2 * NUM // 3} images have no caption"),
        ("public", "Next, to test on these images: --test "),
    ],
)
def test_what_a_store_lacks_is_said_in_place_of_a_command_that_fails(
    kind: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files, options = STORES[kind]
    write_folder(Path("images"), files)
    assert main(["data", "import", "images", "store", *options.split()]) == 0
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    "kind",
    [
        "persons",
        pytest.param("captions", marks=pytest.mark.slow),
        pytest.param("neither", marks=pytest.mark.slow),
    ],
)
def test_each_command_after_a_split_passes_as_printed(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store, _ = _imported(kind, capsys)
    first, second = store.with_name("first"), store.with_name("second")
    assert main(["data", "split", str(store), str(first), str(second), "--fraction", "0.6"]) == 0
    said = capsys.readouterr().out
    commands = [line.strip() for line in said.splitlines() if line.strip().startswith("dpvision ")]
    assert all(
        str(first.resolve()) in command and str(second.resolve()) not in command
        for command in commands
    )
    held = {
        half: next(line for line in said.splitlines() if str(half.resolve()) in line)
        for half in (first, second)
    }
    assert all(("people" in line) == (kind == "persons") for line in held.values()), held
    _pass(commands, capsys)


def _trained(recipe: str, store: Path, more: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    num = int(json.loads((store / "store.json").read_text())["num_records"])
    batch = f"--privacy.dataset-size {num} --privacy.expected-batch-size 4 --quiet --name a"
    return _commands(
        ["train", recipe, "--data", str(store), *f"{batch} {SIZES} {more}".split()], capsys
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "split", "more", "expected"),
    [
        ("labels", False, DECODER, ["dpvision evaluate runs/a --train", "dpvision report runs/a"]),
        ("labels", True, DECODER, ["dpvision evaluate runs/a --train", "dpvision report runs/a"]),
        (
            "labels",
            False,
            f"{DECODER} --non-private",
            ["dpvision evaluate runs/a --train"],
        ),
        ("neither", False, DECODER, ["dpvision report runs/a"]),
        (
            "public",
            False,
            f"{DECODER} --non-private",
            ["dpvision evaluate runs/a --train", "dpvision report runs/a"],
        ),
        ("one class", False, DECODER, ["dpvision report runs/a"]),
    ],
)
def test_each_command_after_training_passes_as_printed(
    kind: str, split: bool, more: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    store, _ = _imported(kind, capsys)
    if split:
        parts = [store.with_name("a"), store.with_name("b")]
        assert (
            main(
                ["data", "split", str(store), *map(str, parts), "--fraction", "0.7", "--seed", "1"]
            )
            == 0
        )
        store = parts[0]
        capsys.readouterr()
    commands = _trained("vip.micro_random_start", store, more, capsys)
    assert len(commands) == len(expected) and all(
        words in command for words, command in zip(expected, commands, strict=True)
    ), commands
    assert ("--test" in commands[0]) == split
    _pass(commands, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
def test_each_command_after_training_a_captioner_passes_as_printed(
    split: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    store, (tokenizer, *_) = _imported("captions", capsys)
    _pass([tokenizer], capsys)
    words = shlex.split(tokenizer)[3]
    if split:
        assert (
            main(
                [
                    "data",
                    "split",
                    str(store),
                    str(store.with_name("a")),
                    str(store.with_name("b")),
                    "--fraction",
                    "0.6",
                ]
            )
            == 0
        )
        store = store.with_name("a")
        capsys.readouterr()
    num = int(json.loads((store / "store.json").read_text())["num_records"])
    sizes = f"--privacy.dataset-size {num} --privacy.expected-batch-size 4 --quiet --name a {SIZES}"
    sizes += " --model.decoder.depth 1 --model.decoder.width 32 --model.decoder.num-heads 2"
    argv = [
        "train",
        "dpcap.micro_random_start",
        "--data",
        str(store),
        "--data.tokenizer",
        words,
        *sizes.split(),
    ]
    commands = _commands(argv, capsys)
    assert (
        "evaluate captioner runs/a" in commands[0]
        and ("--store" in commands[0]) == split
        and "report runs/a" in commands[1]
    )
    _pass(commands, capsys)


@pytest.mark.parametrize("split", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_each_command_after_a_head_passes_as_printed(
    split: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    store, commands = _imported("labels", capsys)
    if split:
        parts = str(store.with_name("a")), str(store.with_name("b"))
        commands = _commands(["data", "split", str(store), *parts, "--fraction", "0.6"], capsys)
    (adapt,) = (command for command in commands if command.startswith("dpvision adapt"))
    words = shlex.split(
        adapt.replace("patches+scattering", "pixels").replace("--dry-run", "--name a --quiet")
    )
    commands = _commands(words[1:], capsys)
    assert [command.split()[1] for command in commands] == (
        ["evaluate", "report"] if split else ["report"]
    )
    _pass(commands, capsys)


def test_the_other_half_shares_no_image(capsys: pytest.CaptureFixture[str]) -> None:
    """A half that was split again with the same numbers has a part that looks like the other
    half.
    """
    from dpvision.data.open import open_store
    from dpvision.data.split import other_half

    store, _ = _imported("neither", capsys)
    a, b = (store.with_name(name) for name in "ab")
    assert main(["data", "split", str(store), str(a), str(b), "--fraction", "0.5"]) == 0
    other = other_half(open_store(a))
    assert other is not None and other.path.name == "b"
    description = b / "store.json"
    part = store.with_name("0")  # sorted before b: records of a under the numbers of b
    part.mkdir()
    for file in a.iterdir():
        if file.is_file():
            (part / file.name).write_bytes(file.read_bytes())
    meta = json.loads((a / "store.json").read_text())
    (part / "store.json").write_text(
        json.dumps(meta | {"split": json.loads(description.read_text())["split"]})
    )
    other = other_half(open_store(a))
    assert other is not None and other.path.name == "b"
    assert other_half(open_store(store)) is None


@pytest.mark.slow
def test_each_command_after_scenes_and_after_clearing_a_store_passes_as_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands = _commands(
        ["data", "scenes", "my stores/scenes", "--num", "40", "--size-px", "32", "--workers", "1"],
        capsys,
    )
    assert [command.split()[1] for command in commands] == ["data", "train", "adapt"]
    _pass(commands, capsys)
    _imported("public", capsys)
    write_folder(Path("few"), _images(num=5))
    assert main(["data", "import", "few", "few-store"]) == 0
    capsys.readouterr()
    commands = _commands(
        ["data", "overlap", "my stores/one", "few-store", "--out", "my stores/clear"], capsys
    )
    assert all(
        f"--{name}-size {NUM}" in command
        for name, command in zip(("privacy.dataset", "dataset"), commands, strict=True)
    )
    _pass(commands, capsys)
