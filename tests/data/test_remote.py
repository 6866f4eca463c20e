"""Sources that fsspec opens give the store of the same files on a disk, and what fails costs no
other file.
"""

import contextlib
import http.server
import json
import os
import signal
import sys
import threading
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from dpvision.cli import main
from dpvision.data import import_work
from dpvision.data.captions import CaptionRule
from dpvision.data.import_labels import LabelRule
from dpvision.data.importer import import_source
from dpvision.data.merge import merge_stores
from dpvision.data.person_names import PersonRule
from dpvision.data.tarindex import scan
from dpvision.errors import DataError

from .image_files import js, png, write_tar

KEY = bytes(range(32))
LABELS = LabelRule(classes=("a", "b"))


@pytest.fixture(autouse=True)
def one_key(monkeypatch):
    """The same key and id for all stores of a test."""
    monkeypatch.setattr("dpvision.data.store_writer.secrets.token_bytes", lambda n: KEY)
    monkeypatch.setattr("dpvision.data.importer.secrets.token_hex", lambda n: "ab" * n)


@pytest.fixture
def memory():
    """An empty file system at memory://."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def content(store: Path) -> dict[str, bytes]:
    return {
        path.relative_to(store).as_posix(): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file() and path.name != "ledger_marks.json"
    }


def write_files(folder: Path, kind: str, num: int = 3) -> Path:
    """Files with persons, labels, repeats and a damaged image each."""
    folder.mkdir()
    for t in range(num):
        rows = [(png(5 * t + i, 8, 8), f"p{(5 * t + i) % 7}", "ab"[i % 2]) for i in range(6)]
        rows.append((png(900 + t)[:60], "p0", "a"))
        if kind == "tar":
            members = {}
            for i, (data, who, label) in enumerate(rows):
                members |= {f"{i}.png": data, f"{i}.json": js(who=who, label=label, text=f"c{t}")}
            write_tar(folder / f"s{t}.tar", members)
        else:
            image, who, label = zip(*rows, strict=True)
            table = {"image": image, "who": who, "label": label, "text": [f"c{t}"] * len(rows)}
            pq.write_table(pa.table(table), folder / f"s{t}.parquet")
    return folder


def upload(system, folder: Path, to: str = "/src") -> None:
    for path in folder.iterdir():
        system.pipe(f"{to}/{path.name}", path.read_bytes())


def url_of(protocol: str, folder: Path, memory) -> str:
    if protocol == "file":
        return f"file://{folder}"
    upload(memory, folder)
    return "memory://src"


@pytest.mark.parametrize("protocol", ["memory", "file"])
@pytest.mark.parametrize("kind", ["tar", "parquet"])
@pytest.mark.parametrize("persons", [False, True])
def test_a_store_from_a_url_has_the_records_of_one_from_a_disk(
    tmp_path, memory, protocol, kind, persons
):
    folder = write_files(tmp_path / "src", kind)
    options = {"labels": LABELS, "workers": 1}
    if persons:
        options["people"] = PersonRule("who", shared_images="first")
    local = import_source(folder, tmp_path / "local", **options)
    url = url_of(protocol, folder, memory)
    made = import_source(url, tmp_path / "made", **options)
    one, other = content(local.path), content(made.path)
    if kind == "parquet":
        assert one == other
    for name in ("records.jsonl", "confidential/left_out.jsonl", "confidential/import.json"):
        assert one[name] == other[name]
    for name in ("id", "unit", "label"):
        assert (local.index[name] == made.index[name]).all()
    rows = range(made.num_records)
    assert [made.read(row) for row in rows] == [local.read(row) for row in rows]
    assert not any(Path(shard["path"]).is_absolute() for shard in made.meta["shards"])
    assert {path.name for path in tmp_path.iterdir()} == {"src", "local", "made"}


@pytest.mark.parametrize(
    ("pattern", "num"), [("", 16), ("/", 16), ("/*", 16), ("/s*.tar", 16), ("/s1.tar", 6)]
)
def test_files_are_found_by_folder_pattern_and_name(tmp_path, memory, pattern, num):
    upload(memory, write_files(tmp_path / "src", "tar"))
    memory.pipe("/src/.hidden/x.tar", b"")
    made = import_source(f"memory://src{pattern}", tmp_path / "s", labels=LABELS)
    assert made.num_records == num


def test_the_command_takes_a_url(tmp_path, memory, capsys):
    upload(memory, write_files(tmp_path / "src", "parquet"))
    (tmp_path / "classes").write_text("a\nb\n")
    classes = ("--classes", str(tmp_path / "classes"))
    assert not main(["data", "import", "memory://src", str(tmp_path / "s"), *classes, "--json"])
    assert json.loads(capsys.readouterr().out)["num_records"] == 16


def test_a_single_file_is_kept_if_the_import_fails_later(tmp_path, memory, monkeypatch):
    upload(memory, write_files(tmp_path / "src", "tar", 1))

    def full(*args, **more):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dpvision.data.importer.write_store", full)
        with pytest.raises(DataError, match="No space left on device"):
            import_source("memory://src/s0.tar", tmp_path / "s", labels=LABELS)
    monkeypatch.setattr(import_work, "_do", lambda job: pytest.fail("read again"))
    made = import_source("memory://src/s0.tar", tmp_path / "s", labels=LABELS)
    assert made.num_records == 6


def read_of(monkeypatch) -> list[str]:
    read, real = list[str](), import_work._do
    monkeypatch.setattr(
        import_work, "_do", lambda job: read.append(Path(job.part.name).name) or real(job)
    )
    return read


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_a_file_that_changed_between_crash_and_resume_is_read_again(
    tmp_path, memory, monkeypatch, protocol
):
    folder = write_files(tmp_path / "src", "tar")

    def write(name: str, data: bytes) -> None:
        (folder / name).write_bytes(data)
        memory.pipe(f"/src/{name}", data)

    first, last = ((folder / name).read_bytes() for name in ("s0.tar", "s2.tar"))
    url = url_of(protocol, folder, memory)
    write("s2.tar", last[:1000])
    with pytest.raises(DataError, match=r"s2\.tar: ends inside a member.*2 files is kept") as said:
        import_source(url, tmp_path / "s", labels=LABELS, workers=1)
    assert f"tar: {protocol}:/" in str(said.value), "the file is named, not its copy"
    write("s2.tar", last)
    write("s0.tar", first.replace(b"c0", b"c9"))
    read = read_of(monkeypatch)
    made = import_source(url, tmp_path / "s", labels=LABELS, workers=1)
    assert read == ["s0.tar", "s2.tar"]
    assert (made.num_records, made.captions(0)) == (16, ("c9",))


def test_a_file_that_changes_during_the_import_stops_it(tmp_path, memory):
    upload(memory, write_files(tmp_path / "src", "tar"))
    touched = []

    def touch(num):
        if not touched:
            touched.append(memory.pipe("/src/s0.tar", memory.cat("/src/s0.tar")))

    with pytest.raises(DataError, match=r"memory:/.*s0\.tar: changed while it was read"):
        import_source("memory://src", tmp_path / "s", labels=LABELS, progress=touch)
    assert not (tmp_path / "s").exists()


def test_a_killed_import_from_a_url_goes_on(tmp_path, monkeypatch):
    folder = write_files(tmp_path / "src", "tar", 4)
    url, store = f"file://{folder}", tmp_path / "s"
    oracle = content(import_source(url, tmp_path / "one", labels=LABELS).path)
    real = import_work._do
    if not (pid := os.fork()):
        try:
            num = [0]

            def do(job):
                num[0] += 1
                if num[0] == 3:
                    LocalFileSystem.get_file = lambda self, one, other, **more: (
                        Path(other).write_bytes(Path(one).read_bytes()[:700]),
                        os.kill(os.getpid(), signal.SIGKILL),
                    )
                return real(job)

            monkeypatch.setattr(import_work, "_do", do)
            import_source(url, store, labels=LABELS, workers=1)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert import_work.complete(tmp_path / ".s.importing") == 2
    read = read_of(monkeypatch)
    assert content(import_source(url, store, labels=LABELS, workers=1).path) == oracle
    assert read == ["s2.tar", "s3.tar"]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_processes_read_urls_and_change_no_byte(tmp_path, memory, monkeypatch):
    monkeypatch.setattr(import_work, "_WORTH_PROCESSES_BYTES", 0)
    folder = write_files(tmp_path / "src", "tar")
    stores = [
        import_source(f"file://{folder}", tmp_path / f"s{n}", labels=LABELS, workers=n).path
        for n in (1, 2)
    ]
    upload(memory, folder)  # which other processes cannot see
    stores.append(import_source("memory://src", tmp_path / "m", labels=LABELS, workers=2).path)
    assert content(stores[0]) == content(stores[1]) == content(stores[2])


# --- what is refused
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://bucket/a.tar", r"s3://bucket/a\.tar: Install s3fs.*Install it with pip"),
        ("nothing://a.tar", "Protocol not known: nothing.*URL that fsspec opens"),
        ("memory://none/a.tar", "no such file, or no answer"),
        ("memory://none", "no such file"),
        ("memory://empty/*.tar", "no such files; expected .tar files"),
        ("memory://mixed", r"\.parquet and \.tar; expected"),
        ("memory://images", "image files; expected .tar files"),
        ("memory://splits", "files of several splits.*'memory://splits.*train.*tar'"),
    ],
)
def test_what_is_no_source_is_refused_with_the_remedy(tmp_path, memory, monkeypatch, url, said):
    for name in ("mixed/a.tar", "mixed/b.parquet", "images/a.png", "splits/x-train-0.tar"):
        memory.pipe(f"/{name}", b"1")
    memory.pipe("/splits/x-test-0.tar", b"1")
    memory.pipe("/empty/readme", b"1")
    if url.startswith("s3"):
        monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(DataError, match=said):
        import_source(url, tmp_path / "s")
    assert not list(tmp_path.iterdir())


def test_a_store_is_not_written_to_a_url(tmp_path, memory, capsys):
    upload(memory, write_files(tmp_path / "src", "tar"))
    with pytest.raises(DataError, match="mounted disk, because runs read records one by one"):
        import_source("memory://src", "s3://bucket/store")
    with pytest.raises(DataError, match="data merge: store=s3:/bucket/store; expected a folder"):
        merge_stores([], Path("s3://bucket/store"))
    assert main(["data", "import", "memory://src", "s3://bucket/store"]) == 2
    assert "store=s3:/bucket/store" in capsys.readouterr().err
    with pytest.raises(DataError, match="lies inside the source"):
        import_source(f"file://{tmp_path}", tmp_path / "s")
    (tmp_path / "c.tsv").write_text("s0\tx\n")
    with pytest.raises(DataError, match="expected captions in the files"):
        import_source("memory://src", tmp_path / "s", captions=CaptionRule(tmp_path / "c.tsv"))


class NoCredentialsError(Exception):
    """As botocore's, which is no OSError."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError("Access Denied"), "Access Denied; expected to be allowed.*credentials"),
        (NoCredentialsError("Unable to locate"), "NoCredentialsError: Unable to locate.*then run"),
        (OSError(28, "No space left on device"), "No space left on device.*Free some"),
        (TimeoutError(), "TimeoutError; expected to read it. Check the network"),
    ],
)
def test_a_refusal_in_the_middle_keeps_what_was_read(tmp_path, memory, monkeypatch, error, said):
    upload(memory, write_files(tmp_path / "src", "tar"))
    real = MemoryFileSystem.get_file

    def get_file(system, path, *args, **more):
        if path.endswith("s1.tar"):
            raise error
        return real(system, path, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", get_file)
        with pytest.raises(DataError, match=rf"{said}.*1 files is kept"):
            import_source("memory://src", tmp_path / "s", labels=LABELS, workers=1)
    read = read_of(monkeypatch)
    assert import_source("memory://src", tmp_path / "s", labels=LABELS, workers=1).num_records
    assert read == ["s1.tar", "s2.tar"]


@contextlib.contextmanager
def serving(answer):
    """Serve what ``answer(method, path)`` returns: status, headers, and the bytes to a GET."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self):
            status, headers, data = answer(self.command, self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            with contextlib.suppress(ConnectionError):  # of a client that went
                self.end_headers()
                if self.command == "GET":
                    self.close_connection = True
                    self.wfile.write(data)

        do_HEAD = do_GET = answer

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


def server(folder: Path, broken: dict[str, int]):
    """Serve a folder; of files in ``broken`` only so many bytes, or none with status 403."""

    def answer(method, path):
        file = folder / Path(path.partition("?")[0]).name
        if not file.is_file() or broken.get(file.name) == 403:
            return (403 if file.is_file() else 404), {}, b""
        data, tag = file.read_bytes(), f'"{file.stat().st_mtime_ns}"'
        headers = {"Content-Length": str(len(data)), "ETag": tag}
        return 200, headers, data[: broken.get(file.name, len(data))]

    return serving(answer)


@pytest.mark.parametrize("broken", [5000, 403, None])
def test_a_tar_of_a_server(tmp_path, broken):
    pytest.importorskip("aiohttp")
    folder = write_files(tmp_path / "src", "tar", 1)
    broken_files = {} if broken is None else {"s0.tar": broken}
    with server(folder, broken_files) as url:
        if broken is not None:
            with pytest.raises(DataError, match=r"source: http://127\.0\.0\.1:\d+/s0\.tar: "):
                import_source(f"{url}/s0.tar?sign=1", tmp_path / "s", labels=LABELS)
            assert not list(tmp_path.glob(".*")) and not (tmp_path / "s").exists()
            broken_files.clear()
        made = import_source(f"{url}/s0.tar?sign=1", tmp_path / "s", labels=LABELS)
    assert made.num_records == 6
    where = (made.path / "confidential" / "left_out.jsonl").read_text()
    assert json.loads(where) == {"key": "6", "reason": "damaged", "tar": "s0.tar"}


HTML = {"Content-Type": "text/html"}


def page(*links: str) -> bytes:
    return "".join(f'<a href="{link}">file</a>' for link in links).encode()


@pytest.mark.parametrize("ends", ["at a member", "within a header", "whole"])
def test_a_tar_of_unstated_size_that_ends_early_is_refused(tmp_path, ends):
    pytest.importorskip("aiohttp")
    data = (write_files(tmp_path / "src", "tar", 1) / "s0.tar").read_bytes()
    cut = scan(tmp_path / "src" / "s0.tar")[5].offset - 512
    kept = {"at a member": data[:cut], "within a header": data[: cut + 100], "whole": data}[ends]
    with serving(lambda method, path: (200, {}, kept)) as url:
        if ends == "whole":
            assert import_source(f"{url}/a.tar", tmp_path / "s", labels=LABELS).num_records == 6
            return
        with pytest.raises(DataError, match=rf"{url}/a\.tar: ends .*run the same command"):
            import_source(f"{url}/a.tar", tmp_path / "s", labels=LABELS)
    assert not list(tmp_path.glob("*s*.importing")) and not (tmp_path / "s").exists()


@pytest.mark.parametrize("refused", ["HEAD", "GET"])
def test_no_password_and_no_signature_is_in_a_message_or_a_file(tmp_path, capsys, refused):
    pytest.importorskip("aiohttp")
    data = (write_files(tmp_path / "src", "tar", 1) / "s0.tar").read_bytes()

    def answer(method, path):
        name = path.partition("?")[0][1:]
        if name == "":
            return 200, HTML, page("a.tar?X-Sig=SECRET", "b.tar?X-Sig=SECRET")
        if name in ("a.tar", "b.tar"):
            return 302, {"Location": f"/signed/{name}?X-Sig=SECRET"}, b""
        if name == "signed/b.tar" and method in (refused, "GET"):
            return 403, {}, b""
        return 200, {"Content-Length": str(len(data))}, data

    with serving(answer) as url:
        host = url.removeprefix("http://")
        for at in (
            f"{url}/b.tar",
            f"{url}/b.tar?X-Sig=SECRET",
            f"http://user:SECRET@{host}/b.tar",
            f"http://user: SECRET SECRET@{host}/b.tar",
            f"http://SECRET@{host}/",
        ):
            with pytest.raises(DataError, match=rf"source: http://{host}/b\.tar: ") as error:
                import_source(at, tmp_path / "s", labels=LABELS, workers=1)
            assert "SECRET" not in str(error.value)
            assert main(["data", "import", at, str(tmp_path / "s"), "--public"]) == 2
            said = capsys.readouterr()
            assert "SECRET" not in said.out + said.err
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert (len(written) > 1) == (refused == "GET"), "of the first file of the folder"
    assert not any(b"SECRET" in path.read_bytes() or "SECRET" in str(path) for path in written)


@pytest.mark.parametrize(
    ("links", "said"),
    [
        (("a.tar", "b.tar"), None),
        (("a.tar", "a.tar#top", "b.tar", "?C=N", "?C=M", "../", "/", "/plain/c.tar"), None),
        (("get.tar?id=1", "get.tar?id=2"), "two addresses of .*get.tar; .* by itself"),
        (("a.tar", "../plain/b.tar"), r"in/\.\./plain/b\.tar, outside .*'URL/in/\*\.tar'"),
        (("a.tar", "%2e%2e/plain/b.tar"), "outside of the folder"),
    ],
)
def test_a_page_lists_each_file_once_and_only_those_of_its_folder(tmp_path, links, said):
    pytest.importorskip("aiohttp")
    write_files(tmp_path / "src", "tar", 2)
    files = [path.read_bytes() for path in sorted((tmp_path / "src").iterdir())]
    asked = []

    def answer(method, path):
        asked.append(path)
        if path in ("/in", "/in/"):
            return 200, HTML, page(*links)
        if ".tar" not in path:
            return 404, {}, b""
        data = files["b.tar" in path or "id=2" in path]
        return 200, {"Content-Length": str(len(data))}, data

    with serving(answer) as url:
        if said is None:
            made = import_source(f"{url}/in/", tmp_path / "s", labels=LABELS, workers=1)
            assert made.num_records == 11
        else:
            with pytest.raises(DataError, match=said.replace("URL", url)):
                import_source(f"{url}/in/", tmp_path / "s", labels=LABELS, workers=1)
        assert not any("plain" in path for path in asked)
        if "outside" in (said or ""):
            made = import_source(f"{url}/in/*.tar", tmp_path / "s", labels=LABELS)
            assert made.num_records == 6, "which the remedy names"


@pytest.mark.parametrize(
    ("stated", "came", "changed"),
    [
        ({"ETag": '"1"'}, {"ETag": '"2"'}, "ETag"),
        ({"ETag": '"1"', "Last-Modified": "x"}, {"ETag": 'W/"1"', "Last-Modified": "y"}, None),
        ({"Last-Modified": "x"}, {"ETag": '"2"', "Last-Modified": "y"}, "Last-Modified"),
        ({"ETag": '"1"'}, {}, None),
    ],
)
def test_the_version_that_is_read_is_the_stated_one(tmp_path, stated, came, changed):
    pytest.importorskip("aiohttp")
    data = (write_files(tmp_path / "src", "tar", 1) / "s0.tar").read_bytes()

    def answer(method, path):
        headers = stated if method == "HEAD" else came
        return 200, {"Content-Length": str(len(data)), **headers}, data

    with serving(answer) as url:
        if changed is None:
            assert import_source(f"{url}/a.tar", tmp_path / "s", labels=LABELS).num_records == 6
            return
        with pytest.raises(DataError, match=rf"{url}/a\.tar: {changed} .* came; expected .*again"):
            import_source(f"{url}/a.tar", tmp_path / "s", labels=LABELS)
    assert not (tmp_path / "s").exists()


@pytest.fixture
def http_anew():
    """No file system of a former test, whose session has its timeouts."""
    system = pytest.importorskip("fsspec.implementations.http").HTTPFileSystem
    system.clear_instance_cache()
    yield
    system.clear_instance_cache()


def test_a_file_may_take_longer_than_a_client_allows_by_default(tmp_path, monkeypatch, http_anew):
    client = pytest.importorskip("aiohttp.client")
    data = (write_files(tmp_path / "src", "tar", 1) / "s0.tar").read_bytes()
    monkeypatch.setattr(client, "DEFAULT_TIMEOUT", client.ClientTimeout(total=0.2))  # 300 s

    def answer(method, path):
        if method == "GET":
            threading.Event().wait(0.3)
        return 200, {"Content-Length": str(len(data))}, data

    with serving(answer) as url:
        made = import_source(f"{url}/a.tar", tmp_path / "s", labels=LABELS)
    assert made.num_records == 6


def test_a_server_that_falls_silent_is_left(tmp_path, monkeypatch, http_anew):
    monkeypatch.setattr("dpvision.data.remote._SILENCE_S", 0.1)
    ended = threading.Event()

    def answer(method, path):
        if method == "GET":
            ended.wait(60)
        return 200, {"Content-Length": "5"}, b"12345"

    with serving(answer) as url:
        with pytest.raises(DataError, match=rf"{url}/a\.tar: .*Timeout.*again"):
            import_source(f"{url}/a.tar", tmp_path / "s", labels=LABELS)
        ended.set()


def test_a_file_whose_name_no_disk_holds_is_refused(tmp_path, memory):
    memory.pipe(f"/src/{'n' * 252}.tar", b"1")
    with pytest.raises(DataError, match="tar: a name of 256 bytes; expected at most 255"):
        import_source("memory://src", tmp_path / "s", labels=LABELS)


def test_a_store_may_be_beside_the_files_of_a_pattern(tmp_path):
    write_files(tmp_path / "src", "tar")
    for pattern in ("src/*/*.tar", "**/s*.tar"):
        with pytest.raises(DataError, match="lies inside the source"):
            import_source(f"file://{tmp_path}/{pattern}", tmp_path / "src" / "s")
    made = import_source(f"file://{tmp_path}/src/*.tar", tmp_path / "src" / "s", labels=LABELS)
    assert made.num_records == 16


def test_a_folder_with_the_name_of_a_tar_is_a_folder(tmp_path):
    (tmp_path / "src").mkdir()
    folder = write_files(tmp_path / "src" / "d.tar", "tar")
    made = import_source(f"file://{folder}", tmp_path / "s", labels=LABELS)
    assert made.num_records == 16
    with pytest.raises(DataError, match=r"d\.tar: a folder; .* in quotes: '.*/d\.tar/\*'"):
        import_source(f"file://{tmp_path}/src/*.tar", tmp_path / "t", labels=LABELS)
    made = import_source(f"file://{folder}/*", tmp_path / "t", labels=LABELS)
    assert made.num_records == 16
