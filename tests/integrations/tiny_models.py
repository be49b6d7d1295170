"""Builds tiny models of the text classes of transformers, with sizes that fit most configurations.

A model has 2 layers of width 32, and random weights in all parameters. Windows, chunks and blocks are shorter than a
shard of a test. A model that uses a part of the sequence in another way than by its attention therefore shows it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

Kind = Literal["causal", "masked", "token", "sequence", "base"]

VOCABULARY = 96
MASK, PAD = 0, 1
FIRST_TOKEN, END_OF_TOKENS = 5, 90
"""Ordinary tokens. The others are special tokens, such as those of images."""

NUM_LABELS: dict[Kind, int] = {"token": VOCABULARY, "sequence": 5}

MAPPINGS: dict[Kind, Mapping[str, Any]] = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "token": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "sequence": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "base": modeling_auto.MODEL_MAPPING_NAMES,
}

_NAMES_BY_SIZE = {
    VOCABULARY: "vocab_size decoder_vocab_size vocab_size_per_layer_input n_token",
    32: """hidden_size d_model n_embd dim emb_dim embedding_size input_embedding_size output_embedding_size
        word_embed_proj_dim embedding_dim true_hidden_size prediction_head_size attention_hidden_size lru_width
        pooler_hidden_size intra_bottleneck_size backbone_hidden_size d_latents max_2d_position_embeddings""",
    48: """intermediate_size n_inner d_ff dff dim_ff d_inner hidden_dim ffn_dim ffn_hidden_size decoder_ffn_dim
        encoder_ffn_dim feed_forward_size intermediate_size_mlp dense_intermediate_size""",
    16: """moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size
        shared_experts_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size
        router_hidden_size entity_vocab_size entity_emb_size rel_extent q_lora_rank kv_lora_rank qk_head_dim
        mamba_d_head mamba_chunk_size mamba_headdim chunk_size attention_window_size window_size sliding_window
        sliding_window_size local_attention attention_chunk_size attention_window block_size lsh_attn_chunk_length
        local_attn_chunk_length image_size pronunciation_vocab_size shape_vocab_size pronunciation_embed_dim
        shape_embed_dim""",
    8: """head_dim swa_head_dim kv_channels d_head dim_head attention_head_size attention_head_dim
        query_pre_attn_scalar qk_rope_head_dim qk_nope_head_dim v_head_dim o_lora_rank index_head_dim index_topk
        mamba_d_state mamba_head_dim ssm_state_size state_size linear_key_head_dim linear_value_head_dim
        linear_head_dim hidden_size_per_layer_input ple_embed_dim hc_lowrank embedding_rank num_latents num_centroids
        num_landmarks segment_means_seq_len block_multiple_of patch_size index_block_size""",
    4: """num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads
        num_encoder_attention_heads num_decoder_attention_heads attention_heads swa_num_attention_heads floor_scale
        rotary_dim d_rel num_experts num_local_experts n_routed_experts moe_num_experts loop_gate_rank mamba_n_heads
        mamba_num_heads mamba_dt_rank time_step_rank linear_num_value_heads linear_num_heads laurel_rank
        gated_norm_rank adapter_rank centroid_intermediate_top_k""",
    2: """num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers
        num_encoder_layers num_blocks loop_layer_index_end num_key_value_heads swa_num_key_value_heads num_kv_heads
        num_query_groups o_groups index_n_heads index_topk_blocks num_experts_per_tok num_experts_per_token moe_topk
        moe_k n_mamba_heads n_groups linear_num_key_heads num_codebooks block_per_row""",
    1: """num_layers_per_stack n_input_layers n_recurrent_layers n_output_layers n_group topk_group num_expert_group
        n_shared_experts num_shared_experts moe_num_shared_experts zero_expert_num first_k_dense_replace
        num_dense_layers num_self_attends_per_block depth""",
    0: """num_kv_shared_layers num_nextn_predict_layers loop_layer_index_start unk_index mask_index
        max_window_layers""",
    256: """max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions
        model_max_length context_length keep_window_size""",
    64: "tpu_short_seq_length mamba_d_ssm",
    50: "ngram_vocab_size_base",
}
_SPECIAL_TOKENS: dict[int | None, str] = {
    MASK: "mask_token_id",
    PAD: "pad_token_id",
    2: "bos_token_id cls_token_id decoder_start_token_id",
    3: "eos_token_id",
    4: "sep_token_id",
    None: "forced_eos_token_id",
    90: "image_token_id image_token_index document_token_id",
    91: "video_token_id",
    92: "audio_token_id",
    93: "boi_token_id boi_token_index boa_token_id vision_start_token_id",
    94: "eoi_token_id eoi_token_index eoa_token_id vision_end_token_id",
}

_SOFT_CAPS = {2.0: "attn_logit_softcapping attn_logit_softcap"}
_TABLE = [*_NAMES_BY_SIZE.items(), *_SOFT_CAPS.items(), *_SPECIAL_TOKENS.items()]
SIZES = {name: value for value, names in _TABLE for name in names.split()}
"""The value of a field of a configuration, wherever a configuration has a field with this name."""

LISTS: dict[str, Any] = {
    "axial_pos_shape": [16, 16],
    "axial_pos_embds_dim": [16, 16],
    "mrope_section": [2, 1, 1],
    "block_sizes": [1, 1],
    "block_repeats": [1, 1],
    "attn_layers": ["local", "lsh"],
    "attention_types": [[["global", "local"], 1]],
    "hybrid_layer_ids": [1],
    "encoder_hash_byte_group_size": [3],
    "full_attn_idxs": [1],
}
"""As SIZES, for fields that are lists."""

_MROPE = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}}

_LOOP = {"loop_layer_index_start": 1, "loop_layer_index_end": 2}

DEFAULT = "default"
"""Removes a value of SIZES."""

BY_TYPE: dict[str, dict[str, Any]] = {
    "dory": {"num_hidden_layers": 3},
    "dots3_note_text": {"num_key_value_heads": 4},
    "esm": {"token_dropout": True},
    "falcon": {"new_decoder_architecture": False},
    **dict.fromkeys(("glm4v_moe_text", "glm_image_text", "glm_ocr_text", "paddleocr_vl_text"), _MROPE),
    **dict.fromkeys(("qwen2_5_vl_text", "qwen2_vl_text"), _MROPE),
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "inkling2_loop_text": {"num_hidden_layers": 3, "n_layers_per_attn_res_block": 1, **_LOOP},
    "jetmoe": {"num_attention_heads": DEFAULT},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"no_rope_layers": [1, 0]},
    "longcat_flash": {"num_layers": 1, "num_hidden_layers": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "mobilebert": {"intra_bottleneck_size": 16, "true_hidden_size": 16, "intermediate_size": 32},
    "neomme": {"head_dim": 16},
    "phi3": {"sliding_window": 16},
    "qwen2": {"use_sliding_window": True},
    "xlstm": {"embedding_dim": 32, "num_heads": 4},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid"], "attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {
        **{"layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "attention_hidden_size": 64},
        **{"n_mamba_heads": 4, "attention_head_dim": 16},
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Values of one model type, where those of SIZES contradict each other or turn a feature off."""


