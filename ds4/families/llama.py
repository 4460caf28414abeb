"""The Llama family: Llama 1 to 3, and all models that are published under the same architecture name (SmolLM2,
TinyLlama, Yi, ...), and Mistral without its window, which computes the same.

RMSNorm, rotary attention with grouped key/value heads, SwiGLU; no biases. Two sources: GGUF files with
general.architecture "llama" (names as llama.cpp's converter writes them) and Hugging Face folders with model_type
"llama" or "mistral".

A GGUF file holds the rows of q and k reordered so that a rotary pair lies at 2i and 2i+1 (`rope_interleaved` 1);
Hugging Face pairs i with i + head_dim/2 (`rope_interleaved` 0).
"""

from __future__ import annotations

from ds4.errors import UnsupportedError
from ds4.families import common, rope_options
from ds4.families.options import Options, Tensors
from ds4.files import Checkpoint

TABLE: common.Table = (
    ("attn_norm", "attn_norm", "input_layernorm", ("dim",)),
    *common.ATTENTION,
    ("ffn_norm", "ffn_norm", "post_attention_layernorm", ("dim",)),
    *common.FFN,
)
HF_ONLY = {"hidden_act": ("silu", "swish"), "use_qk_norm": (False,), "attention_multiplier": ()}
GGUF_ONLY = common.NO_EXPERTS | {"tensor_data_layout": ("Meta AI original pth",)}


def from_hf(checkpoint: Checkpoint) -> common.Parts:
    """Config and tensors of a Hugging Face folder for the core."""
    return _from_hf(checkpoint, common.hf_options(checkpoint, "LlamaForCausalLM", max_position_embeddings=2048))


def from_hf_mistral(checkpoint: Checkpoint) -> common.Parts:
    """The same for Mistral, when its window hides nothing."""
    options = common.hf_options(
        checkpoint,
        "MistralForCausalLM",
        num_key_value_heads=8,
        max_position_embeddings=131072,
        sliding_window=4096,
    )
    ctx = options.count("max_position_embeddings", most=rope_options.MAX_CTX)
    window = options.count("sliding_window", ctx, rope_options.MAX_CTX)
    if window < ctx:
        raise UnsupportedError(
            f"{options.name('sliding_window')} is {window} in a context of {ctx}; Mistral is run only without a "
            "window: with null there, as in its later versions."
        )
    return _from_hf(checkpoint, options)


def _from_hf(checkpoint: Checkpoint, options: Options) -> common.Parts:
    common.check_only(options, HF_ONLY)
    sizes = common.hf_sizes(options)
    sizes.rope_freqs, sizes.rope_scale = rope_options.from_hf(options, sizes.head_dim, sizes.ctx)
    common.layer_types(options, sizes.n_layers, "full_attention")
    tied = options.flag("tie_word_embeddings", False)
    options.finish(common.HF_HARMLESS)
    tensors = Tensors(checkpoint)
    common.take_hf(tensors, sizes, TABLE, tied)
    return sizes.config(), tensors.finish()


def from_gguf(checkpoint: Checkpoint) -> common.Parts:
    """Config and tensors of a GGUF file for the core."""
    options = common.gguf_options(checkpoint)
    common.check_only(options, GGUF_ONLY)
    sizes = common.gguf_sizes(checkpoint, options, rope_interleaved=1)
    tensors = Tensors(checkpoint)
    factors = rope_options.gguf_factors(tensors, sizes.head_dim)
    sizes.rope_freqs, sizes.rope_scale = rope_options.from_gguf(options, sizes.head_dim, sizes.ctx, factors)
    options.finish()
    common.take_gguf(tensors, sizes, TABLE)
    return sizes.config(), tensors.finish()
