"""The Llama family: Llama 1 to 3, and all models that are published under the same architecture name (SmolLM2,
TinyLlama, Yi, ...).

RMSNorm, rotary attention with grouped key/value heads, SwiGLU; no biases. Two sources: GGUF files with
general.architecture "llama" (names as llama.cpp's converter writes them) and Hugging Face folders with model_type
"llama".

A GGUF file holds the rows of q and k reordered so that a rotary pair lies at 2i and 2i+1 (`rope_interleaved` 1);
Hugging Face pairs i with i + head_dim/2 (`rope_interleaved` 0).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from ds4.errors import FileFormatError, UnsupportedError
from ds4.families import rope
from ds4.families.options import Options, Tensors
from ds4.files import Checkpoint, Tensor
from ds4.files.base import quote

MAX_CTX = 2**31 - 1
MAX_HEAD_DIM = 1 << 16

# keys of config.json that do not change the logits of a text model at inference
HF_HARMLESS = frozenset(
    """
    model_type dtype torch_dtype transformers_version _name_or_path name_or_path use_cache initializer_range
    attention_dropout hidden_dropout resid_pdrop embd_pdrop bos_token_id eos_token_id pad_token_id unk_token_id
    sep_token_id decoder_start_token_id tokenizer_class pretraining_tp return_dict output_attentions
    output_hidden_states torchscript use_bfloat16 id2label label2id problem_type task_specific_params finetuning_task
    gradient_checkpointing _attn_implementation _attn_implementation_autoset attn_implementation _flash_attn_2_enabled
    use_flash_attn use_return_dict is_llama_config transformers.js_config unsloth_version unsloth_fixed
    max_sequence_length model_max_length chunk_size_feed_forward generation_config

    temperature top_k top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size max_length min_length
    max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty num_return_sequences
    output_scores return_dict_in_generate bad_words_ids suppress_tokens begin_suppress_tokens forced_bos_token_id
    forced_eos_token_id
    """.split()
)
# keys that do change something, with the values under which this family computes the right thing
HF_ONLY = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "rope_interleaved": (False,),
    "use_sliding_window": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "use_qk_norm": (False,),
    "partial_rotary_factor": (1.0, 1),
    "attention_multiplier": (),
    "quantization_config": (),
    "auto_map": (),
}
GGUF_ONLY = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "tensor_data_layout": ("Meta AI original pth",),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}


@dataclass
class _Sizes:
    """The dimensions, by the core's names."""

    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab: int
    ctx: int
    norm_eps: float
    rope_interleaved: int
    rope_freqs: list[float] = field(default_factory=list)
    rope_scale: float = 1.0

    def config(self) -> dict[str, list[float]]:
        return {
            key: [float(v) for v in value] if isinstance(value, list) else [float(value)]
            for key, value in vars(self).items()
        }