@dataclass(frozen=True)
class Change:
    """Fields of a configuration that keep their default, and fields that get another value than in SIZES."""

    kept: str = ""
    heads: int | None = None
    layers: int | None = None


CHANGES = (
    Change(),
    Change(kept="head_dim"),
    Change(heads=4),
    Change(kept="head_dim num_key_value_heads qk_head_dim"),
    Change(layers=4),
    Change(kept="first_k_dense_replace n_group topk_group query_pre_attn_scalar rotary_dim"),
)
"""Changes to try in order until a model can be built and runs."""


@dataclass(frozen=True)
class TinyModel:
    """How to build one model.

    Attributes:
        name: its class.
        model_type: the type of its configuration.
        kind: what it predicts.
        change: an index in CHANGES.
        implementation: its attention in one process.
        num_layers: the number of layers; None for that of SIZES.
        has_loss: whether it takes labels.
        dtype: the dtype of its parameters.
    """

    name: str
    model_type: str
    kind: Kind
    change: int = 0
    implementation: str = "sdpa"
    num_layers: int | None = None
    has_loss: bool = True
    dtype: torch.dtype = torch.float32

    def config(self) -> Any:
        config_class = self.model_class().config_class
        model_type = config_class.model_type or self.model_type
        change = CHANGES[self.change]
        fields = tiny_fields(config_class, change.kept.split()) | BY_TYPE.get(model_type, {})
        fields = {name: value for name, value in fields.items() if value is not DEFAULT}
        if change.heads is not None:
            fields["num_key_value_heads"] = change.heads
        if change.layers is not None or self.num_layers is not None:
            fields["num_hidden_layers"] = self.num_layers or change.layers
        if self.kind in NUM_LABELS:
            fields["num_labels"] = NUM_LABELS[self.kind]
        config = config_class(**fields)
        if self.kind == "causal" and hasattr(config, "is_decoder"):
            config.is_decoder = True
        for name in ("use_cache", "output_router_logits"):
            if hasattr(config, name):
                setattr(config, name, False)
        return config

    def model_class(self) -> Any:
        return getattr(transformers, self.name)

    def is_for_text(self) -> bool:
        model_class = self.model_class()
        takes_tokens = "input_ids" in inspect.signature(model_class.forward).parameters
        return takes_tokens and model_class.main_input_name == "input_ids"

    def needs_decoder_input(self) -> bool:
        """Whether it is an encoder-decoder that does not make the input of its decoder from labels."""
        config_class = self.model_class().config_class
        return self.kind == "base" and default_fields(config_class).get("is_encoder_decoder") is True

    def build(self, implementation: str | None = None) -> Any:
        """The model in evaluation mode, without dropout. Every call gives it the same weights."""
        torch.manual_seed(0)
        model_class = self.model_class()
        options: dict[str, Any] = {"attn_implementation": implementation or self.implementation}
        if "add_pooling_layer" in inspect.signature(model_class.__init__).parameters:
            options["add_pooling_layer"] = False
        if self.dtype == torch.float64:
            options["experts_implementation"] = "eager"  # the others use an operator without float64
        model = model_class._from_config(self.config(), **options)
        model = model.to(self.dtype).eval()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.add_(torch.randn(parameter.shape, generator=generator).to(self.dtype) * 0.1)
        return model


