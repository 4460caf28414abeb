"""What the families share: the sizes that both containers give, and the tables that say how each tensor of a decoder is
called there.

A row of a table is (the core's name, the name in GGUF files, the name in Hugging Face files, the shape by the names of
`Sizes.extents`). Rows of one dimension are norms. A row of three dimensions is a matrix for each expert: Hugging Face
files hold them one by one, `{}` in the names stands for the expert; GGUF files hold all of a layer in one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ds4.errors import FileFormatError, UnsupportedError
from ds4.families.options import Options, Tensors
from ds4.families.rope_options import MAX_CTX
from ds4.files import Checkpoint, Tensor
from ds4.files.base import quote

Row = tuple[str, str, str, tuple[str, ...]]
Table = tuple[Row, ...]
Config = dict[str, list[float]]
Parts = tuple[Config, list[tuple[str, Tensor]]]  # what a family's reader returns

MAX_LAYERS = 4096  # the core's own limits
MAX_HEAD_DIM = 1 << 16
MAX_EXPERTS = 4096
MAX_EXPERT_TENSORS = 1 << 17  # in a whole model: each costs memory, however small it is in the file

ATTENTION: Table = (
    ("q", "attn_q", "self_attn.q_proj", ("q_dim", "dim")),
    ("k", "attn_k", "self_attn.k_proj", ("kv_dim", "dim")),
    ("v", "attn_v", "self_attn.v_proj", ("kv_dim", "dim")),
    ("o", "attn_output", "self_attn.o_proj", ("dim", "q_dim")),
)
QK_NORMS: Table = (
    ("q_norm", "attn_q_norm", "self_attn.q_norm", ("head_dim",)),
    ("k_norm", "attn_k_norm", "self_attn.k_norm", ("head_dim",)),
)
FFN: Table = (
    ("gate", "ffn_gate", "mlp.gate_proj", ("ffn_dim", "dim")),
    ("up", "ffn_up", "mlp.up_proj", ("ffn_dim", "dim")),
    ("down", "ffn_down", "mlp.down_proj", ("dim", "ffn_dim")),
)
EXPERTS: Table = (
    ("router", "ffn_gate_inp", "mlp.gate", ("n_experts", "dim")),
    ("experts.{}.gate", "ffn_gate_exps", "mlp.experts.{}.gate_proj", ("n_experts", "expert_ffn_dim", "dim")),
    ("experts.{}.up", "ffn_up_exps", "mlp.experts.{}.up_proj", ("n_experts", "expert_ffn_dim", "dim")),
    ("experts.{}.down", "ffn_down_exps", "mlp.experts.{}.down_proj", ("n_experts", "dim", "expert_ffn_dim")),
)

# keys of config.json that do not change the logits of a text model at inference
HF_HARMLESS = frozenset(
    """
    model_type dtype torch_dtype transformers_version _name_or_path name_or_path use_cache initializer_range
    attention_dropout hidden_dropout resid_pdrop embd_pdrop bos_token_id eos_token_id pad_token_id unk_token_id
    sep_token_id decoder_start_token_id tokenizer_class pretraining_tp return_dict output_attentions
    output_hidden_states torchscript use_bfloat16 id2label label2id problem_type task_specific_params finetuning_task
    gradient_checkpointing _attn_implementation _attn_implementation_autoset attn_implementation _flash_attn_2_enabled
    use_flash_attn use_return_dict is_llama_config transformers.js_config unsloth_version unsloth_fixed
    max_sequence_length model_max_length chunk_size_feed_forward generation_config cache_implementation

    temperature top_k top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size max_length min_length
    max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty num_return_sequences
    output_scores return_dict_in_generate bad_words_ids suppress_tokens begin_suppress_tokens forced_bos_token_id
    forced_eos_token_id
    """.split()
)
# keys that do change something, with the values under which all families here compute the right thing
HF_ONLY = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "rope_interleaved": (False,),
    "use_sliding_window": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "partial_rotary_factor": (1.0, 1),
    "quantization_config": (),
    "auto_map": (),
}
NO_EXPERTS = {"expert_count": (0,), "expert_used_count": (0,)}
GGUF_ONLY = {
    "attention.causal": (True,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}


@dataclass
class Experts:
    """The sizes of a mixture of experts, by the core's names; norm_topk 1: the weights of those used add up to 1."""

    n_experts: int
    n_experts_used: int
    expert_ffn_dim: int
    norm_topk: int


@dataclass
class Sizes:
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

    def config(self) -> Config:
        return numbers(vars(self))

    def extents(self) -> dict[str, int]:
        """The lengths that tables name."""
        s = self
        found = {name: getattr(s, name) for name in ("dim", "head_dim", "ffn_dim", "vocab")}
        return found | {"q_dim": s.n_heads * s.head_dim, "kv_dim": s.n_kv_heads * s.head_dim}


