"""One peer engine in a process of its own: `python bench_worker.py llama.cpp`. `bench_peer.py` starts it and talks to
it in JSON, a line each way. Low-level calls only, so that no sampling and no Python of theirs is timed.

    {"do": "open", "path", "tokens", "threads", "ctx", "kv_dtype"} -> {"version", "settings": [text, ...]}
    {"do": "run", "test": "pp" | "tg", "size", "depth", "setting"} -> {"seconds", "top"}
    {"do": "run", "test": "truncate", "size": the new length, "depth", "setting"} -> {"seconds"}
    anything that fails -> {"error": text}; a truncate that the peer refuses -> {"refused": text}
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder, whose inspect.py is not Python's

import ctypes
import json
import os
import signal
import time
from typing import Any

BATCH, UBATCH = 2048, 512
_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}
_FLASH = {True: "flash attention", False: "no flash attention"}
_KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Peer:
    """A model, and a context for each of the settings that are tried. A context holds the first `held` tokens."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.models: dict[bool, Any] = {}
        self.contexts: list[Any] = []
        self.held: list[int] = []
        if name == "llama.cpp":
            import llama_cpp

            self.api: Any = llama_cpp
            self.version = llama_cpp.__version__
        else:
            import ik_llama_cpp
            from ik_llama_cpp import _ctypes_api

            self.api = _ctypes_api
            self.version = ik_llama_cpp.__version__
            self.remove = _ctypes_api._lib.llama_kv_cache_seq_rm
            self.remove.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]
            self.remove.restype = ctypes.c_bool
        self.api.llama_backend_init()

    def open(self, path: str, tokens: list[int], threads: int, ctx: int, kv_dtype: str) -> dict[str, Any]:
        """Loads the model and makes the contexts; a setting that the engine refuses is left out."""
        self.path, self.tokens = path, tokens
        self.batch = self.api.llama_batch_init(BATCH, 0, 1)
        settings = []
        for flash, repack in ((True, False), (False, False), (True, True)):
            if repack and self.name == "llama.cpp":  # it repacks by itself
                continue
            context = self._context(self._model(repack), flash, threads, ctx, kv_dtype)
            if context:
                self.contexts.append(context)
                self.held.append(0)
                settings.append(_FLASH[flash] + (", repacked" if repack else ""))
        if not settings:
            raise RuntimeError(f"it makes no context of {ctx} tokens with rows as {kv_dtype}")
        return {"version": self.version, "settings": settings}

    def _model(self, repack: bool) -> Any:
        if repack not in self.models:
            options = self.api.llama_model_default_params()
            options.n_gpu_layers = 0
            if repack:
                options.repack_tensors, options.use_mmap = True, False
            model = self.api.llama_model_load_from_file(self.path.encode(), options)
            if not model:
                raise RuntimeError(f"it does not load {self.path}")
            self.models[repack] = model
            if not repack:
                vocab = self.api.llama_model_get_vocab(model)
                self.vocab = self.api.llama_vocab_n_tokens(vocab)
        return self.models[repack]

    def _context(self, model: Any, flash: bool, threads: int, ctx: int, kv_dtype: str) -> Any:
        options = self.api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = -(-ctx // 256) * 256, BATCH, UBATCH
        options.n_threads = options.n_threads_batch = threads
        options.type_k = options.type_v = _TYPES[kv_dtype]
        if self.name == "llama.cpp":
            options.flash_attn_type = int(flash)
            options.swa_full = False  # as their own bench has it
        else:
            options.flash_attn = flash
        return self.api.llama_init_from_model(model, options)

    def run(self, test: str, size: int, depth: int, setting: int) -> dict[str, Any]:
        """Brings the context to `depth` and measures what comes then."""
        if test == "truncate":
            self._seek(setting, depth)
            start = time.perf_counter()
            done = self._remove(setting, size)
            seconds = time.perf_counter() - start
            return {"seconds": seconds} if done else {"refused": f"it does not go back from {depth} to {size}"}
        self._seek(setting, depth)
        step = BATCH if test == "pp" else 1
        context, ends = self.contexts[setting], range(depth, depth + size, step)
        self._fill(depth, min(step, size))
        start = time.perf_counter()
        for begin in ends:
            if begin > depth:
                self._fill(begin, min(step, depth + size - begin))
            self._decode(context)
            row = self.api.llama_get_logits_ith(context, self.batch.n_tokens - 1)
        seconds = time.perf_counter() - start
        self.held[setting] = depth + size
        logits = [row[i] for i in range(self.vocab)]
        return {"seconds": seconds, "top": max(range(self.vocab), key=logits.__getitem__)}

    def _seek(self, setting: int, depth: int) -> None:
        if self.held[setting] > depth and not self._remove(setting, depth):
            self._remove(setting, 0)
        while self.held[setting] < depth:
            begin = self.held[setting]
            self._fill(begin, min(BATCH, depth - begin))
            self._decode(self.contexts[setting])
            self.held[setting] = begin + self.batch.n_tokens

    def _remove(self, setting: int, begin: int) -> bool:
        context = self.contexts[setting]
        if self.name == "llama.cpp":
            done = self.api.llama_memory_seq_rm(self.api.llama_get_memory(context), 0, begin, -1)
        else:
            done = self.remove(context, 0, begin, -1)
        if done:
            self.held[setting] = begin
        return bool(done)

    def _fill(self, begin: int, n: int) -> None:
        batch = self.batch
        batch.n_tokens = n
        for i in range(n):
            batch.token[i], batch.pos[i] = self.tokens[begin + i], begin + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i == n - 1

    def _decode(self, context: Any) -> None:
        status = self.api.llama_decode(context, self.batch)
        if status:
            raise RuntimeError(f"llama_decode has ended with {status}")


def main(name: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_KILL_WITH_PARENT, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print must not come between the answers
    peer: Peer | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            peer = Peer(name) if peer is None else peer
            do = peer.open if request.pop("do") == "open" else peer.run
            answer = do(**request)
        except Exception as error:
            answer = {"error": f"{error}" or type(error).__name__}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
