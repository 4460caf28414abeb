"""The mutator and the loop that all targets share. Deterministic: everything follows from the seed."""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ds4.errors import Ds4Error

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "fuzz"
SLOW_SECONDS = 2.0
MEMORY_MB = 512

EXTREMES = sorted(
    {0, 13, 2**64 // 3} | {(1 << n) + d for n in (0, 7, 8, 15, 16, 31, 32, 62, 63, 64) for d in (-1, 0, 1)}
)
JSON_VALUES = (
    b"null", b"true", b"false", b"0", b"-1", b"1", b"2", b"3", b"1.5", b"0.0", b"1e-308", b"5e-324", b"1e29", b"1e999",
    b"NaN", b"-0.0", b"65536", b"16777216", b"2147483648", b"9007199254740993", b"18446744073709551616", b"9" * 50,
    b'""', b'"a"', b'"yarn"', b'"\\ud800"', b'"\\u0000"', b'"../x"', b"[]", b"[0,1]", b"[8,0]", b"[[]]", b"{}",
    b'{"a":1,"a":2}', b"[" * 2000, b'"' + b"x" * 5000 + b'"',
)  # fmt: skip


def mutate(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Data with one to six damages; `others` are files to copy from. JSON keeps its form in most runs, or every input
    would end at the first comma."""
    out = bytearray(data)
    damages = (_json,) if _json_begin(out) is not None and rng.random() < 0.8 else DAMAGES
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        rng.choice(damages)(rng, out, others)
    return bytes(out)


def _place(rng: random.Random, out: bytearray, size: int = 1) -> int:
    """An offset where `size` bytes fit, the front of the file more often: that is where the tables are."""
    room = max(0, len(out) - size)
    return rng.randint(0, min(room, 64)) if rng.random() < 0.2 else rng.randint(0, room)


def _flip(rng: random.Random, out: bytearray, others: Sequence[bytes]) -> None:
    if out:
        out[_place(rng, out)] ^= 1 << rng.randrange(8)


def _bytes(rng: random.Random, out: bytearray, others: Sequence[bytes]) -> None:
    at = _place(rng, out)
    n = rng.choice((1, 2, 4, 8, 16))
    out[at : at + n] = rng.choice((bytes(n), b"\xff" * n, rng.randbytes(n)))


def _field(rng: random.Random, out: bytearray, others: Sequence[bytes]) -> None:
    """An extreme number, or a neighbour of the old one, where a length, count, type or offset may be."""
    size, code = rng.choice(((1, "<B"), (4, "<I"), (4, "<I"), (8, "<Q"), (8, "<Q"), (8, "<Q")))
    if len(out) >= size:
        at = _place(rng, out, size)
        (old,) = struct.unpack_from(code, out, at)
        new = rng.choice(
            (rng.choice(EXTREMES), old + rng.choice((-1, 1, 8, -8, 32)), old * 2, old ^ (1 << rng.randrange(8 * size)))
        )
        struct.pack_into(code, out, at, new % (1 << 8 * size))


def _cut(rng: random.Random, out: bytearray, others: Sequence[bytes]) -> None:
    if rng.random() < 0.3:
        del out[_place(rng, out) :]
    else:
        at = _place(rng, out)
        del out[at : at + rng.choice((1, 4, 8, 30))]


def _splice(rng: random.Random, out: bytearray, others: Sequence[bytes]) -> None:
    source = rng.choice([*others, bytes(out)])
    begin = rng.randint(0, len(source))
    piece = source[begin : begin + rng.choice((1, 8, 30, 100, 400))]
    at = _place(rng, out)
    out[at : at + (len(piece) if rng.random() < 0.5 else 0)] = piece


def _json_begin(out: bytearray) -> int | None:
    """Where JSON begins: in a JSON file, or behind the header length of a safetensors file."""
    return 0 if out[:1] == b"{" else 8 if out[8:9] == b"{" else None


def _json(rng: random.Random, out: bytearray, others: Sequence[bytes]) -> None:
    """Replaces, removes, renames or copies one value somewhere in the JSON; a header's length stays true."""
    begin = _json_begin(out)
    if begin is None:
        return
    end = 8 + struct.unpack_from("<Q", out)[0] if begin else len(out)
    try:
        value = json.loads(bytes(out[begin:end]))
        places = list(_places(value))
        holder, key = rng.choice(places)
    except (ValueError, IndexError, RecursionError):
        return
    action = rng.randrange(5)
    if action == 0:
        del holder[key]
    elif action == 1 and isinstance(holder, dict):
        holder[rng.choice(("a", "__metadata__", "\0", key + "x"))] = holder.pop(key)
    elif action == 2:
        other, other_key = rng.choice(places)
        holder[key] = json.loads(json.dumps(other[other_key]))
    elif action == 3 and type(holder[key]) is int:
        holder[key] += rng.choice((-8, -4, -1, 1, 4, 8, 1 << 31, 1 << 63, 1 << 64))
    else:
        holder[key] = "@@"
    text = json.dumps(value).encode().replace(b'"@@"', rng.choice(JSON_VALUES))
    out[begin:end] = text
    if begin:
        struct.pack_into("<Q", out, 0, len(text))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from _places(value[key])


DAMAGES: tuple[Callable[[random.Random, bytearray, Sequence[bytes]], None], ...] = (
    _flip, _bytes, _field, _field, _cut, _splice,
)  # fmt: skip


def limit_memory(megabytes: int) -> None:
    """From now on at most so much more address space: a giant allocation becomes a MemoryError. Linux only (elsewhere
    the system does not keep the limit), and not under AddressSanitizer, which maps what it likes."""
    if not os.path.exists("/proc/self/statm") or "libasan" in Path("/proc/self/maps").read_text():
        return
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + (megabytes << 20), resource.RLIM_INFINITY))


