"""The examples of the README and of docs/ run as they stand, and the links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [
    pytest.param(text, id=f"{page.name}-{i}")
    for page in PAGES
    for i, text in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S))
]


@pytest.mark.model
@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example: str, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "<example>", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for name in re.findall(r"`((?:csrc|ds4|docs|tests|benchmarks|kernels|models)/[\w./-]*\w)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_the_architecture_is_one_page_and_names_every_c_file() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 90
    for path in (ROOT / "csrc").rglob("*.c"):
        assert path.name in text or path.name == "host.c", f"ARCHITECTURE.md does not name {path.name}"


def test_the_header_is_short_and_files_have_one_subject() -> None:
    assert len((ROOT / "csrc" / "ds4.h").read_text(encoding="utf-8").splitlines()) <= 300
    for folder, pattern in (("csrc", "*.[ch]"), ("ds4", "*.py"), ("tests", "*.py")):
        for path in (ROOT / folder).rglob(pattern):
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 810, f"{path.name} is two files"
