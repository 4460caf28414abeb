"""SentencePiece: equal to the library on its own files, control tokens only on demand, spaces where they belong."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corrupt import make_spm
from corrupt.make_spm import BYTE, BYTES, CONTROL, NORMAL, UNKNOWN, USER
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from ds4 import tokenizer as tokenizers
from ds4.errors import FileFormatError, UnsupportedError
from ds4.files import Checkpoint, open_checkpoint
from ds4.tokenizer import Tokenizer, proto
from ds4.tokenizer.spm_json import SpmJsonTokenizer

DATA = Path(__file__).resolve().parent / "data"
VECTORS = json.loads((DATA / "tokenizer_vectors.json").read_text("utf-8"))["gemma3"]
TEXTS = [
    *(vector["text"] for vector in VECTORS),
    "<s>", "</s>x<unk>", "<0x41>", "\0", "a\0b", "   a   b  ", "\u2581", "a\u2581 b", "<table><tr>", "[INST] a [/INST]",
    "\n\n\n\n", " \n ", "😀" * 40, "the cat the cat " * 20,
]  # fmt: skip
TEXT = st.sampled_from(TEXTS) | st.text(max_size=40) | st.text("ab the<>[]s/\n \u2581😀0x", max_size=40)
CORPUS = [f"the cat {i} sat on the mat, café {i * 7} times; 'don't' <table> {chr(0x4E00 + i % 9)}" for i in range(300)]

# ---- Gemma ----


@pytest.fixture(scope="module")
def gemma(gemma3_path):
    with open_checkpoint(gemma3_path) as checkpoint:
        yield tokenizers.load(checkpoint)


@pytest.mark.model
@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: ascii(v["text"][:20]))
def test_gemma_vectors(gemma, vector):
    assert gemma.encode(vector["text"]) == vector["plain"]
    assert gemma.encode(vector["text"], special=True) == vector["special"]
    assert gemma.decode(vector["plain"]) == vector["text"]
    stream = gemma.stream()
    assert "".join(map(stream.feed, vector["plain"])) + stream.flush() == vector["text"]


@pytest.mark.model
def test_gemma_properties(gemma):
    assert (gemma.vocab_size, gemma.bos_id, gemma.add_bos) == (262144, 2, True)
    assert gemma.eos_ids == {1, 106}
    assert gemma.encode("<start_of_turn>user\n", special=True) == [105, 2364, 107]
    for text in ("<start_of_turn>", "<start_of_image>", "[multimodal]", "<bos>", "<unused7>"):
        assert gemma.decode(gemma.encode(text)) == text
        assert not gemma.control.keys() & {gemma.decode([i]) for i in gemma.encode(text)}
    assert gemma.encode("<table>") == [168]  # HTML is text to this model
    assert gemma.token_bytes(238 + 0xE9) == b"\xe9" and gemma.token_bytes(138) == b"  "


# ---- equal to the library ----


@functools.cache
def trained(**options: Any) -> bytes:
    """A model file of the library's own trainer."""
    out = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=out, minloglevel=2, num_threads=1, hard_vocab_limit=False,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
        **{"vocab_size": 420, "byte_fallback": True, **options},
    )  # fmt: skip
    return out.getvalue()


def folder(tmp_path: Path, model: bytes | None, config: dict[str, Any] | None = None, **files: Any) -> Checkpoint:
    """A safetensors folder's text files; `files` by name without .json."""
    if model is not None:
        (tmp_path / "tokenizer.model").write_bytes(model)
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    return Checkpoint(str(tmp_path), "safetensors", "llama", config or {}, {})


def loaded(checkpoint: Checkpoint) -> Tokenizer:
    found = tokenizers.load(checkpoint)
    assert found is not None
    return found


KINDS = {
    "bpe": {"model_type": "bpe"},
    "unigram": {"model_type": "unigram"},
    "no dummy prefix": {"model_type": "bpe", "add_dummy_prefix": False},
    "no bytes": {"model_type": "bpe", "byte_fallback": False, "vocab_size": 160},
    "user-defined": {"model_type": "bpe", "user_defined_symbols": "  ,\u2581\u2581\u2581,<table>,<tr>,\n\n,cat"},
    "unigram, user-defined": {"model_type": "unigram", "user_defined_symbols": "<table>,\n\n,cat"},
    "other ids": {"model_type": "bpe", "unk_id": 3, "bos_id": 2, "eos_id": 1, "pad_id": 0},
}


@pytest.fixture(scope="module", params=KINDS, ids=lambda name: name.replace(" ", "_"))
def pair(request, tmp_path_factory):
    """(our tokenizer, the library with the file itself)."""
    data = trained(**KINDS[request.param])
    tokenizer = loaded(folder(tmp_path_factory.mktemp("spm"), data))
    return tokenizer, SentencePieceProcessor(model_proto=data)