def check(target: Callable[[bytes], None], data: bytes) -> str | None:
    """Runs one input; what is wrong with the outcome, or None."""
    start = time.perf_counter()
    try:
        target(data)
    except Ds4Error as error:
        if not str(error).isprintable() or len(str(error)) > 2000:
            return f"an error text that is not fit to print: {ascii(str(error))[:3000]}"
    except Exception:
        return traceback.format_exc()
    seconds = time.perf_counter() - start
    return f"took {seconds:.1f} s" if seconds > SLOW_SECONDS else None


def main(name: str, target: Callable[[bytes], None], seeds: Sequence[bytes]) -> None:
    """The command line of a target. Every seed must itself be accepted without an error."""
    parser = argparse.ArgumentParser(description=f"Damages valid files and feeds them to the {name} parser.")
    seconds = float(os.environ.get("FUZZ_SECONDS", 20))
    parser.add_argument("--seconds", type=float, default=seconds, help="how long (default: FUZZ_SECONDS, or 20)")
    parser.add_argument("--runs", type=int, help="how many inputs, instead of --seconds")
    parser.add_argument("--seed", type=int, default=1, help="same seed, same inputs (default 1)")
    parser.add_argument("--replay", type=Path, help="run one file and show what happens")
    options = parser.parse_args()
    if options.replay:
        target(options.replay.read_bytes())
        print("accepted")
        return
    for data in seeds:
        target(data)
    limit_memory(MEMORY_MB)
    end = time.monotonic() + options.seconds
    runs = 0
    while runs < options.runs if options.runs is not None else time.monotonic() < end:
        rng = random.Random(f"{name} {options.seed} {runs}")
        data = mutate(rng, rng.choice(seeds), seeds)
        fault = check(target, data)
        if fault:
            OUT.mkdir(parents=True, exist_ok=True)
            path = OUT / f"{name}-{options.seed}-{runs}"
            path.write_bytes(data)
            print(f"{fault}\n{name}: run {runs} of seed {options.seed} failed; the input is {path}", file=sys.stderr)
            sys.exit(1)
        runs += 1
    print(f"{name}: {runs} runs, nothing but Ds4Error came out")
