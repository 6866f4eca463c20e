"""A Ray cluster makes the store of one process, also after kills; a machine of it that sees other
files or has other software stops the curation.

Ray is no part of the extra dev: those that start it skip without it (CONTRIBUTING.md).
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from dpvision.curate import ray_engine
from dpvision.curate.passes import curate
from dpvision.data import import_work
from dpvision.data.import_labels import LabelRule
from dpvision.data.import_part import ReadRule
from dpvision.data.import_work import do_elsewhere, read_parts, software, work_folder
from dpvision.data.person_names import PersonRule
from dpvision.data.sources import open_source
from dpvision.data.store_writer import durable_key
from dpvision.errors import ConfigError, DataError

from .doubles import DOUBLES, KEY, content, write_tars

ROOT = Path(__file__).parents[2]
ray_is_there = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is in the extra curate")


@pytest.fixture(autouse=True)
def one_key(monkeypatch):
    """The same key and id for all stores of a test."""
    monkeypatch.setattr("dpvision.data.store_writer.secrets.token_bytes", lambda n: KEY)
    monkeypatch.setattr("dpvision.data.importer.secrets.token_hex", lambda n: "ab" * n)


@pytest.fixture
def on_path(monkeypatch):
    """Workers find this package of tests."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def children(pid: int) -> list[int]:
    """All processes below a process."""
    found, last = [], [pid]
    while last:
        lists = [path for one in last for path in Path(f"/proc/{one}/task").glob("*/children")]
        last = [int(word) for path in lists for word in path.read_text().split()]
        found += last
    return found


def workers_of(pid: int) -> list[int]:
    """Ray's workers below a process: those that do or await tasks."""
    found = []
    for one in children(pid):
        try:
            title = Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0")[0]
        except OSError:
            continue
        if title.startswith((b"ray::do_elsewhere", b"ray::IDLE")):
            found.append(one)
    return found


@ray_is_there
@pytest.mark.slow
def test_workers_that_are_killed_change_no_byte(tmp_path, on_path):
    source = write_tars(tmp_path / "src", 12, 60)
    oracle = content(curate(source, tmp_path / "one", DOUBLES, workers=1).path)
    killed, ended, rng = [], threading.Event(), random.Random(1)

    def kill():
        while not ended.wait(0.3 + rng.random()):
            if len(killed) < 6 and (found := workers_of(os.getpid())):
                killed.append(rng.choice(found))
                os.kill(killed[-1], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        made = curate(source, tmp_path / "store", DOUBLES, workers=2, engine="ray")
    finally:
        ended.set()
        thread.join()
    assert killed and content(made.path) == oracle
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "src", "store"]