@given(text=TEXT)
def test_ids_are_those_of_the_library(pair, text):
    tokenizer, library = pair
    assert tokenizer.encode(text) == library.EncodeAsIds(text)


@given(text=TEXT)
def test_round_trip(pair, text):
    tokenizer, library = pair
    ids = tokenizer.encode(text)
    if library.unk_id() not in ids:
        assert tokenizer.decode(ids) == text.replace("\u2581", " ")
    stream = tokenizer.stream()
    streamed = "".join(map(stream.feed, ids)) + stream.flush()
    assert streamed in (tokenizer.decode(ids), " " + tokenizer.decode(ids))


def as_gguf(library: SentencePieceProcessor, prefix: bool) -> Checkpoint:
    """The vocabulary of a library's model as a GGUF file has it."""
    ids = range(library.vocab_size())

    def kind(i: int) -> int:
        if library.is_unknown(i) or library.is_control(i):
            return UNKNOWN if library.is_unknown(i) else CONTROL
        return BYTE if library.is_byte(i) else NORMAL

    values = {
        "model": "llama", "tokens": [library.id_to_piece(i) for i in ids], "add_space_prefix": prefix,
        "scores": np.array([library.get_score(i) for i in ids], np.float32), "token_type": np.array([*map(kind, ids)]),
        "bos_token_id": library.bos_id(), "eos_token_id": library.eos_id(), "unknown_token_id": library.unk_id(),
    }  # fmt: skip
    return Checkpoint("x.gguf", "gguf", "llama", {f"tokenizer.ggml.{k}": v for k, v in values.items()}, {})


@pytest.mark.parametrize("prefix", [True, False])
def test_a_gguf_of_the_same_model_gives_the_same_ids(tmp_path, prefix):
    data = trained(model_type="bpe", add_dummy_prefix=prefix)
    library = SentencePieceProcessor(model_proto=data)
    of_gguf, of_model = loaded(as_gguf(library, prefix)), loaded(folder(tmp_path, data))
    for text in TEXTS:
        assert of_gguf.encode(text) == library.EncodeAsIds(text), text
        assert of_gguf.encode(text, special=True) == of_model.encode(text, special=True)
    assert (of_gguf.bos_id, of_gguf.eos_ids, of_gguf.add_bos) == (1, {2}, True)


def converted(library: SentencePieceProcessor, prefix: bool) -> dict[str, Any]:
    """A tokenizer.json as converters make it: merges in the order of the scores of what they make."""
    ids = range(library.vocab_size())
    vocab = {library.id_to_piece(i): i for i in ids}
    whole = {i for i in ids if library.is_control(i) or library.is_unknown(i)}
    merges = []
    for text, i in vocab.items():
        if i in whole or library.is_byte(i):
            continue
        cuts = [(text[:k], text[k:]) for k in range(1, len(text)) if text[:k] in vocab and text[k:] in vocab]
        merges += [(-library.get_score(i), vocab[a], vocab[b], a, b) for a, b in cuts]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    return {
        "added_tokens": [{"id": i, "content": library.id_to_piece(i), "special": True} for i in sorted(whole)],
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]} if prefix else replace,
        "pre_tokenizer": None,
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": vocab,
                  "merges": [[a, b] for *_, a, b in sorted(merges)]},
    }  # fmt: skip


@pytest.fixture(scope="module", params=[True, False], ids=["dummy_prefix", "no_prefix"])
def json_pair(request, tmp_path_factory):
    library = SentencePieceProcessor(model_proto=trained(model_type="bpe", add_dummy_prefix=request.param))
    path = tmp_path_factory.mktemp("spm")
    return loaded(folder(path, None, tokenizer=converted(library, request.param))), library


