"""The examples run as they stand, in any order, each in a copy of its folder: they learn, and their
epsilon is the one of their ledger.
"""

import ast
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import dpvision
from dpvision.privacy.ledger import read_ledger

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import from_pacs

from ..adapt.runs_of_heads import head_config, run_head, write_digits

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = {
    "adapt_digits": "adapt_digits/adapt_digits.py",
    "command_line": "command_line/walk_through.sh",
    "export_everywhere": "export_everywhere/export_everywhere.py",
    "from_pacs": "from_pacs/export_to_document.sh",
    "lightning": "lightning/lightning_digits.py",
    "paper_row": "paper_row/paper_row.py",
    "peft_lora": "peft_lora/peft_digits.py",
    "preemptible_jobs": "preemptible_jobs/with_submitit.py",
    "private_captioner": "private_captioner/private_captioner.py",
    "serve": "serve/serve.py",
    "write_export": "from_pacs/write_export.py",
    "your_own_loop": "your_own_loop/your_own_loop.py",
    "your_own_transformer": "your_own_loop/your_own_transformer.py",
}
CHANCE_OF_A_DIGIT = 0.10
"""Accuracy of a guess among ten digits, each about as frequent."""


class Done:
    """An example that ran: its folder and what it printed."""

    def __init__(self, name: str, folder: Path) -> None:
        source = EXAMPLES / SCRIPTS[name]
        self.folder = shutil.copytree(
            source.parent, folder / name, ignore=shutil.ignore_patterns("stores", "runs")
        )
        script = self.folder / source.name
        command = ["bash", str(script)] if script.suffix == ".sh" else [sys.executable, str(script)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DPVISION": f"{sys.executable} -m dpvision",
            "NUM": "400",
        }
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=900, env=environment
        )
        assert done.returncode == 0, done.stderr
        self.out = done.stdout

    def found(self, pattern: str) -> list[float]:
        """The numbers of a pattern, in the order in which they were printed."""
        return [float(number) for number in re.findall(pattern, self.out)]

    def spent(self, store: str) -> list[tuple[float, float]]:
        """(epsilon of the executed steps, epsilon of the plan) of each run on a store, by its
        ledgers.
        """
        store_id = json.loads((self.folder / "stores" / store / "store.json").read_text())[
            "store_id"
        ]
        ledgers = map(read_ledger, (self.folder / "stores/LEDGERS" / store_id).glob("*.jsonl"))
        return sorted(
            (ledger.plan.spent(ledger.steps).epsilon, ledger.plan.epsilon) for ledger in ledgers
        )


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Done] = {}

    def get(name: str) -> Done:
        if name not in made:
            made[name] = Done(name, tmp_path_factory.mktemp("examples"))
        return made[name]

    return get


def test_every_example_is_tested_here_and_in_the_table() -> None:
    found = {path for kind in ("py", "sh") for path in EXAMPLES.glob(f"*/*.{kind}")}
    assert found == {EXAMPLES / script for script in SCRIPTS.values()}
    table = (EXAMPLES / "README.md").read_text()
    for name, script in SCRIPTS.items():
        assert f"[{name}]({script})" in table
        assert (EXAMPLES / script).with_name("README.md").exists()


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_an_example_is_short(name: str) -> None:
    """Statements, for lines depend on the formatter's width; a shell script has commands."""
    text = (EXAMPLES / SCRIPTS[name]).read_text()
    if SCRIPTS[name].endswith(".py"):
        count = sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))
    else:
        count = len(text.splitlines())
    # write_export makes the data of an example, serve answers strangers.
    limits = {"your_own_loop": 25, "write_export": 40, "serve": 50}
    assert 0 < count <= limits.get(name, 35)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "epsilon"),
    [
        ("adapt_digits", 3.0),
        ("lightning", 3.0),
        ("peft_lora", 8.0),
        ("your_own_loop", 3.0),
        ("your_own_transformer", 8.0),
    ],
)
def test_digits_are_learned_at_the_epsilon_that_is_printed(
    example, name: str, epsilon: float
) -> None:
    for module in {"lightning": ["lightning"], "peft_lora": ["peft"]}.get(name, []):
        pytest.importorskip(module, reason="needs pip install 'dpvision[loops]'")
    done = example(name)
    (accuracy,), ((spent, planned),) = done.found(r"accuracy ([\d.]+)%"), done.spent("digits")
    # Draws and noise are new in every run; five times chance is below all runs seen (75% and more)
    # and far above a guess.
    assert accuracy / 100 > 5 * CHANCE_OF_A_DIGIT
    assert spent == planned <= epsilon and done.found(r"at epsilon ([\d.]+)") == [
        float(f"{spent:.2f}")
    ]


