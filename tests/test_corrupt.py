"""The corpus of broken files: each one is refused with a sentence that names the file and the fault, in little memory
and time."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from corrupt import deepseek_v4, families, make

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tests" / "corrupt"
CASES = make.CASES | families.CASES | deepseek_v4.CASES
MEMORY_MB = 256
SECONDS = 2.0

needs_tokenizer = pytest.mark.skipif(
    importlib.util.find_spec("ds4.tokenizer") is None, reason="ds4.tokenizer is not part of this tree"
)


def open_all(paths: list[str], megabytes: int = MEMORY_MB) -> dict[str, dict]:
    """What `open_all.py` says of each path."""
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "OPENBLAS_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(CORPUS / "open_all.py"), str(megabytes)],
        input="\n".join(paths), capture_output=True, text=True, timeout=120, env=env,
    )  # fmt: skip
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(paths), f"the process died at {paths[len(results)]}: {done.stderr[-2000:]}"
    return {result["path"]: result for result in results}


@pytest.fixture(scope="module")
def results():
    names = [name for name in CASES if not name.startswith("tokenizer/") or not needs_tokenizer.args[0]]
    return open_all([str(CORPUS / name) for name in names])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=needs_tokenizer if name.startswith("tokenizer/") else ()) for name in CASES],
)
def test_refused_by_name(name, results):
    path = str(CORPUS / name)
    result = results[path]
    assert result["error"] == "Ds4Error", f"{name}: {result['error']}: {result['message']}"
    assert result["message"].startswith(path), f"the message does not begin with the file: {result['message']}"
    message = result["message"].replace(path, "")  # the case's own name must not pass for the fault
    assert CASES[name][1] in message, f"{name} says: {message}"
    assert message.isprintable() and message.endswith((".", ".gguf'")) and len(message) < 600
    assert result["seconds"] < SECONDS


def test_committed_files_are_what_make_writes(tmp_path):
    make.write(tmp_path)
    make.write(tmp_path, families.CASES)
    make.write(tmp_path, deepseek_v4.CASES)
    for folder in sorted({name.split("/")[0] for name in CASES}):
        fresh = {p.relative_to(tmp_path): p.read_bytes() for p in (tmp_path / folder).rglob("*") if p.is_file()}
        held = {p.relative_to(CORPUS): p.read_bytes() for p in (CORPUS / folder).rglob("*") if p.is_file()}
        assert held.keys() == fresh.keys()
        assert [str(p) for p in held if held[p] != fresh[p]] == []


def test_the_model_without_a_fault_is_accepted(tmp_path):
    """Otherwise the cases above could be refused for another reason than their fault."""
    models = {"llama": make.Gguf(), "moe": families.moe(), "gemma": families.gemma()}
    for name, model in models.items():
        (tmp_path / f"{name}.gguf").write_bytes(model.bytes())
    paths = [tmp_path / f"{name}.gguf" for name in models]
    for family, config, weights in (
        ("llama", make.CONFIG, make.hf_weights()),
        ("qwen3_moe", families.config(families.QWEN3_MOE), families.moe_weights()),
        ("gemma3", families.config(families.GEMMA3), families.gemma_weights()),
        ("deepseek_v4", deepseek_v4.CONFIG, deepseek_v4.weights()),
    ):
        paths.append(tmp_path / family)
        paths[-1].mkdir()
        for name, raw in make.folder(config, model_safetensors=weights).items():
            (paths[-1] / name).write_bytes(raw)
    for path, result in open_all([str(path) for path in paths]).items():
        assert result["message"] == "passed fingerprint", path


@needs_tokenizer
def test_the_sentencepiece_model_without_a_fault_is_accepted(tmp_path):
    folder = tmp_path / "tokenizer"
    (folder / "good").mkdir(parents=True)
    for name, raw in make.folder(tokenizer_model=make.make_spm.model(), model_safetensors=make.EMPTY).items():
        (folder / "good" / name).write_bytes(raw)
    model = make.Gguf()
    model.keys.update(make.spm_keys(make.make_spm.gguf_keys()))
    (folder / "good.gguf").write_bytes(model.bytes())
    for path in (folder / "good", folder / "good.gguf"):
        assert open_all([str(path)])[str(path)]["message"] == "passed tokenizer"


@needs_tokenizer
def test_the_tokenizer_without_a_fault_is_accepted(tmp_path):
    folder = tmp_path / "tokenizer"
    files = make.folder(tokenizer_json=make.TOKENIZER, model_safetensors=make.EMPTY)
    (folder / "good").mkdir(parents=True)
    for name, raw in files.items():
        (folder / "good" / name).write_bytes(raw)
    model = make.Gguf()
    make.with_tokenizer()(model)
    (folder / "good.gguf").write_bytes(model.bytes())
    for path in (folder / "good", folder / "good.gguf"):
        assert open_all([str(path)])[str(path)]["message"] == "passed tokenizer"


def sparse(path: Path, head: bytes, size: int) -> str:
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(size)
    return str(path)


@pytest.mark.skipif(sys.platform != "linux", reason="the memory limit is only kept by Linux")
def test_huge_files_take_no_memory(tmp_path):
    """A count may be true to the size of the file and still mean far more memory than the machine has."""
    head = make.Gguf().head()[:16] + (1).to_bytes(8, "little")
    zeros = 1 << 30  # zeros are valid: empty strings, the number 0
    strings = make.key("x", make.ARRAY, make.struct.pack("<IQ", make.STRING, (1 << 27) - 64))
    numbers = make.key("x", make.ARRAY, make.struct.pack("<IQ", make.U64, 1 << 26))
    one_string = make.key("x", make.STRING, (1 << 29).to_bytes(8, "little"))
    paths = [
        sparse(tmp_path / "strings.gguf", head + strings, zeros),
        sparse(tmp_path / "numbers.gguf", head + numbers, zeros),
        sparse(tmp_path / "string.gguf", head + one_string, zeros),
        sparse(tmp_path / "tensors.gguf", b"GGUF" + make.struct.pack("<IQQ", 3, 1 << 24, 0), zeros),
    ]
    for name in ("header", "config", "index"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(b'{"model_type":"llama"}')
        paths.append(str(tmp_path / name))
    sparse(tmp_path / "header" / "model.safetensors", (1 << 29).to_bytes(8, "little") + b"{", zeros)
    sparse(tmp_path / "config" / "config.json", b"{", 1 << 30)
    sparse(tmp_path / "index" / "model.safetensors.index.json", b"{", 1 << 30)
    for path, result in open_all(paths, (zeros >> 20) + MEMORY_MB).items():  # the mapping counts as memory
        assert result["error"] == "Ds4Error" and result["message"].startswith(path), result
        assert result["kind"] == "FileFormatError", result  # not the system's refusal
        assert result["seconds"] < SECONDS, result


def test_many_short_values_are_counted_before_they_are_made(tmp_path):
    """`[[],[],...` takes three bytes a value in the file and sixty in memory."""
    header = b'{"a":[' + b"[]," * (5 << 20) + b"[]]}"
    (tmp_path / "config.json").write_bytes(b'{"model_type":"llama"}')
    (tmp_path / "model.safetensors").write_bytes(make.container(header, b""))
    result = open_all([str(tmp_path)])[str(tmp_path)]
    assert result["error"] == "Ds4Error" and "JSON values" in result["message"], result


@pytest.mark.parametrize("target", ["gguf", "safetensors", "index", "config", "tokenizer", "sentencepiece"])
def test_fuzz_targets_run(target):
    if target in ("tokenizer", "sentencepiece") and needs_tokenizer.args[0]:
        pytest.skip(needs_tokenizer.kwargs["reason"])
    done = subprocess.run(
        [sys.executable, str(ROOT / "fuzz" / f"{target}.py"), "--runs", "300", "--seed", "1"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "300 runs" in done.stdout
