"""A package that answers like llama-cpp-python, for tests of `ds4 bench --vs`: what it is asked to do goes into a file.
It computes nothing: the most likely token is always 0."""

from __future__ import annotations

from pathlib import Path

PACKAGE = """
import os, time
from types import SimpleNamespace

__version__ = "0.0"
LOG = {log!r}

def note(text):
    with open(LOG, "a") as file:
        file.write(text + "\\n")

def llama_backend_init(): {begin}
def llama_model_default_params(): return SimpleNamespace()
def llama_context_default_params(): return SimpleNamespace()
def llama_model_load_from_file(path, options): return path
def llama_model_get_vocab(model): return model
def llama_vocab_n_tokens(vocab): return 3
def llama_get_memory(context): return context
def llama_init_from_model(model, options):
    note(f"context flash={{options.flash_attn_type}} threads={{options.n_threads}} ctx={{options.n_ctx}} rows={{options.type_k}}")
    return {context}
def llama_batch_init(n, embd, seqs):
    return SimpleNamespace(n_tokens=0, token=[0]*n, pos=[0]*n, n_seq_id=[0]*n, seq_id=[[0] for _ in range(n)], logits=[0]*n)
def llama_decode(context, batch):
    n = batch.n_tokens
    note(f"decode {{n}} at {{batch.pos[0]}} in {{context}} first={{batch.token[0]}}")
    assert list(batch.pos[:n]) == list(range(batch.pos[0], batch.pos[0] + n)) and batch.logits[:n] == [0] * (n - 1) + [1]
    time.sleep(0.001)
    return {status}
def llama_get_logits_ith(context, i): return [2.0, 1.0, 0.0]
def llama_memory_seq_rm(memory, seq, begin, end):
    note(f"truncate to {{begin}} in {{memory}}")
    return {removes}
"""


def install(folder: Path, **changes: object) -> Path:
    """Writes the package `llama_cpp` into a folder. Returns the file that its calls go into. `changes`: expressions
    that some of its functions return instead."""
    log = folder / "calls"
    usual = {"begin": "pass", "context": "options.flash_attn_type", "status": 0, "removes": "True"}
    text = PACKAGE.format(log=str(log), **(usual | changes))
    (folder / "llama_cpp.py").write_text(text, encoding="utf-8")
    return log