@pytest.mark.slow
def test_the_row_of_the_paper_is_at_the_epsilons_of_its_ledgers(example) -> None:
    done = example("paper_row")
    printed = done.found(r"at epsilon ([\d.]+)")
    assert len(printed) == 8 and sorted(printed) == [
        float(f"{spent:.2f}") for spent, _ in done.spent("digits")
    ]
    assert min(done.found(r"many_steps: accuracy ([\d.]+)%")) / 100 > 3 * CHANCE_OF_A_DIGIT


@pytest.mark.slow
def test_private_captions_teach_colours_that_the_warm_start_cannot_name(example) -> None:
    done = example("private_captioner")
    before, after = done.found(r"right in ([\d.]+)%")
    # A fifth of the scenes has any one of the five new colours; the warm start has never seen them
    # named.
    assert before < 5 and after > before + 10
    ((spent, planned),) = done.spent("private")
    assert spent == planned <= 8 and done.found(r"epsilon ([\d.]+)") == [float(f"{spent:.2f}")]


@pytest.mark.slow
def test_the_walk_through_ends_with_a_statement_that_holds(example) -> None:
    done = example("command_line")
    commands = re.findall(r"^\+ dpvision (\w+)", done.out, re.MULTILINE)
    assert commands == ["data", "data", "ledger", "adapt", "adapt", "report", "verify", "ledger"]
    ((spent, _),) = done.spent("mine")
    statement = json.loads((done.folder / "runs/first/statement.json").read_text())
    assert statement["guarantee"]["epsilon"] == pytest.approx(spent) and spent <= 2


def test_the_server_answers_as_the_classifier_does(tmp_path: Path) -> None:
    store = write_digits(tmp_path / "store", 0, 300)
    run = run_head(head_config(store, "prototypes", spec="hog"), tmp_path / "run")
    # A job in the background of a shell ignores SIGINT, and so do its children.
    start = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    start += "; import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0])"
    command = [sys.executable, "-c", start, str(EXAMPLES / SCRIPTS["serve"]), str(run), "0"]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **both) as server:
        try:
            assert server.stdout is not None and server.stderr is not None
            address = server.stdout.readline().strip()

            def post(body: bytes) -> dict:
                with urllib.request.urlopen(address, data=body, timeout=900) as answer:
                    return json.load(answer)

            for row in (0, 7):
                (expected,) = dpvision.predict(run, [_file(tmp_path, store.read(row))])
                found = post(store.read(row))
                assert list(found) == [str(k) for k in range(10)]
                assert list(found.values()) == pytest.approx(expected.probabilities, abs=1e-6)
            with pytest.raises(urllib.error.HTTPError) as refused:
                post(b"not an image")
            assert refused.value.code == 400
            assert json.load(refused.value)["error"].startswith("image: not an image")
            place = ("127.0.0.1", int(address.rpartition(":")[2]))

            def status(head: str, body: bytes = b"") -> int:
                with socket.create_connection(place, timeout=60) as link:
                    link.sendall(f"{head}\r\n\r\n".encode() + body)
                    link.shutdown(socket.SHUT_WR)
                    return int(link.makefile().readline().split()[1])

            for length in ("-1", "abc", "1e3", ""):
                assert status(f"POST / HTTP/1.0\r\nContent-Length: {length}", b"x") == 400
            for length in ("67108865", "9" * 5000):
                assert status(f"POST / HTTP/1.0\r\nContent-Length: {length}") == 413
            whole = store.read(0)
            cut = f"POST / HTTP/1.0\r\nContent-Length: {len(whole) + 1}"
            assert status(cut, whole) == 400, "a body that is cut"
            assert status("POST / HTTP/1.0") == 411
            assert status("GET /health HTTP/1.0") == 200 and status("GET / HTTP/1.0") == 404
            with socket.create_connection(place) as slow:
                slow.sendall(b"POST / HTTP/1.0\r\nContent-Length: 100000\r\n\r\nabc")
                assert post(store.read(0)), "it goes on after an error, and beside a slow client"
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=60) == 0 and "Traceback" not in server.stderr.read()
        finally:
            server.kill()


