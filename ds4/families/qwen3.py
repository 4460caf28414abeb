"""Qwen3, dense and with a mixture of experts (arXiv 2505.09388): Llama with an RMSNorm on every query and key head. In
the MoE models a router sends each token to its best experts in place of the one feed-forward network.

Hugging Face model_type "qwen3" and "qwen3_moe", GGUF architectures "qwen3" and "qwen3moe"; in both containers a rotary
pair is i and i + head_dim/2. GGUF files do not say whether the weights of the chosen experts are scaled to add up to 1;
in all published models, and in llama.cpp, they are.
"""

from __future__ import annotations

from ds4.families import common, rope_options
from ds4.families.common import Experts
from ds4.families.options import Options, Tensors
from ds4.files import Checkpoint

_ATTENTION: common.Table = (
    ("attn_norm", "attn_norm", "input_layernorm", ("dim",)),
    *common.ATTENTION,
    *common.QK_NORMS,
    ("ffn_norm", "ffn_norm", "post_attention_layernorm", ("dim",)),
)
DENSE = _ATTENTION + common.FFN
MOE = _ATTENTION + common.EXPERTS

HF_ONLY = {"hidden_act": ("silu", "swish")}
# the window is off (use_sliding_window), the rest belongs to training
HF_HARMLESS = common.HF_HARMLESS | {
    "sliding_window", "max_window_layers", "output_router_logits", "router_aux_loss_coef",
}  # fmt: skip
GGUF_ONLY = {
    "expert_shared_count": (0,),
    "expert_gating_func": (1,),  # softmax
    "expert_weights_norm": (True,),
    "expert_weights_scale": (1.0,),
}


def from_hf(checkpoint: Checkpoint) -> common.Parts:
    """Config and tensors of a Hugging Face folder with a dense model for the core."""
    options = common.hf_options(
        checkpoint, "Qwen3ForCausalLM", max_position_embeddings=32768, num_key_value_heads=32, head_dim=128
    )
    return _from_hf(checkpoint, options, None)


def from_hf_moe(checkpoint: Checkpoint) -> common.Parts:
    """The same for a model with experts."""
    options = common.hf_options(checkpoint, "Qwen3MoeForCausalLM", max_position_embeddings=32768, num_key_value_heads=4)
    options.only("decoder_sparse_step", 1)
    options.only("mlp_only_layers", [])
    # transformers 5 writes the second name
    n_experts = options.count(
        "num_experts" if "num_local_experts" not in options else "num_local_experts", most=common.MAX_EXPERTS
    )
    options.only("num_experts", n_experts)
    experts = Experts(
        n_experts=n_experts,
        n_experts_used=options.count("num_experts_per_tok"),
        expert_ffn_dim=options.count("moe_intermediate_size"),
        norm_topk=options.flag("norm_topk_prob", False),
    )
    return _from_hf(checkpoint, options, experts)


def _from_hf(checkpoint: Checkpoint, options: Options, experts: Experts | None) -> common.Parts:
    common.check_only(options, HF_ONLY)
    sizes = common.hf_sizes(options)
    sizes.rope_freqs, sizes.rope_scale = rope_options.from_hf(options, sizes.head_dim, sizes.ctx)
    common.layer_types(options, sizes.n_layers, "full_attention")
    tied = options.flag("tie_word_embeddings", False)
    config = _config(options, sizes, experts)
    options.finish(HF_HARMLESS)
    tensors = Tensors(checkpoint)
    common.take_hf(tensors, sizes, MOE if experts else DENSE, tied, experts)
    return config, tensors.finish()


def from_gguf(checkpoint: Checkpoint) -> common.Parts:
    """Config and tensors of a GGUF file for the core; with experts when the architecture is "qwen3moe"."""
    options = common.gguf_options(checkpoint)
    sizes = common.gguf_sizes(checkpoint, options, rope_interleaved=0)
    experts = None
    if checkpoint.architecture == "qwen3":
        common.check_only(options, common.NO_EXPERTS)
    else:
        common.check_only(options, GGUF_ONLY)
        experts = Experts(
            n_experts=options.count("expert_count", most=common.MAX_EXPERTS),
            n_experts_used=options.count("expert_used_count"),
            expert_ffn_dim=options.count("expert_feed_forward_length"),
            norm_topk=1,
        )
    tensors = Tensors(checkpoint)
    factors = rope_options.gguf_factors(tensors, sizes.head_dim)
    sizes.rope_freqs, sizes.rope_scale = rope_options.from_gguf(options, sizes.head_dim, sizes.ctx, factors)
    config = _config(options, sizes, experts)
    options.finish()
    common.take_gguf(tensors, sizes, MOE if experts else DENSE, experts)
    return config, tensors.finish()


def _config(options: Options, sizes: common.Sizes, experts: Experts | None) -> common.Config:
    if experts is None:
        return sizes.config()
    common.check_experts(options, sizes.n_layers, experts)
    sizes.ffn_dim = experts.expert_ffn_dim  # no layer has the dense size that files name
    return sizes.config() | common.numbers(vars(experts))
