"""Help and errors that need no data come before torch is imported: in seconds on a busy machine,
below one on an idle one.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from dpvision.cli import COMMANDS

from ..adapt.runs_of_heads import write_digits

SLOW = (
    "torch",
    "torchvision",
    "timm",
    "scipy",
    "sklearn",
    "dp_accounting",
    "matplotlib",
    "pyarrow",
    "optuna",
)
RUN = f"""
import contextlib, io, json, sys
from dpvision.cli import main
for argv in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(argv)
        except SystemExit as stop:
            code = stop.code
    print(json.dumps([code, [name for name in {SLOW!r} if name in sys.modules], said.getvalue()]))
"""
Started = tuple[int, list[str], str]
"""Exit status, which slow libraries were imported (by this command or one before it), and what was
printed.
"""


def _started(commands: list[list[str]], folder: Path, run: str = RUN) -> list[Started]:
    """Run commands one after the other in one new process."""
    done = subprocess.run(
        [sys.executable, "-c", run, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


WITHIN = {
    "data": ["import", "inspect", "split", "curate", "scenes", "tokenizer", "overlap"],
    "evaluate": ["captioner", "detection", "segmentation"],
    "train": ["vip.micro"],
}
"""Commands with help of their own below others."""


HELP = [[name] for name in COMMANDS] + [[name, word] for name in WITHIN for word in WITHIN[name]]


@pytest.fixture(scope="module")
def helps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Started]:
    found = _started([[*argv, "--help"] for argv in HELP], tmp_path_factory.mktemp("help"))
    return {" ".join(argv): one for argv, one in zip(HELP, found, strict=True)}


@pytest.mark.parametrize("argv", HELP, ids=" ".join)
def test_help_imports_nothing_slow(argv: list[str], helps: dict[str, Started]) -> None:
    code, slow, said = helps[" ".join(argv)]
    assert code == 0 and not slow and "--help" in said, said


ERRORS = [
    (["train", "vip.micor"], "Did you mean"),
    (["train", "vip.micro", "--optim.learning-rat", "1"], "learning-rat"),
    (["train", "demo", "--data", "none"], "dpvision data import SOURCE STORE"),
    (
        ["train", "demo", "--data", "none", "--optim.learning-rate", "-1"],
        "learning_rate=-1.0; expected a positive number",
    ),
    (["train", "demo", "--data", "none", "--name", "taken"], "holds a run already"),
    (
        ["adapt", "--data", "none", "--num-classes", "3", "--dataset-size", "100"],
        "dpvision data import SOURCE STORE",
    ),
    (
        [
            "adapt",
            "--data",
            "none",
            "--num-classes",
            "3",
            "--dataset-size",
            "100",
            "--name",
            "taken",
        ],
        "holds a run already",
    ),
    (["train", "demo", "--data", "none", "--name", "../evil"], "expected the name of one folder"),
    (["train", "demo", "--data", "none", "--name", ".."], "expected the name of one folder"),
    (["adapt", "--head", "two_steps"], "two_steps"),
    (["tune", "vip.micor"], "Did you mean"),
    (["tune", "vip.micro", "--data", "none"], "no --how"),
    (
        [
            "tune",
            "vip.micro",
            "--how",
            "public",
            "--data",
            "none",
            "--space",
            "optim.learning_rat=1,2",
        ],
        "expected one of",
    ),
    (
        ["tune", "vip.micro", "--how", "public", "--data", "none", "--space", "seed=1,2"],
        "changes the guarantee",
    ),
    (
        ["tune", "vip.micro", "--how", "public", "--data", "none", "--space", "optim.eps=1,2"],
        "dpvision data import SOURCE STORE",
    ),
    (["data", "import", "none", "store"], "no such file or folder"),
    (["data", "inspect", "none"], "dpvision data import SOURCE STORE"),
    (["data", "split", "none", "a", "b"], "dpvision data import SOURCE STORE"),
    (["data", "tokenizer", "new.json"], "expected --text, --store or --scenes"),
    (
        ["data", "overlap", "none", "none", "--threshold", "3", "--encoder", "hog"],
        "expected -1 <= cosine < 1",
    ),
    (["data", "overlap", "none", "none"], "dpvision data import SOURCE STORE"),
    (["synth"], "no output"),
    (["evaluate"], "no encoder"),
    (["evaluate", "hog", "--train", "none"], "dpvision data import SOURCE STORE"),
    (["evaluate", "hog", "--train", ".", "--protocols", "kn"], "expected some of knn"),
    (["evaluate", "hog", "--train", ".", "--against", "noise"], "expected random, pixels"),
    (["evaluate", "hog", "--train", ".", "--lars.epochs", "0"], "epochs=0; expected at least 1"),
    (["evaluate", "captioner", ".", "--fit", "wide"], "expected squash or crop"),
    (["evaluate", "captioner", ".", "--order"], "Give --store STORE"),
    (["evaluate", "detection", "vip:none"], "no --train"),
    (["evaluate", "segmentation", "vip:none", "--num-shown", "0"], "expected at least 1"),
    (["export", "none", "out", "--to", "timm"], "none: no such folder; expected a run"),
    (["embed", "hog", "none", "out.npz"], "no such file or folder"),
    (["caption", "none", "photo.jpg"], "none: no such folder; expected a run"),
    (["caption", ".", "photo.jpg", "--out", "words.txt"], "ends in .jsonl or .csv"),
    (["ledger", "none"], "dpvision data import SOURCE STORE"),
    (["ledger", ".", "--set-cap", "8"], "expected both"),
    (["report", "none"], "none: no such folder; expected a run"),
    (["report", ".", "--beside", "."], "Add --gallery STORE"),
    (["verify", "none.json"], "expected a statement.json"),
    (["doctor", "vip.micro", "--max-minutes", "0"], "expected a positive number"),
    (["demo", "--data", "none"], "no such file or folder"),
    (["demo", "--classes", "none"], "--classes without --data"),
    (["demo", "--data", ".", "--classes", "none"], "no such file"),
    (["data", "scenes", "s", "--label", "size"], "size"),
]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> list[Started]:
    folder = tmp_path_factory.mktemp("errors")
    (folder / "runs" / "taken").mkdir(parents=True)
    (folder / "runs" / "taken" / "config.json").write_text("{}")
    (folder / "runs" / "taken" / "run.json").write_text("{}")
    return _started([argv for argv, _ in ERRORS], folder)


@pytest.mark.parametrize("index", range(len(ERRORS)), ids=lambda index: " ".join(ERRORS[index][0]))
def test_an_error_that_needs_no_data_comes_first(index: int, errors: list[Started]) -> None:
    (_, words), (code, slow, said) = ERRORS[index], errors[index]
    assert code == 2 and words in said, said
    assert not slow


@pytest.mark.parametrize("recipe", ["vip.base", "dpcap.base"])
def test_a_plan_imports_no_slow_part(recipe: str, tmp_path: Path) -> None:
    """One epsilon in two seconds: dp-accounting alone took more than one to import, most of it
    SciPy's statistics and optimizers.
    """
    code = RUN.replace(repr(SLOW), repr((*SLOW, "scipy.stats", "scipy.optimize", "scipy.signal")))
    ((status, slow, said),) = _started([["plan", recipe, "--json"]], tmp_path, code)
    assert status == 0 and slow == ["scipy"], said


def test_an_import_does_not_load_torch(tmp_path: Path) -> None:
    """Two seconds of a core."""
    for name in ("1", "2", "3"):
        (tmp_path / "images").mkdir(exist_ok=True)
        Image.new("RGB", (40, 40), (30, int(name), 4)).save(tmp_path / f"images/{name}.png")
    argv = ["data", "import", "images", "store", "--workers", "1"]
    ((status, slow, said),) = _started([argv], tmp_path)
    assert status == 0 and slow == ["scipy", "pyarrow"] and "3 records" in said, said


def test_a_head_on_features_without_training_imports_neither_timm_nor_torchvision(
    tmp_path: Path,
) -> None:
    """timm imports torchvision, which imports torch's compiler: together 5 seconds of a core."""
    write_digits(tmp_path / "mine", 0, 200)
    argv = "adapt --data mine --encoder pixels --num-classes 10 --dataset-size 200 --epsilon 4"
    code = RUN.replace(repr(SLOW), repr((*SLOW, "torch._dynamo", "scipy.stats")))
    ((status, slow, said),) = _started([[*argv.split(), "--dry-run"]], tmp_path, code)
    assert status == 0 and slow == ["torch", "scipy"], said


@pytest.mark.slow
def test_a_trained_and_scored_head_has_imported_neither_the_compiler_nor_statistics(
    tmp_path: Path,
) -> None:
    """torch.optim's SGD imports torch's compiler in its first step: 2 seconds."""
    write_digits(tmp_path / "mine", 0, 200)
    write_digits(tmp_path / "test", 900, 1000, public=True)
    argv = "adapt --data mine --encoder pixels --num-classes 10 --dataset-size 200 --epsilon 4"
    code = RUN.replace(repr(SLOW), repr((*SLOW, "torch._dynamo", "scipy.stats")))
    ((status, slow, said),) = _started([[*argv.split(), "--test", "test"]], tmp_path, code)
    assert status == 0 and slow == ["torch", "scipy"] and "own head" in said, said
