"""Spill files: numbers, names, two steps, damage, and what a locator may name (spec/span.md section 5)."""

from __future__ import annotations

import hashlib
import os
import stat

import pytest
from test_transcript import answer, talk, user

from ds4.chat_formats import ToolCall
from ds4.errors import ArgumentError, FileFormatError
from ds4.node_json import from_json
from ds4.nodes import Node
from ds4.spill import Spill, damages, folder_name
from ds4.store import Store
from ds4.transcript import Transcript

NODES = [
    user("a question\nof two lines \x1b[31m", 5, 6, number=2),
    answer("\u2028", 7, number=3, thinking="hm", calls=(ToolCall("read", {"path": "x", "n": [1.5, None]}, "call-1"),)),
    Node("tool", (8,) * 3, "\0\t\r\n", result_of="call-1", number=4),
]


@pytest.fixture
def spill(tmp_path):
    return Spill(tmp_path / "spill" / "session-0123456789ab")


def tree(path):
    """Every file and folder below."""
    return sorted(
        os.path.relpath(os.path.join(at, n), path) for at, folders, files in os.walk(path) for n in folders + files
    )


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


def test_folder_and_file_as_the_spec_says(tmp_path):
    with Store.create(tmp_path / "c") as store:
        entry = store.spill.prepare(NODES)
        entry.commit()
        name = hashlib.sha256(store.id.encode()).hexdigest()[:12]
        path = tmp_path / "c" / "spill" / f"session-{name}" / "000001.jsonl"
        assert entry.locator == str(path) and path.exists() and store.spill.folder == path.parent
        assert (mode(path), mode(path.parent), mode(path.parent.parent), mode(tmp_path / "c")) == (
            0o600,
            0o700,
            0o700,
            0o700,
        )
        assert tree(path.parent) == ["000001.jsonl"]


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_what_is_spilled_comes_back(spill, kind):
    spill = spill if kind == "file" else Spill()
    entry = spill.prepare(NODES, reason="x", conversation="y")
    with pytest.raises(ArgumentError, match="does not exist; there are none"):
        spill.read(entry.locator)
    entry.commit()
    for name in (entry.locator, 1, "1", "#1", "000001"):
        assert [from_json(line) for line in spill.read(name)] == NODES
    if kind == "memory":
        assert entry.locator == "memory:000001"
    entry = spill.prepare([user("not in the log yet")])
    entry.commit()
    assert spill.read(2)[0]["number"] == 0 and spill.numbers() == [1, 2]
    spill.prepare([]).commit()
    assert spill.read(3) == []


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_numbers_have_no_gaps(spill, kind):
    spill = spill if kind == "file" else Spill()
    first = spill.prepare(NODES)
    second = spill.prepare(NODES)
    assert (first.number, second.number) == (1, 2)
    second.discard()
    first.discard()
    assert spill.numbers() == [] and spill.prepare(NODES[:1]).number == 1
    third = spill.prepare(NODES[1:])
    fourth = spill.prepare(NODES)
    fourth.commit()
    third.discard()
    refill = spill.prepare(NODES[2:])
    assert (third.number, fourth.number, refill.number) == (2, 3, 2), "what a discard has left open is filled"
    refill.commit()
    assert spill.prepare(NODES).number == 4
    assert [from_json(line) for line in spill.read(2)] == NODES[2:]


def test_a_discarded_entry_leaves_nothing(tmp_path, spill):
    entry = spill.prepare(NODES)
    assert len(tree(tmp_path)) == 3
    entry.discard()
    assert tree(tmp_path) == []
    spill.prepare(NODES).commit()
    before = tree(tmp_path)
    spill.prepare(NODES).discard()
    assert tree(tmp_path) == before