@pytest.mark.slow
def test_a_pacs_export_becomes_documents_by_the_wheel(tmp_path: Path) -> None:
    """Digits as images of patients: the wheel's commands run, patients are the unit throughout, and
    no header's text is in a store.
    """
    pytest.importorskip("pydicom", reason="DICOM needs the extra dicom (pydicom)")
    if not Path(sys.executable).with_name("uv").exists():
        pytest.skip("uv, which builds the wheel, is not in this environment")
    folder = shutil.copytree(EXAMPLES / "from_pacs", tmp_path / "from_pacs")
    site = from_pacs.wheel(tmp_path / "wheel")
    environment = os.environ | {
        "PYTHONPATH": str(site),
        "PYTHON": sys.executable,
        "NUM": "120",
        "OMP_NUM_THREADS": "1",
    }
    where = [sys.executable, "-c", "import dpvision; print(dpvision.__file__)"]
    place = subprocess.check_output(where, env=environment, cwd=folder, text=True)
    assert Path(place.strip()).is_relative_to(site)
    commands = "data import, data split, plan, adapt, evaluate --release, evaluate, report, verify"
    assert list(from_pacs.timed(folder, environment)) == [
        "write_export.py",
        *f"{commands}, export, predict".split(", "),
    ]
    unit = json.loads((folder / "runs/finder/statement.json").read_text())["scope"]["unit"]
    parts = json.loads((folder / "split.txt").read_text().split("\n", 1)[1])["parts"]
    assert unit["num_units"] == parts[str(folder / "stores/train")]["people"]
    assert sum(part["people"] for part in parts.values()) == 120
    found = {
        (r["variant"], r["case"], r["metric"]): r for r in from_pacs.figures(folder / "runs/finder")
    }
    tested = found["confidential", "all", "persons"]["value"]
    assert tested == parts[str(folder / "stores/test")]["people"]
    for attribute, values in {"sex": "FM", "scanner": "AB"}.items():
        groups = [("confidential", f"{attribute}={value}", "persons") for value in values]
        assert sum(found[group]["value"] for group in groups) == tested
    assert found["confidential", "all", "AUROC"]["value"] > 0.55
    persons = (folder / "confidential/new-persons.csv").read_text().splitlines()[1:]
    assert [line.split(",")[0] for line in persons] == [f"P{k:05}" for k in range(120, 130)]
    for path in (folder / "stores").rglob("*.tar"):
        assert b"1.2.826.0.1.3680043" not in path.read_bytes(), (
            "a header's identifier is in a shard"
        )


def _file(folder: Path, blob: bytes) -> Path:
    (folder / "image.png").write_bytes(blob)
    return folder / "image.png"


@pytest.mark.slow
def test_three_formats_predict_what_the_run_predicts(example) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is of an extra")
    done = example("export_everywhere")
    assert re.findall(r"^(\w+): 50 of 50 predictions equal", done.out, re.MULTILINE) == [
        "timm",
        "onnx",
        "safetensors",
    ]
    assert max(done.found(r"predictions equal, largest difference (\S+)")) < 1e-5


def test_the_server_without_a_run_prints_its_usage() -> None:
    command = [sys.executable, str(EXAMPLES / SCRIPTS["serve"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 1 and "python serve.py RUN [PORT]" in done.stderr
    assert "Traceback" not in done.stderr