def models(kind: Kind) -> list[TinyModel]:
    """All classes of one kind, without those of earlier kinds."""
    kinds = list(MAPPINGS)
    earlier = {name for other in kinds[: kinds.index(kind)] for name, _ in classes(MAPPINGS[other])}
    found = {name: model_type for name, model_type in reversed(classes(MAPPINGS[kind])) if name not in earlier}
    return [TinyModel(name, model_type, kind, has_loss=kind != "base") for name, model_type in sorted(found.items())]


def classes(mapping: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(class, model type) of a mapping of transformers, where a type may have several classes."""
    return [
        (name, model_type)
        for model_type, names in mapping.items()
        for name in ([names] if isinstance(names, str) else names)
    ]


def tiny_fields(config_class: Any, kept: Iterable[str] = ()) -> dict[str, Any]:
    """Arguments that make a configuration of this class small, with its parts."""
    defaults = default_fields(config_class)
    aliases = {alias: name for alias, name in config_class.attribute_map.items() if name in defaults}
    found = {name: tiny_value(name, defaults.get(name)) for name in {*defaults, *aliases}.difference(kept)}
    found = {name: value for name, value in found.items() if value is not defaults.get(name)}
    found = {name: value for name, value in found.items() if aliases.get(name) not in found}
    for name, part_class in config_class.sub_configs.items():
        part = tiny_part(part_class, defaults.get(name))
        if part is not None:
            found[name] = part
    return found


def default_fields(config_class: Any) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = config_class().to_dict()
        return fields
    except Exception:  # some configurations have no defaults
        names = {*inspect.signature(config_class.__init__).parameters, *getattr(config_class, "__annotations__", {})}
        return dict.fromkeys(names)


def tiny_value(name: str, default: Any) -> Any:
    is_absent = default is None and ("window" in name or "softcap" in name or name == "attention_chunk_size")
    if name in SIZES and not is_absent and not isinstance(default, (list, dict)):
        return SIZES[name]
    if name in LISTS:
        return LISTS[name]
    if isinstance(default, float) and re.search(r"drop|mask_.*_prob|jitter", name):
        return 0.0
    if name in ("use_cache", "output_router_logits", "tie_word_embeddings"):
        return False
    if name == "rope_parameters" and isinstance(default, dict):
        small = {"mrope_section": [2, 1, 1], "original_max_position_embeddings": 16}
        return default | {field: value for field, value in small.items() if field in default}
    return default


def tiny_part(part_class: Any, default: Any) -> dict[str, Any] | None:
    """The arguments of a part of a configuration; None if its class is unknown."""
    if isinstance(default, dict) and default.get("model_type") in CONFIG_MAPPING and not hasattr(part_class, "to_dict"):
        part_class = CONFIG_MAPPING[default["model_type"]]
    if not hasattr(part_class, "to_dict") or not hasattr(part_class, "model_type"):
        return None
    model_type = part_class.model_type
    named = {"model_type": model_type} if model_type else {}
    return tiny_fields(part_class) | BY_TYPE.get(model_type, {}) | named