def from_hf(checkpoint: Checkpoint) -> tuple[dict[str, list[float]], list[tuple[str, Tensor]]]:
    """Config and tensors of a Hugging Face folder for the core."""
    options = Options(checkpoint.metadata, f"{checkpoint.path}/config.json")
    _check_class(options)
    for key, allowed in HF_ONLY.items():
        options.only(key, *allowed)
    dim, n_heads = options.count("hidden_size"), options.count("num_attention_heads")
    sizes = _Sizes(
        n_layers=options.count("num_hidden_layers"),
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=options.count("num_key_value_heads", n_heads),
        head_dim=_head_dim(options, "head_dim", dim, n_heads),
        ffn_dim=options.count("intermediate_size"),
        vocab=options.count("vocab_size"),
        ctx=options.count("max_position_embeddings", 2048, MAX_CTX),
        norm_eps=options.number("rms_norm_eps", 1e-6),
        rope_interleaved=0,
    )
    _check_sizes(sizes, options)
    sizes.rope_freqs, sizes.rope_scale = _hf_rope(options, sizes)
    _check_layer_types(options)
    tied = options.flag("tie_word_embeddings", False)
    options.finish(HF_HARMLESS)

    tensors = Tensors(checkpoint)
    embed = tensors.take("model.embed_tokens.weight", "embed", sizes.vocab, dim)
    if not tied:
        tensors.take("lm_head.weight", "head", sizes.vocab, dim)
    elif "lm_head.weight" in checkpoint.tensors:
        _check_same(checkpoint, embed, checkpoint.tensors["lm_head.weight"])
        tensors.skip("lm_head.weight")
    tensors.take("model.norm.weight", "norm", dim)
    names = {
        "attn_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
        "o": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }  # fmt: skip
    _take_layers(tensors, sizes, lambda layer, part: f"model.layers.{layer}.{names[part]}.weight")
    for layer in range(sizes.n_layers):
        # in old files; the options say the same
        tensors.skip(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq")
    return sizes.config(), tensors.finish()


def from_gguf(checkpoint: Checkpoint) -> tuple[dict[str, list[float]], list[tuple[str, Tensor]]]:
    """Config and tensors of a GGUF file for the core."""
    _check_general(checkpoint)
    options = Options(checkpoint.metadata, checkpoint.path, "llama.")
    for key, allowed in GGUF_ONLY.items():
        options.only(key, *allowed)
    embed = checkpoint.tensor("token_embd.weight")
    dim, n_heads = options.count("embedding_length"), options.count("attention.head_count")
    sizes = _Sizes(
        n_layers=options.count("block_count"),
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=options.count("attention.head_count_kv", n_heads),
        head_dim=_head_dim(options, "attention.key_length", dim, n_heads),
        ffn_dim=options.count("feed_forward_length"),
        vocab=options.count("vocab_size", embed.shape[0]),
        ctx=options.count("context_length", most=MAX_CTX),
        norm_eps=options.number("attention.layer_norm_rms_epsilon"),
        rope_interleaved=1,
    )
    _check_sizes(sizes, options)
    options.only("attention.value_length", sizes.head_dim)
    options.only("rope.dimension_count", sizes.head_dim)

    tensors = Tensors(checkpoint)
    sizes.rope_freqs, sizes.rope_scale = _gguf_rope(options, sizes, _rope_factors(tensors, sizes.head_dim))
    options.finish()
    tensors.take("token_embd.weight", "embed", sizes.vocab, dim)
    if "output.weight" in checkpoint.tensors:
        tensors.take("output.weight", "head", sizes.vocab, dim)
    tensors.take("output_norm.weight", "norm", dim)
    names = {
        "attn_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
        "ffn_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
    }  # fmt: skip
    _take_layers(tensors, sizes, lambda layer, part: f"blk.{layer}.{names[part]}.weight")
    return sizes.config(), tensors.finish()


def _take_layers(tensors: Tensors, sizes: _Sizes, file_name: Callable[[int, str], str]) -> None:
    s = sizes
    shapes = {
        "attn_norm": (s.dim,), "q": (s.n_heads * s.head_dim, s.dim), "k": (s.n_kv_heads * s.head_dim, s.dim),
        "v": (s.n_kv_heads * s.head_dim, s.dim), "o": (s.dim, s.n_heads * s.head_dim), "ffn_norm": (s.dim,),
        "gate": (s.ffn_dim, s.dim), "up": (s.ffn_dim, s.dim), "down": (s.dim, s.ffn_dim),
    }  # fmt: skip
    for layer in range(s.n_layers):
        for part, shape in shapes.items():
            tensors.take(file_name(layer, part), f"layers.{layer}.{part}", *shape)


# ---- options that need a second look ----


def _head_dim(options: Options, key: str, dim: int, n_heads: int) -> int:
    if key not in options and dim % n_heads:
        raise FileFormatError(
            f"{options.name(key)} is missing, and {dim} dimensions do not divide into {n_heads} heads."
        )
    return options.count(key, max(1, dim // n_heads), MAX_HEAD_DIM)


def _check_sizes(s: _Sizes, options: Options) -> None:
    if s.n_heads % s.n_kv_heads:
        raise FileFormatError(f"{options.where}: {s.n_heads} heads do not divide into {s.n_kv_heads} key/value heads.")
    if s.head_dim % 2:
        raise FileFormatError(f"{options.where}: the head size {s.head_dim} is odd; rotary attention needs pairs.")


def _check_class(options: Options) -> None:
    classes = options.raw("architectures", ["LlamaForCausalLM"])
    if classes != ["LlamaForCausalLM"]:
        shown = quote(classes[0]) if isinstance(classes, list) and len(classes) == 1 else quote(classes)
        raise UnsupportedError(
            f"{options.name('architectures')} is {shown}; of this family only LlamaForCausalLM is run."
        )


def _check_layer_types(options: Options) -> None:
    types = options.raw("layer_types", [])
    if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
        raise UnsupportedError(
            f"{options.name('layer_types')} names layers that are not full_attention, which this family does not have."
        )


def _check_same(checkpoint: Checkpoint, embed: Tensor, head: Tensor) -> None:
    """A tied model may carry its head a second time; when the two differ nobody can say which one counts."""
    step = 1 << 20
    same = embed.format == head.format and embed.shape == head.shape
    if not same or any(embed.data[i : i + step] != head.data[i : i + step] for i in range(0, len(embed.data), step)):
        raise FileFormatError(
            f"{checkpoint.path}: config.json ties lm_head.weight to the embedding, but the file holds another "
            "lm_head.weight; set tie_word_embeddings to false if the head counts."
        )


def _check_general(checkpoint: Checkpoint) -> None:
    """The keys outside "llama." that matter here; the others describe, or belong to the tokenizer."""
    options = Options(checkpoint.metadata, checkpoint.path, "general.")
    options.only("type", "model")
    if any(t.format not in ("F32", "F16", "BF16") for t in checkpoint.tensors.values()):
        options.only("quantization_version", 2)
    if any(key.startswith("adapter.") for key in checkpoint.metadata):
        raise UnsupportedError(
            f"{checkpoint.path}: is an adapter (LoRA), not a model; merge it into its base model first."
        )


# ---- rotary embedding ----


def _hf_rope(options: Options, sizes: _Sizes) -> tuple[list[float], float]:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    new, old = options.raw("rope_parameters", None), options.raw("rope_scaling", None)
    if new is not None and old is not None and new != old:
        raise UnsupportedError(
            f"{options.name('rope_scaling')} differs from rope_parameters; keep the one that counts."
        )
    key, values = ("rope_scaling", {} if old is None else old) if new is None else ("rope_parameters", new)
    if not isinstance(values, dict):
        raise FileFormatError(f"{options.name(key)} is {quote(values)}; it must be an object.")
    r = Options(values, options.name(key))
    theta = r.number("rope_theta", options.number("rope_theta", 10000.0, 1.0), 1.0)
    if "rope_theta" in options and options.number("rope_theta", above=1.0) != theta:
        raise UnsupportedError(
            f"{options.name('rope_theta')} differs from the one in rope_parameters; keep the one that counts."
        )
    kind = r.text("rope_type", r.raw("type", "default"))
    r.only("type", kind)
    r.only("partial_rotary_factor", 1.0, 1)
    original = options.count(
        "original_max_position_embeddings", r.raw("original_max_position_embeddings", sizes.ctx), MAX_CTX
    )
    freqs, scale = rope.plain(sizes.head_dim, theta), 1.0
    with _named(r.where):
        if kind == "linear":
            freqs = rope.linear(freqs, r.number("factor"))
        elif kind == "llama3":
            low, high = r.number("low_freq_factor"), r.number("high_freq_factor")
            freqs = rope.llama3(freqs, r.number("factor"), low, high, original)
        elif kind == "yarn":
            factor = r.number("factor", sizes.ctx / original)
            beta = r.number("beta_fast", 32.0), r.number("beta_slow", 1.0)
            freqs = rope.yarn(freqs, theta, factor, original, *beta, truncate=r.flag("truncate", True))
            scale = _hf_magnitude(r, factor)
        elif kind != "default":
            raise UnsupportedError(f"rope_type is {quote(kind)}; this version knows default, linear, llama3 and yarn.")
    r.finish()
    return _checked(freqs, scale, r)


def _hf_magnitude(r: Options, factor: float) -> float:
    default = rope.yarn_magnitude(factor)
    both = [key for key in ("mscale", "mscale_all_dim") if r.raw(key, 0) != 0]  # 0 means absent
    if len(both) == 2:
        above, below = (rope.yarn_magnitude(factor, r.number(key)) for key in both)
        default = above / below
    return r.number("attention_factor", default)


def _rope_factors(tensors: Tensors, head_dim: int) -> list[float]:
    """The divisors in rope_freqs.weight: how GGUF files carry Llama 3's scaling. All 1 without that tensor."""
    found = tensors.checkpoint.tensors.get("rope_freqs.weight")
    if found is None:
        return [1.0] * (head_dim // 2)
    if found.format != "F32" or found.shape != (head_dim // 2,):
        raise FileFormatError(
            f"{tensors.checkpoint.path}: tensor 'rope_freqs.weight' is {found.format} {list(found.shape)}; it must be "
            f"F32 [{head_dim // 2}]."
        )
    factors = np.frombuffer(found.data, "<f4").astype(np.float64)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise FileFormatError(
            f"{tensors.checkpoint.path}: tensor 'rope_freqs.weight' holds a divisor that is not a number above 0."
        )
    tensors.skip("rope_freqs.weight")
    return [float(f) for f in factors]


def _gguf_rope(options: Options, sizes: _Sizes, factors: list[float]) -> tuple[list[float], float]:
    """llama.cpp's order: the tensor's divisors first, then linear or YaRN scaling; attn_factor multiplies whatever
    results."""
    theta = options.number("rope.freq_base", 10000.0, 1.0)
    kind = options.text("rope.scaling.type", "linear")
    factor = options.number("rope.scaling.factor", options.number("rope.scale_linear", 1.0))
    original = options.count("rope.scaling.original_context_length", sizes.ctx, MAX_CTX)
    beta = options.number("rope.scaling.yarn_beta_fast", 32.0), options.number("rope.scaling.yarn_beta_slow", 1.0)
    scale = options.number("rope.scaling.attn_factor", 1.0)
    options.flag("rope.scaling.finetuned", False)
    if "rope.scaling.yarn_attn_factor" in options:
        raise UnsupportedError(
            f"{options.name('rope.scaling.yarn_attn_factor')} means the whole attention factor to some writers and a "
            "multiplier of it to others, so it cannot be read safely; use rope.scaling.attn_factor, the multiplier, "
            "in its place."
        )
    freqs = [f / divisor for f, divisor in zip(rope.plain(sizes.head_dim, theta), factors, strict=True)]
    with _named(options.where):
        if kind == "linear":
            freqs = rope.linear(freqs, factor)
        elif kind == "yarn":
            freqs = rope.yarn(freqs, theta, factor, original, *beta)
            scale *= rope.yarn_magnitude(factor)
        elif kind != "none":
            raise UnsupportedError(f"rope.scaling.type is {quote(kind)}; this version knows none, linear and yarn.")
    return _checked(freqs, scale, options)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Puts the file's name before a fault that the formulas report."""
    try:
        yield
    except (FileFormatError, UnsupportedError) as error:
        if str(error).startswith(where):
            raise
        raise type(error)(f"{where}: {error}") from None


def _checked(freqs: list[float], scale: float, options: Options) -> tuple[list[float], float]:
    """Absurd options can leave the range of float32, in which the core keeps its tables."""
    if not all(math.isfinite(f) and 0.0 < f < 1e6 for f in freqs) or not 0.0 < scale < 1e6:
        raise FileFormatError(f"{options.where}: the rope options give frequencies that are not usable numbers.")
    return freqs, scale