def numbers(values: Mapping[str, float | list[float]]) -> Config:
    """Values as the core takes them: a list of floats each."""
    return {
        key: [float(v) for v in value] if isinstance(value, list) else [float(value)] for key, value in values.items()
    }


# ---- options ----


def hf_options(checkpoint: Checkpoint, *classes: str, **defaults: float | str) -> Options:
    """The options of config.json; `defaults` are those of transformers for this family. Raises UnsupportedError for a
    class that is not one of `classes`, and for a value of HF_ONLY that this version does not compute."""
    options = Options(checkpoint.metadata, f"{checkpoint.path}/config.json", defaults=defaults)
    check_class(options, *classes)
    check_only(options, HF_ONLY)
    return options


def check_class(options: Options, *classes: str) -> None:
    found = options.raw("architectures", [classes[0]])
    if not isinstance(found, list) or len(found) != 1 or found[0] not in classes:
        shown = quote(found[0]) if isinstance(found, list) and len(found) == 1 else quote(found)
        raise UnsupportedError(
            f"{options.name('architectures')} is {shown}; of this family only {' and '.join(classes)} is run."
        )


def check_only(options: Options, table: Mapping[str, tuple]) -> None:
    for key, allowed in table.items():
        options.only(key, *allowed)


def hf_sizes(options: Options) -> Sizes:
    """The sizes that config.json gives; the RoPE is still to be read."""
    dim, n_heads = options.count("hidden_size"), options.count("num_attention_heads")
    return _checked(
        Sizes(
            n_layers=options.count("num_hidden_layers", most=MAX_LAYERS),
            dim=dim,
            n_heads=n_heads,
            n_kv_heads=options.count("num_key_value_heads", n_heads),
            head_dim=_head_dim(options, "head_dim", dim, n_heads),
            ffn_dim=options.count("intermediate_size"),
            vocab=options.count("vocab_size"),
            ctx=options.count("max_position_embeddings", most=MAX_CTX),
            norm_eps=options.number("rms_norm_eps", 1e-6),
            rope_interleaved=0,
        ),
        options,
    )


def layer_types(options: Options, n_layers: int, *known: str) -> list[str] | None:
    """`layer_types` of config.json, a name for each layer. None when it is not there."""
    types = options.raw("layer_types", None)
    if types is None:
        return None
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise FileFormatError(f"{options.name('layer_types')} must be a list that names the kind of each layer.")
    other = next((kind for kind in types if kind not in known), None)
    if other is not None:
        raise UnsupportedError(
            f"{options.name('layer_types')} names layers of the kind {quote(other)}; this family has only "
            f"{' and '.join(known)}."
        )
    if len(types) != n_layers:
        raise FileFormatError(
            f"{options.name('layer_types')} has {len(types)} entries, but num_hidden_layers is {n_layers}."
        )
    return types


def gguf_options(checkpoint: Checkpoint) -> Options:
    """The keys of the file's architecture. Those of `general.` that matter are checked here; the others describe, or
    belong to the tokenizer."""
    general = Options(checkpoint.metadata, checkpoint.path, "general.")
    general.only("type", "model")
    if any(t.format not in ("F32", "F16", "BF16") for t in checkpoint.tensors.values()):
        general.only("quantization_version", 2)
    if any(key.startswith("adapter.") for key in checkpoint.metadata):
        raise UnsupportedError(
            f"{checkpoint.path}: is an adapter (LoRA), not a model; merge it into its base model first."
        )
    options = Options(checkpoint.metadata, checkpoint.path, f"{checkpoint.architecture}.")
    check_only(options, GGUF_ONLY)
    return options


def gguf_sizes(checkpoint: Checkpoint, options: Options, rope_interleaved: int) -> Sizes:
    """The sizes that the keys of a GGUF file give; the RoPE is still to be read."""
    embed = checkpoint.tensor("token_embd.weight")
    dim, n_heads = options.count("embedding_length"), options.count("attention.head_count")
    sizes = _checked(
        Sizes(
            n_layers=options.count("block_count", most=MAX_LAYERS),
            dim=dim,
            n_heads=n_heads,
            n_kv_heads=options.count("attention.head_count_kv", n_heads),
            head_dim=_head_dim(options, "attention.key_length", dim, n_heads),
            ffn_dim=options.count("feed_forward_length"),
            vocab=options.count("vocab_size", embed.shape[0]),
            ctx=options.count("context_length", most=MAX_CTX),
            norm_eps=options.number("attention.layer_norm_rms_epsilon"),
            rope_interleaved=rope_interleaved,
        ),
        options,
    )
    options.only("attention.value_length", sizes.head_dim)
    options.only("rope.dimension_count", sizes.head_dim)
    return sizes


