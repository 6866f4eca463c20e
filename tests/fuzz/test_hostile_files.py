"""Some mutated files of every kind: each is read, counted or refused with one line, in its limits.
``benchmarks/hostile_files.py`` runs 10,000.
"""

import sys
from pathlib import Path

import pytest

for _name in ("onnx", "onnxruntime", "pydicom", "faster_coco_eval"):
    pytest.importorskip(_name, reason="the files of an extra are fuzzed too")
sys.path.insert(0, str(Path(__file__).parent))
from cases import make_case, prepare, run_cases  # noqa: E402
from image_targets import SHARED  # noqa: E402
from targets import NEED_DATA, SLOW, TARGETS  # noqa: E402


def _bad(names: list[str], cases: int, work: Path) -> list[dict]:
    found = list(run_cases([(name, k) for name in names for k in range(cases)], work))
    assert {r["target"] for r in found} == set(names)
    return [r for r in found if r["outcome"] == "FAILED" or r["case"] < 0]


def test_each_mutated_file_is_read_counted_or_refused(tmp_path):
    without = () if SHARED.is_dir() else NEED_DATA
    assert _bad([name for name in TARGETS if name not in (*SLOW, *without)], 20, tmp_path) == []


@pytest.mark.slow
def test_so_is_each_file_that_takes_long_to_open(tmp_path):
    assert _bad(sorted(SLOW), 20, tmp_path) == []


FAULTS = {
    "os.kill(os.getpid(), 11)": "status -11",
    "time.sleep(9)": "expected 1",
    "bytearray(b'x' * (300 << 20))": "expected 100",
    "open(folder / '..' / 'x', 'w')": "write",
    "open('/etc/passwd')": "read /etc/passwd",
    "pickle.loads(planted(folder / 'EXECUTED'))": "a pickle was executed",
    "[][1]": "IndexError",
    "raise_('x' * 9000)": None,
}
"""What a reader does, and what is said of it; None: nothing, the message is shortened."""


def test_faults_of_a_reader_are_found_and_attributed_to_their_case(tmp_path):
    script = tmp_path / "faulty.py"
    script.write_text(f"""
import os, pickle, sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
import cases, image_targets, targets
from mutators import planted

def raise_(text):
    raise cases.REFUSALS[0](text)

def read(folder, rng):
    if number >= 0:
        exec({list(FAULTS)!r}[number], globals() | {{"folder": folder}})
    return "read"

def run_case(name, k, *rest, run=cases.run_case):
    global number
    number = k
    return run(name, k, *rest)

targets.TARGETS["PNG"] = targets.Target(9, image_targets._png, read, seconds=1, memory_mb=100)
cases.run_case = run_case
cases._child(Path(sys.argv[1]))
""")
    jobs = [("PNG", k) for k in range(len(FAULTS))]
    found = list(run_cases(jobs, tmp_path / "work", script))
    assert [r["case"] for r in found] == [k for _, k in jobs]
    for result, said in zip(found, FAULTS.values(), strict=True):
        assert result["outcome"] == ("refused" if said is None else "FAILED")
        assert said is None or said in result["note"]


def test_a_case_is_the_same_whenever_it_is_made(tmp_path):
    prepare(tmp_path)
    made = [
        {p.name: p.read_bytes() for p in make_case("PNG", k, tmp_path)[0].iterdir()}
        for k in (7, 8, 7)
    ]
    assert made[0] == made[2] != made[1]
