"""DeepSeek V4 (Flash and Pro): hyper-connected residual streams, one key head that is the value too, a raw window, rows
that stand for 4 or 128 tokens, an indexer that chooses among the former, experts routed by score or by token.

Hugging Face model_type "deepseek_v4" with the official tensor names (no `model.` prefix) and GGUF architecture
"deepseek4". `pieces` lists every tensor of a model with its names, its shape and how the official files store it: the
loader, the census of the files and the plan of a model that is not here all read that one list.

V4.1 is another architecture and refused. A drafter of the DSpark kind (`dspark_*` keys) is left out: the trunk is the
same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ds4.errors import ArgumentError, FileFormatError, UnsupportedError
from ds4.families import common, rope
from ds4.families.options import VECTOR_FORMATS, Options, Tensors
from ds4.families.rope_options import MAX_CTX
from ds4.files import Checkpoint, Tensor
from ds4.files.base import quote

RATIOS = (0, 4, 128)
OVERLAP = 4
TILE = 128  # an FP8 scale stands for so many rows and columns
FP4_BLOCK = 32

HF_ONLY = {key: allowed for key, allowed in common.HF_ONLY.items() if key != "quantization_config"} | {
    "hidden_act": ("silu",),
    "num_key_value_heads": (1,),
    "n_shared_experts": (1,),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "tie_word_embeddings": (False,),
    "expert_dtype": ("fp4", "fp8"),  # the tensors say it themselves
    "attention_dropout": (0.0, 0),
}
GGUF_ONLY = {
    "attention.head_count_kv": (1,),
    "expert_shared_count": (1,),
    "expert_weights_norm": (True,),
    "expert_gating_func": (4,),  # sqrtsoftplus
    "expert_group_count": (0,),
    "expert_group_used_count": (0,),
}
QUANTIZATION_ONLY = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3",),
    "scale_fmt": ("ue8m0",),
    "activation_scheme": ("dynamic",),
    "weight_block_size": ([TILE, TILE],),
}


@dataclass
class Sizes:
    """The dimensions, by the core's names."""

    n_layers: int
    vocab: int
    ctx: int
    dim: int
    n_heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    o_groups: int
    o_rank: int
    window: int
    ratios: list[int]
    index_heads: int
    index_dim: int
    index_keep: int
    n_experts: int
    n_experts_used: int
    expert_ffn_dim: int
    n_hash_layers: int
    route_scale: float
    swiglu_limit: float
    norm_eps: float
    streams: int
    mix_iterations: int
    mix_eps: float
    rope_freqs: list[float] = field(default_factory=list)
    compress_rope_freqs: list[float] = field(default_factory=list)
    has_mtp: bool = False

    def config(self, rounding: bool, mtp: bool) -> common.Config:
        """The settings of the core."""
        values = {key: value for key, value in vars(self).items() if key != "has_mtp"}
        if not any(self.ratios):
            del values["compress_rope_freqs"]
        return common.numbers(values | {"rounding": int(rounding), "mtp": int(mtp)})


# ---- the list of tensors ----


@dataclass(frozen=True)
class Piece:
    """One tensor: the core's name, the official one, the one in GGUF files, its shape, and how the official files store
    it ("FP8" and "FP4" have a second tensor with scales). `expert`: which of the matrices that GGUF files stack."""

    core: str
    official: str
    gguf: str
    shape: tuple[int, ...]
    stored: str
    expert: int | None = None


def pieces(s: Sizes, mtp: bool) -> Iterator[Piece]:
    """Every tensor of the model in the core's order; with the MTP block, the core's layer behind the last, if `mtp`."""
    flat = s.streams * s.dim
    yield Piece("embed", "embed.weight", "token_embd.weight", (s.vocab, s.dim), "BF16")
    yield Piece("head", "head.weight", "output.weight", (s.vocab, s.dim), "BF16")
    yield Piece("norm", "norm.weight", "output_norm.weight", (s.dim,), "BF16")
    yield from _head_mix("head_mix", "hc_head", "output_hc", s, flat)
    for layer in range(s.n_layers):
        yield from _layer(s, layer, f"layers.{layer}.", f"blk.{layer}.")
    if not mtp:
        return
    yield from _layer(s, s.n_layers, "mtp.0.", "mtp.0.")
    for name in ("e_proj", "h_proj"):
        yield Piece(f"mtp.{name}", f"mtp.0.{name}.weight", f"mtp.0.{name}.weight", (s.dim, s.dim), "FP8")
    for core, name in (("e_norm", "enorm"), ("h_norm", "hnorm"), ("norm", "norm")):
        yield Piece(f"mtp.{core}", f"mtp.0.{name}.weight", f"mtp.0.{name}.weight", (s.dim,), "BF16")
    yield from _head_mix("mtp.mix", "mtp.0.hc_head", "mtp.0.hc_head", s, flat)