def _head_dim(options: Options, key: str, dim: int, n_heads: int) -> int:
    if key not in options and dim % n_heads:
        raise FileFormatError(
            f"{options.name(key)} is missing, and {dim} dimensions do not divide into {n_heads} heads."
        )
    return options.count(key, max(1, dim // n_heads), MAX_HEAD_DIM)


def _checked(s: Sizes, options: Options) -> Sizes:
    if s.n_heads % s.n_kv_heads:
        raise FileFormatError(f"{options.where}: {s.n_heads} heads do not divide into {s.n_kv_heads} key/value heads.")
    if s.head_dim % 2:
        raise FileFormatError(f"{options.where}: the head size {s.head_dim} is odd; rotary attention needs pairs.")
    return s


def check_experts(options: Options, n_layers: int, e: Experts) -> None:
    """Raises FileFormatError when the counts do not fit together, or name more tensors than a model may have."""
    if e.n_experts_used > e.n_experts:
        raise FileFormatError(f"{options.where}: each token uses {e.n_experts_used} of {e.n_experts} experts.")
    if 3 * e.n_experts * n_layers > MAX_EXPERT_TENSORS:
        raise FileFormatError(
            f"{options.where}: {n_layers} layers of {e.n_experts} experts have more than the {MAX_EXPERT_TENSORS} "
            "tensors that are read."
        )


# ---- tensors ----


def take_hf(
    tensors: Tensors,
    sizes: Sizes,
    table: Table,
    tied: bool,
    experts: Experts | None = None,
    model: str = "model.",
    head: str = "lm_head.weight",
    norms_hold_offsets: bool = False,
) -> None:
    """Takes everything from a Hugging Face folder. `model` begins the names of all but the head; norms_hold_offsets:
    a norm multiplies by 1 + its weight."""
    extents = _extents(sizes, experts)

    def take(name: str, core_name: str, *shape: int) -> None:
        tensor = tensors.find(name, *shape)
        if norms_hold_offsets and len(shape) == 1:
            tensors.add_factors(core_name, tensor)
        else:
            tensors.add(core_name, tensor)

    take(f"{model}embed_tokens.weight", "embed", sizes.vocab, sizes.dim)
    if not tied:
        take(head, "head", sizes.vocab, sizes.dim)
    elif head in tensors.checkpoint.tensors:
        _check_same(tensors.checkpoint, f"{model}embed_tokens.weight", head)
        tensors.skip(head)
    take(f"{model}norm.weight", "norm", sizes.dim)
    for layer in range(sizes.n_layers):
        for core_name, _, hf_name, shape in table:
            name, core = f"{model}layers.{layer}.{hf_name}.weight", f"layers.{layer}.{core_name}"
            lengths = [extents[length] for length in shape]
            if len(lengths) == 3:
                for expert in range(lengths.pop(0)):
                    take(name.format(expert), core.format(expert), *lengths)
            else:
                take(name, core, *lengths)
        # in old files; the options say the same
        tensors.skip(f"{model}layers.{layer}.self_attn.rotary_emb.inv_freq")


def take_gguf(tensors: Tensors, sizes: Sizes, table: Table, experts: Experts | None = None) -> None:
    """Takes everything from a GGUF file."""
    extents = _extents(sizes, experts)
    tensors.take("token_embd.weight", "embed", sizes.vocab, sizes.dim)
    if "output.weight" in tensors.checkpoint.tensors:
        tensors.take("output.weight", "head", sizes.vocab, sizes.dim)
    tensors.take("output_norm.weight", "norm", sizes.dim)
    for layer in range(sizes.n_layers):
        for core_name, gguf_name, _, shape in table:
            name, core = f"blk.{layer}.{gguf_name}.weight", f"layers.{layer}.{core_name}"
            lengths = [extents[length] for length in shape]
            tensor = tensors.find(name, *lengths)
            if len(lengths) == 3:
                for expert, part in enumerate(split(tensor)):
                    tensors.add(core.format(expert), part)
            else:
                tensors.add(core, tensor)


def _extents(sizes: Sizes, experts: Experts | None) -> dict[str, int]:
    return sizes.extents() | (vars(experts) if experts else {})


def split(tensor: Tensor) -> Iterable[Tensor]:
    """The matrices of which a tensor of three dimensions is made; their bytes stay where they are."""
    size = len(tensor.data) // tensor.shape[0]
    for i in range(tensor.shape[0]):
        yield Tensor(f"{tensor.name}[{i}]", tensor.format, tensor.shape[1:], tensor.data[i * size : (i + 1) * size])


def _check_same(checkpoint: Checkpoint, embed_name: str, head_name: str) -> None:
    """A tied model may carry its head a second time; when the two differ nobody can say which one counts."""
    embed, head, step = checkpoint.tensors[embed_name], checkpoint.tensors[head_name], 1 << 20
    same = embed.format == head.format and embed.shape == head.shape
    if not same or any(embed.data[i : i + step] != head.data[i : i + step] for i in range(0, len(embed.data), step)):
        raise FileFormatError(
            f"{checkpoint.path}: config.json ties {head_name} to the embedding, but the file holds another "
            f"{head_name}; set tie_word_embeddings to false if the head counts."
        )