def test_foreign_names_are_ignored(spill):
    spill.prepare(NODES).commit()
    for name in ("7.jsonl", "000000.jsonl", "0000009.jsonl", "000009.json", "x000009.jsonl", "000009.jsonl.bak", "-00009.jsonl",
                 "00001٩.jsonl", " 000009.jsonl", "000009.JSONL", ".000009-zz.tmp", "9" * 30 + ".jsonl"):  # fmt: skip
        (spill.folder / name).write_text("x")
    (spill.folder / "notes").mkdir()
    assert spill.numbers() == [1] and spill.prepare(NODES).number == 2
    (spill.folder / "1000007.jsonl").write_text("x")
    assert spill.prepare(NODES).number == 1000008, "largest full match + 1, also with seven digits"


def test_nothing_is_overwritten(spill):
    """Two that took the same number: the second to commit is refused, and the first is as it was."""
    other = Spill(spill.folder)
    one, two = spill.prepare(NODES[:1]), other.prepare(NODES[1:])
    assert one.number == two.number == 1
    one.commit()
    with pytest.raises(FileExistsError):
        two.commit()
    two.discard()
    assert tree(spill.folder) == ["000001.jsonl"] and [from_json(line) for line in spill.read(1)] == NODES[:1]
    again = other.prepare(NODES[1:])
    again.commit()
    assert again.number == 2 and [from_json(line) for line in spill.read(2)] == NODES[1:]
    full = spill.prepare(NODES)
    os.symlink("/dev/null", spill.folder / "000003.jsonl")
    with pytest.raises(FileExistsError):
        full.commit()
    assert os.stat("/dev/null").st_rdev


def test_a_file_system_without_links(spill, monkeypatch):
    def link(a, b):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    spill.prepare(NODES).commit()
    assert tree(spill.folder) == ["000001.jsonl"] and [from_json(line) for line in spill.read(1)] == NODES
    entry = spill.prepare(NODES[:1])
    (spill.folder / "000002.jsonl").write_text("mine")
    with pytest.raises(PermissionError):
        entry.commit()
    assert (spill.folder / "000002.jsonl").read_text() == "mine"