@given(text=TEXT)
def test_a_converted_tokenizer_json_gives_the_same_ids(json_pair, text):
    tokenizer, library = json_pair
    assert isinstance(tokenizer, SpmJsonTokenizer)
    assert tokenizer.encode(text) == library.EncodeAsIds(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("\u2581", " ")


def test_the_original_beside_a_tokenizer_json_is_read(tmp_path):
    data = trained(model_type="unigram")
    library = SentencePieceProcessor(model_proto=data)
    parts = converted(library, True)
    parts["model"] = {"type": "Unigram", "vocab": []}
    parts["added_tokens"].append({"id": library.vocab_size(), "content": "<|im_end|>", "special": True})
    parts["added_tokens"].append({"id": library.vocab_size() + 1, "content": "catcat", "special": False})
    tokenizer = loaded(folder(tmp_path, data, tokenizer=parts))
    assert tokenizer.control["<|im_end|>"] == library.vocab_size()
    assert tokenizer.encode("a catcat")[-1] == library.vocab_size() + 1
    assert tokenizer.encode("<|im_end|>") == library.EncodeAsIds("<|im_end|>")
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(UnsupportedError, match="'Unigram'; put the model's tokenizer.model"):
        tokenizers.load(folder(tmp_path, None))


@pytest.mark.parametrize("prefix", [True, False])
def test_runs_of_spaces_in_a_gguf_go_before_pieces(prefix):
    """A converted file spells user-defined pieces with spaces, and may have a normal piece of the same text."""
    tokens = ["<unk>", "\u2581", "a", "\u2581\u2581", "  ", "\u2581a"]
    values = {
        "model": "llama", "tokens": tokens, "scores": np.array([0, -9, -9, -1, 0, -2], np.float32),
        "token_type": np.array([2, 1, 1, 1, 4, 1]), "add_space_prefix": prefix, "add_bos_token": False,
    }  # fmt: skip
    tokenizer = loaded(Checkpoint("x.gguf", "gguf", "llama", {f"tokenizer.ggml.{k}": v for k, v in values.items()}, {}))
    assert tokenizer.encode("a  a") == ([5, 4, 2] if prefix else [2, 4, 2])
    assert tokenizer.decode(tokenizer.encode("a  a")) == "a  a" and tokenizer.decode([2, 3, 2]) == "a  a"


# ---- spaces (Llama 2's kind has a dummy prefix, Gemma's has none) ----

LLAMA = (
    ("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), *BYTES,
    *((c, -100.0, NORMAL) for c in "\u2581abcdehrsu"), ("\u2581a", -1.0, NORMAL), ("\u2581\u2581", -2.0, NORMAL),
    ("us", -3.0, NORMAL), ("er", -4.0, NORMAL), ("user", -5.0, NORMAL), ("\u2581user", -6.0, NORMAL),
)  # fmt: skip


def small(tmp_path: Path, pieces: Any = LLAMA, prefix: bool = True, **files: Any) -> Tokenizer:
    data = make_spm.model(pieces, normalizer={3: prefix, 4: 0}, trainer={3: 2, 35: 1})
    return loaded(folder(tmp_path, data, **files))


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[bytes]:
    return [tokenizer.token_bytes(i) for i in ids]


def test_the_dummy_prefix_stands_at_the_start_and_behind_control_tokens_only(tmp_path):
    tokenizer = small(tmp_path)
    for text, pieces in (
        ("", []),
        (" ", [b"  "]),
        ("a", [b" a"]),
        (" a", [b" ", b" a"]),
        ("a a", [b" a", b" a"]),
        ("</s>", [b"</s>"]),
        ("a</s>a", [b" a", b"</s>", b" a"]),
        ("<s><s>a", [b"<s>", b"<s>", b" a"]),
    ):
        ids = tokenizer.encode(text, special=True)
        assert pieces_of(tokenizer, ids) == pieces, text
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode("a") + tokenizer.encode("a")) == "a a"


def test_without_a_dummy_prefix_there_is_no_space(tmp_path):
    tokenizer = small(tmp_path, prefix=False)
    for text in ("", " ", "a", "a</s>a", "  a"):
        ids = tokenizer.encode(text, special=True)
        assert b"".join(pieces_of(tokenizer, ids)).decode() == tokenizer.decode(ids) == text


def test_a_stream_keeps_the_space_of_a_word_that_goes_on(tmp_path):
    tokenizer = small(tmp_path)
    stream = tokenizer.stream()
    assert stream.feed(tokenizer.encode("a")[0]) == " a"


def test_what_no_piece_spells_is_bytes(tmp_path):
    tokenizer = small(tmp_path)
    ids = tokenizer.encode("a😀a")
    assert pieces_of(tokenizer, ids) == [b" a", b"\xf0", b"\x9f", b"\x98", b"\x80", b"a"]
    assert tokenizer.decode(ids) == "a😀a"
    stream = tokenizer.stream()
    assert [stream.feed(i) for i in ids] == [" a", "", "", "", "😀", "a"]
    cut = tokenizer.stream()
    assert "".join(map(cut.feed, ids[:3])) + cut.flush() == " a\ufffd"


# ---- control tokens ----


def test_no_text_becomes_a_control_token(tmp_path):
    """Even where pieces would merge to its text, or it is a single character."""
    pieces = (*LLAMA, ("<", -9.0, NORMAL), (">", -9.0, NORMAL), ("<s", -1.0, NORMAL), ("e", -1.0, CONTROL))
    tokenizer = small(tmp_path, tuple(p for p in pieces if p[:2] != ("e", -100.0)))
    for text in ("<s>", "</s>", "e", "<unk>", "<0x41>"):
        assert not set(tokenizer.encode(text)) & {0, *tokenizer.control.values()}
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<s>", special=True) == [1]


def test_user_defined_pieces_are_text_unless_they_are_tags(tmp_path):
    added = ("<table>", "  ", "<think>", "[INST]", "</div>")
    tokenizer = small(tmp_path, (*LLAMA, *((text, 0.0, USER) for text in added)), prefix=False)
    first = len(LLAMA)
    assert tokenizer.encode("<table>a</div>") == [first, tokenizer.encode("a")[0], first + 4]
    assert tokenizer.control.keys() - {"<s>", "</s>", "<unk>"} == {"<think>", "[INST]"}
    assert tokenizer.decode(tokenizer.encode("<think>[INST]")) == "<think>[INST]"
    assert tokenizer.encode("<think>a", special=True)[0] == first + 2


def test_names_decide_what_begins_and_ends(tmp_path):
    tokenizer = small(tmp_path)
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.eos_ids) == (1, True, {2})
    config = {"bos_token": {"content": "</s>"}, "eos_token": "<s>", "add_bos_token": False}
    tokenizer = small(tmp_path, tokenizer_config=config)
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.eos_ids) == (2, False, {1})