@ray_is_there
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_either_engine_goes_on_from_a_killed_one(tmp_path, on_path, number):
    source = write_tars(tmp_path / "src", 12, 60)
    oracle = content(curate(source, tmp_path / "one", DOUBLES, workers=1).path)
    work, store = tmp_path / ".store.importing" / "confidential", tmp_path / "store"
    (tmp_path / "run.py").write_text(
        "import sys\nfrom unittest import mock\n"
        "from dpvision.curate.passes import curate\n"
        "from tests.curate.doubles import DOUBLES, KEY\n"
        "with mock.patch('dpvision.data.store_writer.secrets.token_bytes', lambda n: KEY):\n"
        "    curate(*sys.argv[1:], DOUBLES, workers=2, engine='ray')\n"
    )
    words = [sys.executable, "run.py", str(source), str(store)]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.DEVNULL) as driver:
        end = time.monotonic() + 300
        while len(list(work.glob("look-*/part.json"))) < 3 and time.monotonic() < end:
            assert driver.poll() is None
            time.sleep(0.01)
        below = children(driver.pid)
        driver.send_signal(number)
        driver.wait(120)
    assert list(work.glob("look-*/part.json")) and not store.exists()
    made = curate(source, store, DOUBLES, workers=1)
    assert content(made.path) == oracle
    end = time.monotonic() + 60
    while (left := [pid for pid in below if alive(pid)]) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == [], "the cluster of this machine ends with its driver"


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@ray_is_there
@pytest.mark.slow
def test_a_damaged_file_is_named_as_by_one_process(tmp_path, on_path):
    source = write_tars(tmp_path / "src", 4)
    whole = (source / "s2.tar").read_bytes()
    (source / "s2.tar").write_bytes(whole[: len(whole) // 2])
    said = []
    for engine in ("local", "ray"):
        with pytest.raises(DataError, match=r"s2\.tar.*files is kept") as error:
            curate(source, tmp_path / "store", DOUBLES, workers=1, engine=engine)
        said.append(str(error.value))
        assert type(error.value) is DataError
    assert said[0] == said[1]


@ray_is_there
@pytest.mark.slow
def test_an_address_where_no_cluster_answers_is_named(tmp_path, on_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1: .*RAY_ADDRESS.*--engine local"):
        curate(tmp_path, tmp_path / "store", DOUBLES, engine="ray")


def test_without_ray_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"Ray is not installed.*\[curate\].*--engine local"):
        curate(tmp_path, tmp_path / "store", DOUBLES, engine="ray")
    assert list(tmp_path.iterdir()) == []


def jobs_of(folder: Path) -> tuple[Path, list, ReadRule]:
    """A folder of an import, the jobs that ``read_parts`` sends elsewhere, and the rule."""
    source = write_tars(folder / "src", 2, 4)
    rule = ReadRule(b"", False, PersonRule(), LabelRule(), None, False, None)
    sent = []

    def spread(function, jobs):
        assert function is do_elsewhere
        for job in jobs:
            sent.append(job)
            yield function(job)

    settings = {"software": software(), "curation_software": {"pillow": software()["pillow"]}}
    with work_folder(folder / "s", settings) as work:
        rule = replace(rule, key=durable_key(work))
        parts = open_source(source).parts
        assert [
            part.about["seen"] for part in read_parts("read", parts, work, rule, 2, spread)
        ] == [
            4,
            4,
        ]
    return work, sent, rule


def test_jobs_that_leave_the_machine_have_no_key(tmp_path):
    _, sent, rule = jobs_of(tmp_path)
    assert len(sent) == 2 and {job.rule.key for job in sent} == {b""}
    assert rule.key.hex() not in repr(sent) and repr(rule.key) not in repr(sent)


def test_a_machine_with_another_folder_or_other_software_is_named(tmp_path, monkeypatch):
    work, (job, _), _ = jobs_of(tmp_path)
    inner, named = work / "confidential", rf"machine {import_work.socket.gethostname()}"
    with pytest.raises(DataError, match=rf"{named}.*does not find.*mount at the same path"):
        do_elsewhere(replace(job, folder=tmp_path / "elsewhere" / "confidential" / job.folder.name))
    with monkeypatch.context() as patch:
        patch.setattr(import_work, "version", lambda name: "0.1")
        with pytest.raises(DataError, match=rf"{named}.*other versions \(numpy 0\.1, .*Install"):
            do_elsewhere(job)
    other = bytes(reversed(KEY)).hex()
    (inner / "key").write_text(other)
    with pytest.raises(DataError, match=rf"{named}.*does not find the folder of this curation"):
        do_elsewhere(job)


def test_a_part_that_another_machine_wrote_may_be_seen_later(tmp_path, monkeypatch):
    _, (job, _), _ = jobs_of(tmp_path)
    about = job.folder / "part.json"
    written = about.read_text()
    about.unlink()
    threading.Timer(0.3, lambda: about.write_text(written)).start()
    import_work._wait_for(job, True)
    assert about.read_text() == written
    about.unlink()
    monkeypatch.setattr(import_work, "_SEEN_WITHIN_S", 0.2)
    with pytest.raises(DataError, match=r"not here, where another machine wrote it"):
        import_work._wait_for(job, True)


class _FakeRay:
    """Tasks end in any order; one of them may have lost its workers."""

    class exceptions:
        class RayError(Exception): ...

        class RayTaskError(RayError):
            cause: Exception

    def __init__(self, cores: int, rng: random.Random) -> None:
        self.cores, self.rng, self.most = cores, rng, 0
        self.cancelled: list[int] = []

    def remote(self, **options):
        assert options["num_cpus"] == 1 and options["max_retries"] > 1
        return lambda function: type("F", (), {"remote": staticmethod(lambda x: (x, function))})

    def cluster_resources(self):
        return {"CPU": self.cores}

    def wait(self, refs, num_returns, timeout):
        self.most = max(self.most, len(refs))
        return self.rng.sample(refs, num_returns), []

    def get(self, ref):
        item, function = ref
        if item == "lost":
            raise self.exceptions.RayError
        return function(item)

    def cancel(self, ref, force):
        self.cancelled.append(ref[0])


def test_results_come_in_the_order_of_the_files_with_few_tasks_at_once():
    fake = _FakeRay(3, random.Random(0))
    found = list(ray_engine._spread(fake, None, abs, list(range(-100, 0))))
    assert found == list(range(100, 0, -1)) and fake.most == 6
    fake = _FakeRay(3, random.Random(0))
    assert list(ray_engine._spread(fake, 2, abs, [-1, -2, -3])) == [1, 2, 3] and fake.most == 2
    stopped = ray_engine._spread(fake, 2, abs, list(range(-20, 0)))
    next(stopped)
    stopped.close()
    assert fake.cancelled, "what is running ends"