def test_prepare_that_fails_leaves_nothing(tmp_path, spill, monkeypatch):
    spill.prepare(NODES).commit()
    before = tree(tmp_path)

    def fail(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        spill.prepare(NODES)
    monkeypatch.undo()
    assert tree(tmp_path) == before and spill.prepare(NODES).number == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        Spill(tmp_path / "file" / "session-0123456789ab").prepare(NODES)


@pytest.mark.parametrize(
    "locator",
    ["", "x", "../000001.jsonl", "/etc/passwd", "000001.jsonl", "session-0123456789ab/000001.jsonl/..", "memory:",
     "session-ffffffffffff/000001.jsonl", "/x/session-0123456789ab/000001.json", "-1", "1.0", "٣", "#", "1 2", "0x1",
     "session-0123456789ab/../../000001.jsonl", "session-0123456789ab/000001.jsonl\n.", "1" * 31, None, 1.5, ["1"]],
)  # fmt: skip
def test_a_locator_reaches_nothing_else(spill, locator):
    spill.prepare(NODES).commit()
    with pytest.raises(ArgumentError, match="names no spill of this conversation"):
        spill.read(locator)
    for absent in (0, 2, "10" * 10):
        with pytest.raises(ArgumentError, match="does not exist; there are 1 to 1"):
            spill.read(absent)


def test_a_store_that_was_moved_still_reads_its_locators(tmp_path):
    t = talk(Store.create(tmp_path / "a"))
    entry = t.store.spill.prepare(t.surface)
    t.replace([user("x")], spills=[entry])
    t.store.close()
    os.rename(tmp_path / "a", tmp_path / "b")
    with Store.open(tmp_path / "b") as store:
        assert [from_json(line) for line in store.spill.read(entry.locator)] == Transcript(store).history()[:5]


# ---- damage --------------------------------------------------------------------------------------------------------


def lines_of(path):
    return path.read_bytes().splitlines(keepends=True)


def test_every_damaged_line_is_named(spill):
    spill.prepare(NODES).commit()
    path = spill.folder / "000001.jsonl"
    sound = lines_of(path)

    def flipped(i, at):
        line = sound[i][:at] + bytes([sound[i][at] ^ 1]) + sound[i][at + 1 :]
        return [*sound[:i], line, *sound[i + 1 :]]

    cases = [(flipped(i, at), i + 1) for i, line in enumerate(sound) for at in range(0, len(line) - 1, 7)]
    cases += [(sound[:i] + sound[i + 1 :], i + 1) for i in range(3)]
    cases += [(sound[:3], 4), ([], 1), (sound[:1], 2), ([*sound, sound[3]], 5), ([*sound[:2], sound[3], sound[2]], 3)]
    cases += [([*sound[:3], sound[3][:n]], 4) for n in (1, 20, len(sound[3]) - 1)]
    for lines, line in cases:
        path.write_bytes(b"".join(lines))
        [damage] = damages(spill.folder, {})
        assert (damage.file, damage.line) == ("000001.jsonl", line), lines
        with pytest.raises(FileFormatError) as error:
            spill.read(1)
        assert str(path) in str(error.value) and damage.what in str(error.value)
        nodes, same = spill.load(1)
        assert same == damage and [from_json(one) for one in nodes] == NODES[: max(0, line - 2)]
    path.write_bytes(b"".join(sound))
    assert damages(spill.folder, {}) == []


def test_a_file_at_the_wrong_place_is_damaged(spill):
    for nodes in (NODES, NODES[:1]):
        spill.prepare(nodes).commit()
    one, two = spill.folder / "000001.jsonl", spill.folder / "000002.jsonl"
    a, b = one.read_bytes(), two.read_bytes()
    one.write_bytes(b), two.write_bytes(a)
    assert [(d.file, d.line) for d in damages(spill.folder, {})] == [("000001.jsonl", 1), ("000002.jsonl", 1)]
    two.unlink()
    os.mkfifo(two)
    one.write_bytes(a)
    assert [(d.file, d.what) for d in damages(spill.folder, {})] == [
        ("000002.jsonl", "cannot be read (it is not a regular file)")
    ]


def test_the_log_says_which_files_there_are(tmp_path):
    t = talk(Store.create(tmp_path / "c"))
    for i in (1, 2):
        entry = t.store.spill.prepare(t.surface[1:2], turn=i)
        t.append(user("preview"), spills=[entry])
    folder = t.store.spill.folder
    known = {1: list(t.store.events())[-2]["spills"][0]["sum"], 2: entry.sum}
    assert damages(folder, known) == []
    saved = (folder / "000002.jsonl").read_bytes()
    (folder / "000002.jsonl").unlink()
    assert [str(d) for d in damages(folder, known)] == ["000002.jsonl: the log refers to it, and it is missing"]
    other = Spill(folder)
    other.prepare(t.surface[2:3]).commit()
    assert [str(d) for d in damages(folder, known)] == ["000002.jsonl: not the file that the log refers to"]
    (folder / "000002.jsonl").write_bytes(saved)
    assert damages(folder, known) == []
    t.store.close()


def test_what_a_crash_has_left(tmp_path):
    """A temporary file that the log refers to is finished, any other removed."""
    spill = Spill(tmp_path / "spill" / folder_name("x"))
    referred = {}
    for number in (1, 2, 3):
        entry = spill.prepare(NODES[:number])
        referred[number] = entry.sum
    again = Spill(spill.folder)
    forged = again.prepare(NODES)  # the same number, other contents
    assert forged.number == 1
    (spill.folder / "notes.tmp").write_text("mine")
    again.recover({1: referred[1], 3: referred[3]})
    assert tree(spill.folder) == ["000001.jsonl", "000003.jsonl", "notes.tmp"]
    assert [from_json(line) for line in again.read(1)] == NODES[:1]
    assert [from_json(line) for line in again.read(3)] == NODES
    again.recover(referred)
    assert again.numbers() == [1, 3]
