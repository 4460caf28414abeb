"""Gemma 3 text models (arXiv 2503.19786): local layers, which read a window of the last rows and have a RoPE of their
own, with a full layer after every few of them; norms before and behind attention and feed-forward, and on every query
and key head; GELU; embeddings times sqrt(dim).

Hugging Face model_type "gemma3_text", or "gemma3" (which puts the text model into `text_config`) when the folder holds
no vision tensors; GGUF architecture "gemma3". Hugging Face files hold a norm's weight w where the factor is 1 + w; GGUF
files hold the factor.
"""

from __future__ import annotations

import math

import numpy as np

from ds4.errors import FileFormatError, UnsupportedError
from ds4.families import common, rope_options
from ds4.families.options import Options, Tensors
from ds4.families.rope_options import Rope
from ds4.files import Checkpoint
from ds4.files.base import quote

TABLE: common.Table = (
    ("attn_norm", "attn_norm", "input_layernorm", ("dim",)),
    *common.ATTENTION,
    *common.QK_NORMS,
    ("attn_post_norm", "post_attention_norm", "post_attention_layernorm", ("dim",)),
    ("ffn_norm", "ffn_norm", "pre_feedforward_layernorm", ("dim",)),
    *common.FFN,
    ("ffn_post_norm", "post_ffw_norm", "post_feedforward_layernorm", ("dim",)),
)
PERIOD = 6  # every sixth layer is a full one, where the file does not say otherwise
LAYERS_27B = 62

# what transformers takes for absent keys; the published configs of the larger models are short
HF_DEFAULTS: dict[str, float | str] = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131072, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
HF_ONLY = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "hidden_act": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
}
# of the model around the text model: where pictures go
HF_HARMLESS_OUTSIDE = common.HF_HARMLESS | {
    "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index", "boi_token_id",
    "eoi_token_id", "image_token_id",
}  # fmt: skip
GGUF_ONLY: dict[str, tuple] = common.NO_EXPERTS | {
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "rope.scaling.type": ("none", "linear"),  # how YaRN would scale the local layers is not settled
    "rope.scaling.attn_factor": (1.0,),
}


def from_hf(checkpoint: Checkpoint) -> common.Parts:
    """Config and tensors of a Hugging Face folder for the core."""
    options = common.hf_options(checkpoint, "Gemma3ForCausalLM", **HF_DEFAULTS)
    return _from_hf(checkpoint, options, "model.", "lm_head.weight")


def from_hf_multimodal(checkpoint: Checkpoint) -> common.Parts:
    """The same for a text model inside a multimodal one."""
    whole = common.hf_options(checkpoint, "Gemma3ForConditionalGeneration")
    whole.only("tie_word_embeddings", True)
    options = whole.object("text_config", defaults=HF_DEFAULTS)
    whole.finish(HF_HARMLESS_OUTSIDE)
    pictures = [name for name in checkpoint.tensors if "vision" in name or "multi_modal" in name]
    if pictures:
        raise UnsupportedError(
            f"{checkpoint.path}: holds {len(pictures)} tensors of a vision model, such as {quote(pictures[0])}; this "
            "version runs text only. Use a GGUF file of this model, or a folder with its text model alone."
        )
    options.only("model_type", "gemma3_text")
    options.only("tie_word_embeddings", True)
    common.check_only(options, common.HF_ONLY)
    older = "language_model.model.embed_tokens.weight" in checkpoint.tensors
    model, head = ("language_model.model.", "language_model.") if older else ("model.language_model.", "")
    return _from_hf(checkpoint, options, model, f"{head}lm_head.weight")


def _from_hf(checkpoint: Checkpoint, options: Options, model: str, head: str) -> common.Parts:
    common.check_only(options, HF_ONLY)
    sizes = common.hf_sizes(options)
    full, local = rope_options.from_hf_by_layer_type(options, sizes.head_dim, sizes.ctx)
    config = _config(
        sizes,
        full,
        local,
        window=options.count("sliding_window"),
        global_layers=_hf_global_layers(options, sizes.n_layers),
        attn_scale=options.number("query_pre_attn_scalar") ** -0.5,
    )
    if local[1] != 1.0:
        raise UnsupportedError(f"{options.name('rope_parameters')} scales cos and sin of the local layers.")
    tied = options.flag("tie_word_embeddings", True)
    options.finish(common.HF_HARMLESS)
    tensors = Tensors(checkpoint)
    common.take_hf(tensors, sizes, TABLE, tied, model=model, head=head, norms_hold_offsets=True)
    return config, tensors.finish()


def from_gguf(checkpoint: Checkpoint) -> common.Parts:
    """Config and tensors of a GGUF file for the core."""
    options = common.gguf_options(checkpoint)
    common.check_only(options, GGUF_ONLY)
    sizes = common.gguf_sizes(checkpoint, options, rope_interleaved=0)
    ones = [1.0] * (sizes.head_dim // 2)
    local = Options({"rope.freq_base": options.number("rope.freq_base_swa", 10000.0, 1.0)}, options.where)
    # the key that would say so is written by no converter; llama.cpp knows the one model that differs by its size
    pre_attention = sizes.dim / sizes.n_heads if sizes.n_layers == LAYERS_27B else sizes.head_dim
    config = _config(
        sizes,
        rope_options.from_gguf(options, sizes.head_dim, sizes.ctx, ones),
        rope_options.from_gguf(local, sizes.head_dim, sizes.ctx, ones),
        window=options.count("attention.sliding_window"),
        global_layers=_gguf_global_layers(options, sizes.n_layers),
        attn_scale=pre_attention**-0.5,
    )
    options.finish()
    tensors = Tensors(checkpoint)
    common.take_gguf(tensors, sizes, TABLE)
    return config, tensors.finish()


def _config(
    sizes: common.Sizes, full: Rope, local: Rope, window: int, global_layers: list[bool], attn_scale: float
) -> common.Config:
    sizes.rope_freqs, sizes.rope_scale = full
    return sizes.config() | common.numbers(
        {
            "local_rope_freqs": local[0],
            "window": window,
            "global_layers": list(map(float, global_layers)),
            "attn_scale": attn_scale,
            "embed_scale": math.sqrt(sizes.dim),
        }
    )


def _hf_global_layers(options: Options, n_layers: int) -> list[bool]:
    """By `layer_types`; files from before it have the period alone, and of its two names the plain one counts."""
    period = PERIOD
    for key in ("_sliding_window_pattern", "sliding_window_pattern"):
        period = options.count(key, period)
    types = common.layer_types(options, n_layers, "full_attention", "sliding_attention")
    return _every(period, n_layers) if types is None else [kind == "full_attention" for kind in types]


def _gguf_global_layers(options: Options, n_layers: int) -> list[bool]:
    """By `attention.sliding_window_pattern`: a period, or for each layer whether it is a local one."""
    key = "attention.sliding_window_pattern"
    pattern = options.raw(key, PERIOD)
    if not isinstance(pattern, np.ndarray):
        return _every(options.count(key, PERIOD), n_layers)
    if pattern.dtype != np.bool_ or len(pattern) != n_layers:
        raise FileFormatError(
            f"{options.name(key)} is an array of {len(pattern)} values of the type {pattern.dtype}; it must be a "
            f"number, or a bool for each of the {n_layers} layers."
        )
    return [not local for local in pattern.tolist()]


def _every(period: int, n_layers: int) -> list[bool]:
    return [(layer + 1) % period == 0 for layer in range(n_layers)]