def test_added_tokens_of_a_folder_without_tokenizer_json(tmp_path):
    tokenizer = small(tmp_path, added_tokens={"<|im_end|>": len(LLAMA), "<s>": 1})
    assert tokenizer.encode("<|im_end|>", special=True) == [len(LLAMA)]
    with pytest.raises(FileFormatError, match="token 3 is '<0x00>', but a file beside it adds '<x>'"):
        small(tmp_path, added_tokens={"<x>": 3})


def test_a_vocabulary_file_that_belongs_to_another_model(tmp_path):
    library = SentencePieceProcessor(model_proto=trained(model_type="bpe"))
    with pytest.raises(FileFormatError, match="in tokenizer.model .* do not belong together"):
        small(tmp_path, tokenizer=converted(library, True))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("normalizer", None),
        ("normalizer", {"type": "Lowercase"}),
        ("normalizer", {"type": "Replace", "pattern": {"String": " "}, "content": "_"}),
        ("pre_tokenizer", {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}),
        ("pre_tokenizer", {"type": "Digits", "individual_digits": True}),
    ],
)
def test_other_steps_of_a_converted_tokenizer_are_refused_with_the_way_out(tmp_path, key, value):
    library = SentencePieceProcessor(model_proto=trained(model_type="bpe"))
    with pytest.raises(UnsupportedError, match="put the model's tokenizer.model, the original, beside it"):
        tokenizers.load(folder(tmp_path, None, tokenizer=converted(library, False) | {key: value}))


def test_a_converted_tokenizer_without_all_bytes(tmp_path):
    library = SentencePieceProcessor(model_proto=trained(model_type="bpe"))
    parts = converted(library, False)
    parts["model"]["vocab"]["<0xAX>"] = parts["model"]["vocab"].pop("<0xAB>")
    with pytest.raises(FileFormatError, match="byte_fallback but no token <0xAB>"):
        tokenizers.load(folder(tmp_path, None, tokenizer=parts))


def test_fingerprints_differ_with_the_ids(tmp_path):
    prints = {
        small(tmp_path, pieces, prefix).fingerprint()
        for pieces in (LLAMA, LLAMA[:-1], (*LLAMA[:-1], ("\u2581user", -7.0, NORMAL)))
        for prefix in (True, False)
    }
    assert len(prints) == 6 and all(len(p) == 32 for p in prints)
    assert small(tmp_path).fingerprint() == small(tmp_path).fingerprint()


# ---- the file ----

PIECE = st.tuples(
    st.text(max_size=200).filter(lambda text: text.isprintable()),
    st.floats(-1e9, 1e9, width=32),
    st.sampled_from(range(1, 7)),
)


@given(pieces=st.lists(PIECE, min_size=1, max_size=20), kind=st.sampled_from((1, 2)))
def test_what_is_written_is_read_again(pieces, kind):
    texts, scores, types = zip(*pieces, strict=True)
    model = proto.Model(kind, list(texts), np.array(scores, np.float32), np.array(types, np.uint8), False)
    data = proto.write(model)
    with pytest.raises(UnsupportedError):  # the default of the format
        proto.read(data + make_spm.span(3, make_spm.number(4, 1)), "x")
    found = proto.read(data, "x")
    assert (found.kind, found.texts, found.types.tolist()) == (kind, list(texts), list(types))
    assert found.scores.tobytes() == model.scores.tobytes()


def test_fields_in_another_order_and_unknown_ones_are_read():
    inner = make_spm.number(3, 4) + make_spm.number(99, 5) + b"\x15" + b"\0\0\x80?" + make_spm.span(1, b"x")
    plain = proto.read(
        make_spm.model(more=make_spm.span(1, inner) + make_spm.span(200, b"?") + b"\x31" + bytes(8)), "x"
    )
    assert plain.texts[-1] == "x" and plain.types[-1] == USER and plain.scores[-1] == 1