def _head_mix(core: str, official: str, gguf: str, s: Sizes, flat: int) -> Iterator[Piece]:
    for part, shape in (("fn", (s.streams, flat)), ("scale", (1,)), ("base", (s.streams,))):
        yield Piece(f"{core}_{part}", f"{official}_{part}", f"{gguf}_{part}.weight", shape, "F32")


def _layer(s: Sizes, layer: int, official: str, gguf: str) -> Iterator[Piece]:
    ratio = s.ratios[layer] if layer < s.n_layers else 0
    heads, flat, mix = s.n_heads * s.head_dim, s.streams * s.dim, (2 + s.streams) * s.streams

    def piece(core: str, name: str, other: str, shape: tuple[int, ...], stored: str) -> Piece:
        return Piece(f"layers.{layer}.{core}", official + name, gguf + other, shape, stored)

    def mixing(part: str) -> Iterator[Piece]:
        for leaf, shape in (("fn", (mix, flat)), ("scale", (3,)), ("base", (mix,))):
            yield piece(f"{part}_mix_{leaf}", f"hc_{part}_{leaf}", f"hc_{part}_{leaf}.weight", shape, "F32")

    def compressor(core: str, name: str, other: str, width: int) -> Iterator[Piece]:
        wide = 2 * width if ratio == OVERLAP else width
        yield piece(f"{core}_kv", f"{name}.wkv.weight", f"{other}_kv.weight", (wide, s.dim), "BF16")
        yield piece(f"{core}_gate", f"{name}.wgate.weight", f"{other}_gate.weight", (wide, s.dim), "BF16")
        yield piece(f"{core}_ape", f"{name}.ape", f"{other}_ape.weight", (ratio, wide), "F32")
        yield piece(f"{core}_norm", f"{name}.norm.weight", f"{other}_norm.weight", (width,), "BF16")

    yield from mixing("attn")
    yield piece("attn_norm", "attn_norm.weight", "attn_norm.weight", (s.dim,), "BF16")
    yield piece("q_a", "attn.wq_a.weight", "attn_q_a.weight", (s.q_rank, s.dim), "FP8")
    yield piece("q_norm", "attn.q_norm.weight", "attn_q_a_norm.weight", (s.q_rank,), "BF16")
    yield piece("q_b", "attn.wq_b.weight", "attn_q_b.weight", (heads, s.q_rank), "FP8")
    yield piece("kv", "attn.wkv.weight", "attn_kv.weight", (s.head_dim, s.dim), "FP8")
    yield piece("kv_norm", "attn.kv_norm.weight", "attn_kv_a_norm.weight", (s.head_dim,), "BF16")
    yield piece("sink", "attn.attn_sink", "attn_sinks.weight", (s.n_heads,), "F32")
    joined = s.o_groups * s.o_rank
    yield piece("o_a", "attn.wo_a.weight", "attn_output_a.weight", (joined, heads // s.o_groups), "FP8")
    yield piece("o_b", "attn.wo_b.weight", "attn_output_b.weight", (s.dim, joined), "FP8")
    if ratio:
        yield from compressor("rows", "attn.compressor", "attn_compressor", s.head_dim)
    if ratio == OVERLAP:
        yield from compressor("index", "attn.indexer.compressor", "indexer_compressor", s.index_dim)
        shape = s.index_heads * s.index_dim, s.q_rank
        yield piece("index_q", "attn.indexer.wq_b.weight", "indexer.attn_q_b.weight", shape, "FP8")
        shape = s.index_heads, s.dim
        yield piece("index_weight", "attn.indexer.weights_proj.weight", "indexer.proj.weight", shape, "BF16")
    yield from mixing("ffn")
    yield piece("ffn_norm", "ffn_norm.weight", "ffn_norm.weight", (s.dim,), "BF16")
    yield piece("router", "ffn.gate.weight", "ffn_gate_inp.weight", (s.n_experts, s.dim), "BF16")
    if layer < min(s.n_hash_layers, s.n_layers):
        shape = s.vocab, s.n_experts_used
        yield piece("router_ids", "ffn.gate.tid2eid", "ffn_gate_tid2eid.weight", shape, "I64")
    else:
        yield piece("router_bias", "ffn.gate.bias", "exp_probs_b.bias", (s.n_experts,), "F32")
    parts = (
        ("gate", "w1", (s.expert_ffn_dim, s.dim)),
        ("up", "w3", (s.expert_ffn_dim, s.dim)),
        ("down", "w2", (s.dim, s.expert_ffn_dim)),
    )
    for core, name, shape in parts:
        yield piece(f"shared.{core}", f"ffn.shared_experts.{name}.weight", f"ffn_{core}_shexp.weight", shape, "FP8")
    for e in range(s.n_experts):
        for core, name, shape in parts:
            yield Piece(
                f"layers.{layer}.experts.{e}.{core}", f"{official}ffn.experts.{e}.{name}.weight",
                f"{gguf}ffn_{core}_exps.weight", shape, "FP4", e,
            )  # fmt: skip


def stored_bytes(piece: Piece) -> tuple[int, int]:
    """(tensors, bytes) of a piece in the official files, scales included."""
    count = math.prod(piece.shape)
    if piece.stored == "FP8":
        rows, cols = piece.shape
        return 2, count + -(-rows // TILE) * -(-cols // TILE)
    if piece.stored == "FP4":
        return 2, count // 2 + count // FP4_BLOCK
    return 1, count * {"BF16": 2, "F32": 4, "I64": 8}[piece.stored]


# ---- the official files ----


def sizes_of(options: Options) -> Sizes:
    """The sizes that config.json gives; every key that is not known is refused."""
    common.check_class(options, "DeepseekV4ForCausalLM")
    common.check_only(options, HF_ONLY)
    if options.raw("quantization_config", None) is not None:
        quantization = options.object("quantization_config")
        common.check_only(quantization, QUANTIZATION_ONLY)
        quantization.finish()
    n_layers = options.count("num_hidden_layers", most=common.MAX_LAYERS)
    s = Sizes(
        n_layers=n_layers,
        vocab=options.count("vocab_size"),
        ctx=options.count("max_position_embeddings", most=MAX_CTX),
        dim=options.count("hidden_size"),
        n_heads=options.count("num_attention_heads", most=4096),
        head_dim=options.count("head_dim", most=4096),
        rope_dim=options.count("qk_rope_head_dim", most=4096),
        q_rank=options.count("q_lora_rank", most=1 << 20),
        o_groups=options.count("o_groups", most=4096),
        o_rank=options.count("o_lora_rank", most=1 << 20),
        window=options.count("sliding_window", most=1 << 20),
        ratios=_ratios(options.raw("compress_ratios"), options.name("compress_ratios"), n_layers),
        index_heads=options.count("index_n_heads", most=4096),
        index_dim=options.count("index_head_dim", most=4096),
        index_keep=options.count("index_topk", most=1 << 16),
        n_experts=options.count("n_routed_experts", most=common.MAX_EXPERTS),
        n_experts_used=options.count("num_experts_per_tok"),
        expert_ffn_dim=options.count("moe_intermediate_size", most=1 << 22),
        n_hash_layers=_from_zero(options, "num_hash_layers"),
        route_scale=options.number("routed_scaling_factor"),
        swiglu_limit=options.number("swiglu_limit"),
        norm_eps=options.number("rms_norm_eps"),
        streams=options.count("hc_mult", most=16),
        mix_iterations=options.count("hc_sinkhorn_iters", most=1000),
        mix_eps=options.number("hc_eps"),
    )
    s.rope_freqs = rope.plain(s.rope_dim, options.number("rope_theta", 10000.0, 1.0))
    theta = options.number("compress_rope_theta", above=1.0)
    s.compress_rope_freqs = _compress_freqs(options, s.rope_dim, theta)
    s.has_mtp = _from_zero(options, "num_nextn_predict_layers") == 1
    drafter = [key for key in options.keys() if key.startswith("dspark_")]
    for key in drafter:
        options.raw(key)
    if drafter:  # mtp.* is a drafter then, whatever the count says
        s.has_mtp = False
    options.finish(common.HF_HARMLESS)
    check(s, options.where)
    return s


def _from_zero(options: Options, key: str) -> int:
    """A whole number from 0 on."""
    value = options.raw(key, 0)
    return 0 if value == 0 and type(value) is int else options.count(key, most=4096)


def _ratios(value: object, name: str, n_layers: int) -> list[int]:
    """`compress_ratios` has an entry for each layer and further ones, for MTP or a drafter, that are not read."""
    values = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(values, list) or len(values) < n_layers or not all(type(v) is int for v in values):
        raise FileFormatError(f"{name} must be a list with a whole number for each of the {n_layers} layers.")
    other = next((v for v in values[:n_layers] if v not in RATIOS), None)
    if other is not None:
        raise UnsupportedError(f"{name} holds {quote(other)}; this version computes with 0, 4 and 128.")
    return values[:n_layers]


def _compress_freqs(options: Options, rope_dim: int, theta: float) -> list[float]:
    freqs = rope.plain(rope_dim, theta)
    if options.raw("rope_scaling", None) is None:
        return freqs
    r = options.object("rope_scaling")
    kind = r.text("rope_type", r.raw("type", "default"))
    r.only("type", kind)
    if kind != "yarn":
        raise UnsupportedError(f"{r.name('type')} is {quote(kind)}; layers with compressed rows use yarn.")
    original = r.count("original_max_position_embeddings", most=MAX_CTX)
    beta = r.number("beta_fast", 32.0), r.number("beta_slow", 1.0)
    freqs = rope.yarn(freqs, theta, r.number("factor"), original, *beta)
    r.finish()
    return freqs


def check(s: Sizes, where: str) -> None:
    """Raises FileFormatError when sizes do not fit together, UnsupportedError when they are more than is read."""
    if s.n_heads % s.o_groups:
        raise FileFormatError(f"{where}: {s.n_heads} heads do not divide into {s.o_groups} output groups.")
    if s.rope_dim % 2 or s.rope_dim > min(s.head_dim, s.index_dim):
        raise FileFormatError(
            f"{where}: {s.rope_dim} rotary numbers do not fit heads of {s.head_dim} and {s.index_dim}."
        )
    if s.index_dim & (s.index_dim - 1):
        raise UnsupportedError(f"{where}: an indexer with heads of {s.index_dim} is not known; a power of two is.")
    if not 2 <= s.streams <= s.vocab:
        raise UnsupportedError(
            f"{where}: {s.streams} residual streams; from 2 on, and no more than tokens, are computed."
        )
    if s.n_experts_used > s.n_experts:
        raise FileFormatError(f"{where}: each token uses {s.n_experts_used} of {s.n_experts} experts.")
    if 3 * s.n_experts * (s.n_layers + 1) > common.MAX_EXPERT_TENSORS:
        raise FileFormatError(
            f"{where}: {s.n_layers} layers of {s.n_experts} experts have more than the {common.MAX_EXPERT_TENSORS} "
            "tensors that are read."
        )
    if not all(math.isfinite(f) and 0.0 < f < 1e6 for f in (*s.rope_freqs, *s.compress_rope_freqs)):
        raise FileFormatError(f"{where}: the rope options give frequencies that are not usable numbers.")


def from_hf(checkpoint: Checkpoint, rounding: bool, mtp: bool) -> common.Parts:
    """Config and tensors of a folder with the official files for the core."""
    options = Options(checkpoint.metadata, f"{checkpoint.path}/config.json")
    s = sizes_of(options)
    _check_mtp(checkpoint, s, mtp)
    tensors = Tensors(checkpoint)
    for piece in pieces(s, mtp):
        _add(tensors, piece, _scaled(tensors, piece), s)
    for name in checkpoint.tensors:
        if not mtp and name.startswith("mtp."):
            tensors.skip(name)
    return s.config(rounding, mtp), tensors.finish()


def _check_mtp(checkpoint: Checkpoint, s: Sizes, mtp: bool) -> None:
    if mtp and not s.has_mtp:
        raise ArgumentError(f"{checkpoint.path}: holds no MTP block; make the engine without mtp=True.")


def _scaled(tensors: Tensors, piece: Piece) -> Tensor:
    """The tensor of a piece, with its scales when it has some."""
    found = tensors.checkpoint.tensors.get(piece.official)
    name = piece.official.removesuffix(".weight") + ".scale"
    scale = tensors.checkpoint.tensors.get(name)
    if found is None or len(piece.shape) != 2 or found.format not in ("F8_E4M3", "I8"):
        return _plain(tensors, piece.official, piece)
    rows, cols = piece.shape
    packed = found.format == "I8"
    if packed and cols % FP4_BLOCK:
        raise FileFormatError(f"{tensors.checkpoint.path}: {cols} columns of FP4 do not divide into blocks of 32.")
    found = tensors.find_as(piece.official, ("F8_E4M3", "I8"), rows, cols // 2 if packed else cols)
    if scale is not None and scale.format != "F8_E8M0":
        raise UnsupportedError(
            f"{tensors.checkpoint.path}: tensor {quote(name)} is {scale.format}; scales are read as F8_E8M0. Base "
            "models store F32 scales: convert them first."
        )
    shape = (rows, cols // FP4_BLOCK) if packed else (-(-rows // TILE), -(-cols // TILE))
    scale = tensors.find_as(name, ("F8_E8M0",), *shape)
    return Tensor(found.name, "FP4" if packed else "FP8", piece.shape, found.data, scale.data)


def _plain(tensors: Tensors, name: str, piece: Piece) -> Tensor:
    if piece.core.endswith("router_ids"):
        return tensors.find_as(name, ("I64", "I32"), *piece.shape)
    return tensors.find(name, *piece.shape)


def _add(tensors: Tensors, piece: Piece, tensor: Tensor, s: Sizes) -> None:
    """Gives a tensor to the core: the output matrix group by group, tables as vectors, expert numbers as F32."""
    if piece.core.endswith(".o_a"):
        for g, part in enumerate(_row_groups(tensors.checkpoint, tensor, s.o_groups)):
            tensors.add(f"{piece.core}.{g}", part)
    elif piece.core.endswith(".router_ids"):
        tensors.add(piece.core, _expert_numbers(tensors.checkpoint, tensor, s.n_experts))
    elif piece.core.endswith("_ape"):
        if tensor.format not in VECTOR_FORMATS:
            raise UnsupportedError(
                f"{tensors.checkpoint.path}: tensor {quote(tensor.name)} is stored as {tensor.format}; this version "
                f"reads it as {', '.join(VECTOR_FORMATS)}."
            )
        tensors.add(piece.core, Tensor(tensor.name, tensor.format, (math.prod(tensor.shape),), tensor.data))
    else:
        tensors.add(piece.core, tensor)


def _row_groups(checkpoint: Checkpoint, tensor: Tensor, groups: int) -> Iterator[Tensor]:
    """The matrix as `groups` matrices of equally many rows; the bytes stay where they are."""
    rows, cols = tensor.shape[0] // groups, tensor.shape[1]
    size = len(tensor.data) // groups
    if tensor.scales is not None and rows % TILE:
        raise UnsupportedError(
            f"{checkpoint.path}: tensor {quote(tensor.name)} has output groups of {rows} rows, which its FP8 scales "
            f"(one for {TILE} rows) do not follow."
        )
    for g in range(groups):
        scales = None
        if tensor.scales is not None:
            step = len(tensor.scales) // groups
            scales = tensor.scales[g * step : (g + 1) * step]
        data = tensor.data[g * size : (g + 1) * size]
        yield Tensor(f"{tensor.name}[{g}]", tensor.format, (rows, cols), data, scales)


def _expert_numbers(checkpoint: Checkpoint, tensor: Tensor, n_experts: int) -> Tensor:
    ids = np.frombuffer(tensor.data, "<i8" if tensor.format == "I64" else "<i4")
    if ids.size and not 0 <= ids.min() <= ids.max() < n_experts:
        raise FileFormatError(
            f"{checkpoint.path}: tensor {quote(tensor.name)} names experts from {ids.min()} to {ids.max()}; the model "
            f"has {n_experts}."
        )
    values = ids.astype("<f4")
    values.flags.writeable = False
    return Tensor(tensor.name, "F32", (ids.size,), values.view(np.uint8).data)


# ---- GGUF ----


def from_gguf(checkpoint: Checkpoint, rounding: bool, mtp: bool) -> common.Parts:
    """Config and tensors of a GGUF file for the core."""
    options = common.gguf_options(checkpoint)
    common.check_only(options, GGUF_ONLY)
    s = _gguf_sizes(checkpoint, options)
    _check_mtp(checkpoint, s, mtp)
    tensors = Tensors(checkpoint)
    stacked: dict[str, list[Tensor]] = {}
    for piece in pieces(s, mtp):
        if piece.expert is None:
            _add(tensors, piece, _plain(tensors, piece.gguf, piece), s)
            continue
        if piece.gguf not in stacked:
            stacked[piece.gguf] = list(common.split(tensors.find(piece.gguf, s.n_experts, *piece.shape)))
        tensors.add(piece.core, stacked[piece.gguf][piece.expert])
    for name in checkpoint.tensors:
        if not mtp and name.startswith("mtp."):
            tensors.skip(name)
    return s.config(rounding, mtp), tensors.finish()


def _gguf_sizes(checkpoint: Checkpoint, options: Options) -> Sizes:
    n_layers = options.count("block_count", most=common.MAX_LAYERS)
    head_dim = options.count("attention.key_length", most=4096)
    options.only("attention.value_length", head_dim)
    ratios = "attention.compress_ratios"
    s = Sizes(
        n_layers=n_layers,
        vocab=options.count("vocab_size", checkpoint.tensor("token_embd.weight").shape[0]),
        ctx=options.count("context_length", most=MAX_CTX),
        dim=options.count("embedding_length"),
        n_heads=options.count("attention.head_count", most=4096),
        head_dim=head_dim,
        rope_dim=options.count("rope.dimension_count", most=4096),
        q_rank=options.count("attention.q_lora_rank", most=1 << 20),
        o_groups=options.count("attention.output_group_count", most=4096),
        o_rank=options.count("attention.output_lora_rank", most=1 << 20),
        window=options.count("attention.sliding_window", most=1 << 20),
        ratios=_ratios(options.raw(ratios), options.name(ratios), n_layers),
        index_heads=options.count("attention.indexer.head_count", most=4096),
        index_dim=options.count("attention.indexer.key_length", most=4096),
        index_keep=options.count("attention.indexer.top_k", most=1 << 16),
        n_experts=options.count("expert_count", most=common.MAX_EXPERTS),
        n_experts_used=options.count("expert_used_count"),
        expert_ffn_dim=options.count("expert_feed_forward_length", most=1 << 22),
        n_hash_layers=_from_zero(options, "hash_layer_count"),
        route_scale=options.number("expert_weights_scale"),
        swiglu_limit=_one_for_all(options, "swiglu_clamp_exp"),
        norm_eps=options.number("attention.layer_norm_rms_epsilon"),
        streams=options.count("hyper_connection.count", most=16),
        mix_iterations=options.count("hyper_connection.sinkhorn_iterations", most=1000),
        mix_eps=options.number("hyper_connection.epsilon"),
    )
    if "swiglu_clamp_shexp" in options and _one_for_all(options, "swiglu_clamp_shexp") != s.swiglu_limit:
        raise UnsupportedError(f"{options.name('swiglu_clamp_shexp')} differs from swiglu_clamp_exp.")
    s.rope_freqs = rope.plain(s.rope_dim, options.number("rope.freq_base", 10000.0, 1.0))
    s.compress_rope_freqs = _gguf_compress_freqs(options, s.rope_dim)
    s.has_mtp = any(name.startswith("mtp.0.") for name in checkpoint.tensors)
    _from_zero(options, "nextn_predict_layers")
    options.finish()
    check(s, options.where)
    return s


def _one_for_all(options: Options, key: str) -> float:
    """A number, or an array that says the same of every layer."""
    value = options.raw(key)
    if not isinstance(value, np.ndarray):
        return options.number(key)
    if not value.size or value.dtype.kind != "f" or not (value == value[0]).all() or not 0 < value[0] < 1e6:
        raise UnsupportedError(f"{options.name(key)} must hold one number above 0, the same for every layer.")
    return float(value[0])


def _gguf_compress_freqs(options: Options, rope_dim: int) -> list[float]:
    theta = options.number("attention.compress_rope_freq_base", above=1.0)
    freqs = rope.plain(rope_dim, theta)
    kind = options.text("rope.scaling.type", "none")
    if kind == "none":
        return freqs
    if kind != "yarn":
        raise UnsupportedError(
            f"{options.name('rope.scaling.type')} is {quote(kind)}; layers with compressed rows use yarn."
        )
    factor = options.number("rope.scaling.factor")
    original = options.count("rope.scaling.original_context_length", most=MAX_CTX)
    beta = options.number("rope.scaling.yarn_beta_fast", 32.0), options.number("rope.scaling.yarn_beta_slow", 1.0)
    # cos and sin are not scaled: a writer that names the factor must take back what YaRN itself would bring
    magnitude = rope.yarn_magnitude(factor)
    if abs(options.number("rope.scaling.attn_factor", 1.0 / magnitude) * magnitude - 1.0) > 1e-4:
        raise UnsupportedError(
            f"{options.name('rope.scaling.attn_factor')} scales cos and sin, which this family does not."
        )
    return rope.yarn(freqs, theta, factor, original, *beta)
