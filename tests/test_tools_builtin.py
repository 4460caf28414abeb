"""The built-in tools on files, and the sandbox that they stay in."""

import os
import random
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.agent import sandbox
from ds4.agent import search as searching
from ds4.agent.builtin import builtin_tools
from ds4.agent.sandbox import Root
from ds4.agent.tools import CANCELLED, Result, Toolbox
from ds4.chat_formats.base import ToolCall
from ds4.errors import ArgumentError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder beside which a secret lies."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret\n")
    folder = tmp_path / "root"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "file").write_text("inside\n")
    return folder


class Tools:
    """The tools of a folder, called by name as a model calls them."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.box = Toolbox(builtin_tools(root, write=True, **options))

    def __call__(self, name: str, **arguments: Any) -> str:
        """The text of a call that must succeed."""
        result = self.result(name, **arguments)
        assert not result.failed, result.text
        return result.text

    def error(self, name: str, **arguments: Any) -> str:
        """The text of a call that must fail, as a sentence of ours."""
        result = self.result(name, **arguments)
        assert result.failed, result.text
        assert "Error:" not in result.text, result.text
        return result.text

    def result(self, name: str, **arguments: Any) -> Result:
        return self.box.call(ToolCall(name, arguments))


# -- the sandbox


def test_paths_that_stay_inside(root: Path) -> None:
    (root / "link").symlink_to("sub/file")
    (root / "absolute").symlink_to(root / "sub")
    (root / "sub" / "up").symlink_to("..")
    (root.parent / "alias").symlink_to(root)
    for path in (
        "sub/file",
        "./sub//file",
        "sub/../sub/file",
        "link",
        "absolute/file",
        "sub/up/sub/up/link",
        str(root / "sub/file"),
    ):
        assert Root(root).resolve(path) == str(root / "sub/file")
    assert Root(root).resolve(".") == Root(root).resolve("sub/..") == Root(root).resolve(str(root)) == str(root)
    alias = Root(root.parent / "alias")
    assert (
        alias.resolve(str(root.parent / "alias/sub/file"))
        == alias.resolve(str(root / "sub/file"))
        == str(root / "sub/file")
    )


@pytest.mark.parametrize(
    "path",
    [
        "..",
        "../outside/secret",
        "sub/../../outside/secret",
        "../root/sub/file",
        "/etc/passwd",
        "/",
        "/proc/self/root/etc/passwd",
        "/proc/self/cwd",
        "{root}/../outside/secret",
        "{root}x",
        "to_secret",
        "to_folder/secret",
        "to_root",
        "chain",
        "proc/root/etc/passwd",
        "proc/cwd",
        "sub/climb",
        "loop",
        "",
        "sub/file\0.txt",
        "\ud800",
        "sub/file/",
        "sub/file/..",
        "missing",
        "missing/../sub/file",
        "x" * 300,
        "a/" * 5000,
    ],
)
@pytest.mark.parametrize("name", ["read", "list", "search", "write", "edit"])
def test_paths_that_do_not(root: Path, path: str, name: str) -> None:
    (root / "to_secret").symlink_to("../outside/secret")
    (root / "to_folder").symlink_to(root.parent / "outside")
    (root / "to_root").symlink_to("/")
    (root / "chain").symlink_to("sub/next")
    (root / "sub" / "next").symlink_to("../to_secret")
    (root / "proc").symlink_to("/proc/self")
    (root / "sub" / "climb").symlink_to("../" * 30 + "etc/passwd")
    (root / "loop").symlink_to("loop")
    if name == "write" and path in ("missing", "a/" * 5000):
        pytest.skip("may be made, or is too deep anyway")
    arguments = {"search": {"pattern": "."}, "write": {"text": "x"}, "edit": {"old": "secret", "new": "x"}}
    text = Tools(root).error(name, path=path.replace("{root}", str(root)), **arguments.get(name, {}))
    assert "secret\n" not in text
    assert (root.parent / "outside" / "secret").read_text() == "secret\n"
    assert sorted(os.listdir(root.parent)) == ["outside", "root"] and os.listdir(root.parent / "outside") == ["secret"]


NAMES = ["a", "b", "c", "..", ".", "", "/"]


@given(st.integers(0, 1 << 32), st.lists(st.sampled_from(NAMES), max_size=8))
def test_what_is_resolved_is_what_the_system_finds_and_inside(
    tmp_path_factory: pytest.TempPathFactory, seed: int, names: list[str]
) -> None:
    base = tmp_path_factory.mktemp("walk")
    root = base / "r"
    root.mkdir()
    rng = random.Random(seed)
    folders = [root]
    for _ in range(8):
        place = rng.choice(folders) / rng.choice("abc")
        if os.path.lexists(place):
            continue
        kind = rng.randrange(3)
        if kind == 0:
            place.mkdir()
            folders.append(place)
        elif kind == 1:
            place.write_text("x")
        else:
            place.symlink_to("/".join(rng.choices([*NAMES[:4], str(root), str(base)], k=rng.randrange(1, 4))))
    path = "/".join(names)
    try:
        found = Root(root).resolve(path)
    except ArgumentError:
        return
    assert found == os.path.realpath(os.path.join(root, path)) and (found + "/").startswith(f"{root}/")


def test_pipes_sockets_and_devices_are_refused_without_waiting(root: Path) -> None:
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as one:
        here = os.getcwd()
        os.chdir(root)  # a socket's path is short
        try:
            one.bind("socket")
        finally:
            os.chdir(here)
        tools = Tools(root)
        for name, arguments in (
            ("read", {}),
            ("write", {"text": "x"}),
            ("edit", {"old": "a", "new": "b"}),
            ("search", {"pattern": "."}),
        ):
            assert "is a named pipe" in tools.error(name, path="pipe", **arguments)
            assert "is a socket" in tools.error(name, path="socket", **arguments)
            assert name == "search" or "is a folder" in tools.error(name, path="sub", **arguments)
        assert "pipe (a named pipe)" in tools("list")
        assert tools("search", pattern="inside") == "sub/file:1: inside"  # passes them by
    with pytest.raises(ArgumentError, match="a device"):
        Root("/dev").open("null")


@pytest.mark.parametrize("victim", ["sub", "sub/file"])
@pytest.mark.parametrize("name", ["read", "list", "search", "write", "edit"])
def test_a_link_that_is_put_in_after_the_look_does_not_win(
    root: Path, monkeypatch: pytest.MonkeyPatch, victim: str, name: str
) -> None:
    """The moment between looking at a name and opening it is where a race would be won: the name becomes a link then."""
    look = sandbox._look
    (root.parent / "outside" / "file").write_text("secret\n")
    swapped = []

    def and_swap(one: str, folder: int, path: str) -> os.stat_result | None:
        info = look(one, folder, path)
        if one == os.path.basename(victim) and not swapped:
            swapped.append(one)
            os.rename(root / victim, root / "away")
            os.symlink(root.parent / "outside" / ("file" if victim.endswith("file") else ""), root / victim)
        return info

    monkeypatch.setattr(sandbox, "_look", and_swap)
    arguments = {"search": {"pattern": "."}, "write": {"text": "x"}, "edit": {"old": "secret", "new": "x"}}
    result = Tools(root).result(name, path="sub/file" if name != "list" else "sub", **arguments.get(name, {}))
    assert "secret" not in result.text
    assert swapped or name == "list"
    assert (root.parent / "outside" / "file").read_text() == "secret\n"
    if victim == "sub":
        assert result.failed


def test_a_race_of_threads_is_not_won(root: Path) -> None:
    (root.parent / "outside" / "file").write_text("secret\n")
    (root / "real").mkdir()
    (root / "real" / "file").write_text("inside\n")
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            for target in ("real", "../outside"):
                os.symlink(target, root / "next")
                os.replace(root / "next", root / "link")

    os.symlink("real", root / "link")
    thread = threading.Thread(target=swap)
    thread.start()
    try:
        tools = Tools(root)
        seen = {tools.result("read", path="link/file").text.splitlines()[-1] for _ in range(500)}
    finally:
        over.set()
        thread.join()
    assert not any("secret" in text for text in seen) and "1\tinside" in seen


def test_descriptors_are_given_back(root: Path) -> None:
    tools = Tools(root)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for path in ("sub/file", "sub/../sub", "..", "missing/x", "sub"):
        for name in ("read", "list"):
            tools.result(name, path=path)
        tools.result("edit", path=path, old="a", new="b")
    assert not before or len(os.listdir("/proc/self/fd")) == before


def test_a_root_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(ArgumentError, match="is no folder"):
            builtin_tools(path)
    with pytest.raises(ArgumentError, match="max_bytes"):
        builtin_tools(tmp_path, max_bytes=10)


# -- read and more


def test_read_says_where_it_is_and_how_to_go_on(root: Path) -> None:
    (root / "ten").write_text("".join(f"line {i}\n" for i in range(1, 11)))
    tools = Tools(root)
    assert tools("read", path="ten", start=3, lines=2) == (
        "ten lines 3-4 of 10\n3\tline 3\n4\tline 4\n(goes on to line 10: call more, or read with start=5)"
    )
    assert tools("more").startswith("ten lines 5-6 of 10\n5\tline 5\n")
    assert tools("read", path="./sub/../ten", start=9) == "ten lines 9-10 of 10\n9\tline 9\n10\tline 10"
    assert tools("more") == "ten was read to its end, 10 lines."
    assert "ten has 10 lines" in tools.error("read", path="ten", start=11)
    assert "count from 1" in tools.error("read", path="ten", start=0)


def test_more_needs_a_read_and_sees_that_the_file_changed(root: Path) -> None:
    tools = Tools(root, max_lines=2)
    assert "call read" in tools.error("more")
    (root / "f").write_text("a\nb\nc\nd\ne\n")
    tools("read", path="f")
    (root / "f").write_text("a\nb\nC\nD\n")
    assert tools("more") == "f lines 3-4 of 4 (the file has changed since the last part)\n3\tC\n4\tD"
    (root / "f").unlink()
    assert "f does not exist" in tools.error("more")


def test_every_line_comes_once_whatever_the_limits(root: Path) -> None:
    rng = random.Random(5)
    lines = [chr(rng.choice([65, 0xE9, 0x4E2D, 0x1F600])) * rng.randrange(60) for _ in range(500)]
    (root / "f").write_text("\n".join(lines), encoding="utf-8")
    for max_lines, max_bytes in ((1, 1000), (7, 256), (1000, 300), (1000, 100_000)):
        tools = Tools(root, max_lines=max_lines, max_bytes=max_bytes)
        text, got = tools("read", path="f"), []
        while "was read to its end" not in text:
            body = [line.partition("\t") for line in text.splitlines() if "\t" in line]
            got += [(int(number), line) for number, _, line in body]
            assert len(body) <= max_lines and sum(len("".join(b).encode()) for b in body) <= max_bytes
            text = tools("more")
        assert got == list(enumerate(lines, 1))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "f is empty."),
        (b"\n", "f lines 1-1 of 1\n1\t"),
        (b"a", "f lines 1-1 of 1\n1\ta"),
        (b"a\r\nb\r\n", "f lines 1-2 of 2\n1\ta\n2\tb"),
        (b"\xef\xbb\xbfa\n", "f lines 1-1 of 1\n1\ta"),
        ("é 中 \U0001f600".encode(), "f lines 1-1 of 1\n1\té 中 \U0001f600"),
        (b"a\xff\xfeb\xc3\n", "f lines 1-1 of 1 (\ufffd stands for bytes that are no UTF-8)\n1\ta\ufffd\ufffdb\ufffd"),
        (b"\xed\xa0\x80", "f lines 1-1 of 1 (\ufffd stands for bytes that are no UTF-8)\n1\t\ufffd\ufffd\ufffd"),
    ],
)
def test_read_of_all_kinds_of_text(root: Path, data: bytes, text: str) -> None:
    (root / "f").write_bytes(data)
    assert Tools(root)("read", path="f") == text


def test_binary_and_huge_files_are_named_with_their_size(root: Path) -> None:
    (root / "f").write_bytes(b"\x7fELF\0\0" + bytes(5000))
    with open(root / "sparse", "wb") as file:
        file.write(b"text\n" * 4000)
        file.truncate(1 << 40)
    tools = Tools(root)
    for name, arguments in (("read", {}), ("edit", {"old": "a", "new": "b"})):
        assert "f is a binary file of 5.01 kB" in tools.error(name, path="f", **arguments)
    assert "too large to read (1.1 TB)" in tools.error("read", path="sparse")
    assert "larger than" in tools.error("edit", path="sparse", old="a", new="b")


@pytest.mark.parametrize("character", ["x", "é", "中", "\U0001f600"])
def test_long_lines_are_cut_visibly_and_never_inside_a_character(root: Path, character: str) -> None:
    for head in range(4):
        line = "x" * head + character * 3000
        (root / "f").write_text(f"first\n{line}\nlast\n", encoding="utf-8")
        shown = Tools(root)("read", path="f").splitlines()
        assert [shown[0], shown[1], shown[3]] == ["f lines 1-3 of 3", "1\tfirst", "3\tlast"]
        body, left_out = shown[2].removeprefix("2\t").split(" [... ")
        assert line.startswith(body) and 1990 <= len(body.encode()) <= 2000
        assert int(left_out.split()[0]) == len(line.encode()) - 2000


def test_a_cancel_stops_a_read(root: Path) -> None:
    cancel = threading.Event()
    cancel.set()
    read = builtin_tools(root)[0]
    box = Toolbox([read])
    assert box.call(ToolCall("read", {"path": "sub/file"}), cancel) == CANCELLED


# -- list and search


def test_list(root: Path) -> None:
    (root / ".git").mkdir()
    (root / ".git" / "config").touch()
    (root / "link").symlink_to("sub")
    (root / "two\nlines").write_bytes(b"12345")
    (root / "sub" / "deep").mkdir()
    tools = Tools(root)
    assert tools("list") == ".:\n.git/\nlink -> sub\nsub/\ntwo\\nlines 5 B"
    assert tools("list", depth=9) == ".:\n.git/\nlink -> sub\nsub/\nsub/deep/\nsub/file 7 B\ntwo\\nlines 5 B"
    assert tools("list", path="link") == "sub:\ndeep/\nfile 7 B"
    assert tools("list", path="sub/deep") == "sub/deep is empty."
    assert "read it" in tools.error("list", path="sub/file")
    for i in range(300):
        (root / "sub" / f"{i:03}").touch()
    shown = tools("list", path="sub").splitlines()
    assert (
        shown[1:201] == [f"{i:03} 0 B" for i in range(200)] and "only the first 200" in shown[201] and len(shown) == 202
    )


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file system that takes any bytes as names")
def test_a_name_that_is_no_text_is_listed(root: Path) -> None:
    os.close(os.open(bytes(root) + b"/bad\xff", os.O_CREAT))
    assert Tools(root)("list") == ".:\nbad\\udcff 0 B\nsub/"


@pytest.mark.nosanitize
def test_search(root: Path) -> None:
    (root / "a.py").write_text("def one():\r\n    return 1\ndef two(): pass\n")
    (root / "sub" / "b.txt").write_text("def three\n")
    (root / "binary").write_bytes(b"def\0def")
    (root / "latin").write_bytes(b"caf\xe9 def\n")
    (root / ".git").mkdir()
    (root / ".git" / "x").write_text("def\n")
    (root / "link").symlink_to("../outside")
    (root / "link2").symlink_to("../outside/secret")
    tools = Tools(root)
    assert tools("search", pattern=r"^def \w+") == "a.py:1: def one():\na.py:3: def two(): pass\nsub/b.txt:1: def three"
    assert tools("search", pattern="DEF|secret", files="*") == "no match for 'DEF|secret' in 5 files."
    assert tools("search", pattern="(?i)DEF T", files="*.py") == "a.py:3: def two(): pass"
    assert tools("search", pattern="def", path="sub") == "sub/b.txt:1: def three"
    assert tools("search", pattern="^def three$", path="sub/b.txt") == "sub/b.txt:1: def three"
    assert tools("search", pattern="f", path="latin") == "latin:1: caf\ufffd def"
    assert "missing )" in tools.error("search", pattern="a(b")
    assert "does not exist" in tools.error("search", pattern="a", path="none")


@pytest.mark.nosanitize
def test_search_is_capped_and_shows_the_match_in_a_long_line(root: Path) -> None:
    (root / "many").write_text("match\n" * 1000)
    (root / "long").write_text("x" * 3_000_000 + "needle" + "y" * 500 + "\nneedle\n")
    tools = Tools(root)
    shown = tools("search", pattern="match").splitlines()
    assert shown[:2] == ["many:1: match", "many:2: match"] and len(shown) == searching.MAX_MATCHES + 1
    assert "stopped at 50 matches" in shown[-1]
    first, second = tools("search", pattern="needle").splitlines()
    assert first.startswith("long:1: ...xxx") and "needleyyy" in first and first.endswith("yyy...") and len(first) < 250
    assert second == "long:2: needle"
    assert "narrow" in Tools(root, max_bytes=256)("search", pattern="match")


@pytest.mark.nosanitize
@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|aa)+$"])
def test_a_hostile_pattern_ends_and_keeps_what_was_found(root: Path, pattern: str) -> None:
    (root / "a").write_text("aa\n")
    (root / "z").write_text("a" * 5000 + "!\n")
    text = Tools(root, search_seconds=1)("search", pattern=pattern)
    assert text == "a:1: aa\n(stopped after 1 s: simplify the pattern, or name a path)"


@pytest.mark.nosanitize
@pytest.mark.parametrize("pattern", ["(" * 5000 + ")" * 5000, "((a{1,1000}){1,1000}){1,1000}", "a{99999999999}", "\\"])
def test_a_pattern_that_cannot_be_compiled_is_a_sentence(root: Path, pattern: str) -> None:
    result = Tools(root, search_seconds=2).result("search", pattern=pattern)
    assert "cannot be used" in result.text or "no match" in result.text or "stopped after" in result.text
    assert len(result.text) < 400


@pytest.mark.nosanitize
def test_a_cancel_stops_a_search(root: Path) -> None:
    (root / "z").write_text("a" * 5000 + "!\n")
    box = Toolbox(builtin_tools(root, search_seconds=300))
    cancel = threading.Event()
    threading.Timer(0.3, cancel.set).start()
    assert box.call(ToolCall("search", {"pattern": "(a+)+$"}), cancel) == CANCELLED


# -- write and edit


def test_write_makes_folders_replaces_and_keeps_the_mode(root: Path) -> None:
    tools = Tools(root)
    assert tools("write", path="new/deep/f", text="é\nb") == "new/deep/f written: 2 lines, 4 B (new)"
    assert (root / "new/deep/f").read_text(encoding="utf-8") == "é\nb"
    mask = os.umask(0)
    os.umask(mask)
    assert (root / "new/deep/f").stat().st_mode & 0o777 == 0o666 & ~mask
    (root / "new/deep/f").chmod(0o751)
    assert tools("write", path="new/deep/f", text="") == "new/deep/f written: 0 lines, 0 B"
    assert (root / "new/deep/f").stat().st_mode & 0o777 == 0o751
    (root / "link").symlink_to("sub/file")
    assert tools("write", path="link", text="x").startswith("sub/file written")
    assert (root / "link").is_symlink() and (root / "sub/file").read_text() == "x"
    (root / "sub/file").chmod(0o444)
    assert "read-only" in tools.error("write", path="sub/file", text="y")
    for path in (".", "sub", "new/", "nowhere/../x", "nowhere/."):
        tools.error("write", path=path, text="x")
    assert sorted(os.listdir(root)) == ["link", "new", "sub"]


@pytest.mark.parametrize("step", ["fsync", "rename", "fchmod"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    root: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    tools = Tools(root)
    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        assert "sub/file cannot be used: No space left" in tools.error("write", path="sub/file", text="new")
    assert os.listdir(root / "sub") == ["file"] and (root / "sub/file").read_text() == "inside\n"


def test_edit_needs_exactly_one_match(root: Path) -> None:
    (root / "f").write_text("one\ntwo\n  three\none\n")
    tools = Tools(root)
    assert tools("edit", path="f", old="two\n", new="2\n2\n") == "f edited at line 2: -1 +2 lines"
    assert (root / "f").read_text() == "one\n2\n2\n  three\none\n"
    assert "in lines 1, 5" in tools.error("edit", path="f", old="one", new="x")
    assert "does not occur" in tools.error("edit", path="f", old="four", new="x")
    assert "begins like line 4" in tools.error("edit", path="f", old="three \none", new="x")
    assert "use write" in tools.error("edit", path="f", old="", new="x")
    assert "the same text" in tools.error("edit", path="f", old="one", new="one")
    assert tools("edit", path="f", old="2\n2\n", new="") == "f edited at line 2: -2 +0 lines"
    (root / "g").write_text("aaa")
    assert "in lines 1, 1" in tools.error("edit", path="g", old="aa", new="b")  # the two matches overlap
    assert (root / "f").read_text() == "one\n  three\none\n" and (root / "g").read_text() == "aaa"


def test_edit_keeps_line_ends_and_bytes_that_are_no_text(root: Path) -> None:
    tools = Tools(root)
    (root / "crlf").write_bytes(b"a\r\nb\r\nc\r\n")
    tools("edit", path="crlf", old="a\nb\n", new="1\n2\n3\n")
    assert (root / "crlf").read_bytes() == b"1\r\n2\r\n3\r\nc\r\n"
    tools("edit", path="crlf", old="c", new="c\nd")
    assert (root / "crlf").read_bytes() == b"1\r\n2\r\n3\r\nc\r\nd\r\n"
    (root / "mixed").write_bytes(b"a\r\nb\nc\n")
    tools("edit", path="mixed", old="b\nc", new="x\ny")
    assert (root / "mixed").read_bytes() == b"a\r\nx\ny\n"
    (root / "latin").write_bytes(b"\xe9\xff one")
    tools("edit", path="latin", old="one", new="zwei")
    assert (root / "latin").read_bytes() == b"\xe9\xff zwei"


# -- which tools there are


def test_only_what_is_allowed_is_there_and_asks(root: Path) -> None:
    def names(**options: bool) -> dict[str, bool]:
        return {tool.name: tool.needs_permission for tool in builtin_tools(root, **options)}

    reading = dict.fromkeys(["read", "more", "list", "search"], False)
    assert names() == reading
    assert names(write=True) == reading | {"write": True, "edit": True}
    assert names(bash=True) == reading | {"bash": True, "job": False}


def test_what_the_user_is_asked(root: Path) -> None:
    box = Toolbox(builtin_tools(root, write=True, bash=True))
    asked = [
        ToolCall("write", {"path": "a\nb", "text": "one\ntwo\n"}),
        ToolCall("edit", {"path": "a", "old": "1", "new": "1\n2"}),
        ToolCall("bash", {"command": "ls\nrm -r x"}),
        ToolCall("bash", {"command": "make", "background": "true"}),
        ToolCall("read", {"path": "a"}),
    ]
    assert [box.permission(call) for call in asked] == [
        "write a\\nb (2 lines, 8 B)",
        "edit a (1 lines become 2)",
        "bash: ls\\nrm -r x",
        "bash in background: make",
        None,
    ]


@pytest.mark.model
def test_the_schemas_leave_room_in_a_small_context(smollm2: Path, root: Path) -> None:
    import ds4
    from ds4.chat_formats.toolcalls import json_text

    with ds4.Engine(smollm2) as engine:
        assert engine.tokenizer is not None
        size = [
            len(engine.tokenizer.encode(json_text(tool.schema))) for tool in builtin_tools(root, write=True, bash=True)
        ]
    assert sum(size[:4]) < 350 and sum(size) < 750
