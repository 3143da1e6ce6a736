"""Families of transformers, from configurations of a few units each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from benchmarks.families.family import WORDS, Family, features, first_tensor, pixels, tokens, translated

TINY: dict[str, Any] = {
    **dict(vocab_size=WORDS, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1),
    **dict(intermediate_size=12, max_position_embeddings=32, head_dim=4, pad_token_id=0, bos_token_id=1),
    **dict(eos_token_id=2, n_embd=8, n_layer=2, n_head=2, n_positions=32, n_ctx=32, d_model=8, d_ff=12, d_kv=4),
    **dict(num_heads=2, num_layers=2, num_decoder_layers=2, encoder_layers=2, decoder_layers=2, ffn_dim=12),
    **dict(encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=12, decoder_ffn_dim=12),
    **dict(embedding_size=8, image_size=16, patch_size=4, num_labels=3, dim=8, n_heads=2, n_layers=2),
    **dict(hidden_dim=12, num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=4),
    **dict(shared_expert_intermediate_size=4, n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1),
    **dict(
        q_lora_rank=4, kv_lora_rank=4, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, ffn_hidden_size=12
    ),
    **dict(hidden_dropout=0.0, attention_dropout=0.0, rotary_dim=4, state_size=4, expand=2, conv_kernel=2),
    **dict(dim_feedforward=12, max_length=32, num_key_value_groups=1, attn_layers=("full",) * 2),
}
"""Sizes, by the names that configurations have for them."""


def has(known: Any, name: str, value: Any) -> bool:
    """Whether a configuration has a size of this name that may be given, a number or not set."""
    fixed = isinstance(getattr(type(known), name, None), property)
    there = hasattr(known, name) and (name in vars(known) or name in type(known).attribute_map)
    default = getattr(known, name, None) if there else None
    return there and not fixed and (default is None or isinstance(default, (type(value), int, float)))


def configuration(kind: str, **options: Any) -> Any:
    """A configuration whose sizes are those of ``TINY``, as far as it knows their names."""
    import transformers

    known = transformers.AutoConfig.for_model(kind)
    given = {name: value for name, value in TINY.items() if has(known, name, value)}
    return transformers.AutoConfig.for_model(kind, **{**given, **options})


def built(head: str, kind: str, options: dict[str, Any]) -> nn.Module:
    """A model with random weights, by one of the library's automatic classes."""
    import transformers

    config = configuration(kind, **options)
    config.use_cache = False
    config._experts_implementation = "eager"
    config._attn_implementation = "eager"
    made = getattr(transformers, head)
    model = made.from_config(config) if head.startswith("Auto") else made(config)
    size = sum(p.numel() for p in model.parameters())
    if size > 1_000_000:
        raise ValueError(f"{size} parameters")
    return model


def family(
    head: str,
    kind: str,
    inputs: Callable[[], dict[str, Tensor]],
    output: Callable[[Any], Tensor] = first_tensor,
    *,
    double: bool = True,
    **options: Any,
) -> Family:
    """One family."""
    return Family("transformers", kind, functools.partial(built, head, kind, options), inputs, output, double)


def _words(text: str) -> list[str]:
    return text.split()


DECODERS = _words(
    """
    apertus arcee bamba bart biogpt bitnet blenderbot blenderbot-small bloom cohere cohere2 ctrl cwm
    deepseek_v2 deepseek_v3 diffllama doge dots1 ernie4_5 ernie4_5_moe exaone4 falcon falcon_mamba gemma
    gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granitemoe
    granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe jamba jetmoe lfm2 llama mamba mamba2 mbart minimax
    ministral mistral mixtral modernbert-decoder mpt nemotron olmo olmo2 olmo3 olmoe openai-gpt opt pegasus
    persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next recurrent_gemma rwkv seed_oss smollm3
    stablelm starcoder2 xlnet nanochat vaultgemma flex_olmo
    """
)

ENCODERS = _words(
    """
    albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie esm
    eurobert flaubert fnet funnel ibert layoutlm longformer luke megatron-bert mobilebert modernbert mpnet
    nystromformer rembert roberta roberta-prelayernorm roc_bert roformer squeezebert xlm xlm-roberta
    xlm-roberta-xl xmod yoso
    """
)

TRANSLATORS = _words(
    """
    bart bigbird_pegasus blenderbot led longt5 m2m_100 marian mbart mt5 mvp nllb-moe pegasus pegasus_x plbart
    prophetnet switch_transformers t5 umt5
    """
)

IMAGES = _words(
    """
    beit bit convnext convnextv2 data2vec-vision dinov2 dinov2_with_registers donut-swin focalnet hiera ijepa
    mobilenet_v1 mobilenet_v2 mobilevit poolformer pvt regnet resnet segformer swin swinv2 vit vit_msn
    """
)

OPTIONS: dict[str, dict[str, Any]] = {
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], intermediate_size=12),
    "bamba": dict(mamba_n_heads=4, mamba_d_head=4, mamba_expand=2, mamba_n_groups=1, mamba_chunk_size=4)
    | dict(mamba_d_state=4, attn_layer_indices=[1]),
    "mobilebert": dict(embedding_size=4, use_bottleneck=False, intermediate_size=12),
    "deepseek_v2": dict(num_key_value_heads=2, head_dim=4),
    "deepseek_v3": dict(num_key_value_heads=2),
    "diffllama": dict(num_key_value_heads=2),
    "qwen3_next": dict(linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=4)
    | dict(linear_value_head_dim=4, num_experts=4),
    "layoutlm": dict(max_2d_position_embeddings=16),
    "roc_bert": dict(pronunciation_vocab_size=5, shape_vocab_size=5, pronunciation_embed_dim=4)
    | dict(shape_embed_dim=4),
    "mpt": dict(max_seq_len=32),
    "falcon": dict(new_decoder_architecture=True, num_kv_heads=1),
    "openai-gpt": dict(vocab_size=WORDS),
    "xlnet": dict(d_inner=12),
    "gemma2": dict(query_pre_attn_scalar=4, sliding_window=4),
    "gemma3_text": dict(query_pre_attn_scalar=4, sliding_window=4),
    "phi3": dict(original_max_position_embeddings=32),
    "stablelm": dict(num_key_value_heads=2),
    "persimmon": dict(),
    "mamba": dict(intermediate_size=16, time_step_rank=2),
    "falcon_mamba": dict(intermediate_size=16, time_step_rank=2),
    "mamba2": dict(num_heads=4, head_dim=4, n_groups=1, chunk_size=4),
    "rwkv": dict(attention_hidden_size=8, context_length=32),
    "longformer": dict(attention_window=4),
    "big_bird": dict(attention_type="original_full"),
    "bigbird_pegasus": dict(attention_type="original_full"),
    "led": dict(attention_window=4, max_encoder_position_embeddings=32, max_decoder_position_embeddings=32),
    "funnel": dict(block_sizes=[1, 1], d_head=4, d_inner=12, num_decoder_layers=1),
    "squeezebert": dict(q_groups=1, k_groups=1, v_groups=1, post_attention_groups=1, intermediate_groups=1)
    | dict(output_groups=1),
    "luke": dict(entity_vocab_size=5, entity_emb_size=8),
    "esm": dict(token_dropout=False, mask_token_id=3, position_embedding_type="rotary"),
    "prophetnet": dict(num_encoder_layers=1, num_decoder_layers=1, num_encoder_attention_heads=2)
    | dict(num_decoder_attention_heads=2, ngram=2, num_buckets=4, relative_max_distance=8),
    "nllb-moe": dict(num_experts=2, expert_capacity=8, router_dtype="float32", decoder_sparse_step=1)
    | dict(encoder_sparse_step=1),
    "switch_transformers": dict(num_experts=2, expert_capacity=8, num_sparse_encoder_layers=1)
    | dict(num_sparse_decoder_layers=1),
    "xmod": dict(languages=["en"], default_language="en"),
    "nystromformer": dict(num_landmarks=4, segment_means_seq_len=4),
    "pegasus_x": dict(block_size=4, num_global_tokens=2, stagger_local_blocks=False),
    "swin": dict(depths=[1, 1], num_heads=[1, 2], embed_dim=4, window_size=2, patch_size=2),
    "swinv2": dict(depths=[1, 1], num_heads=[1, 2], embed_dim=4, window_size=2, patch_size=2),
    "donut-swin": dict(depths=[1, 1], num_heads=[1, 2], embed_dim=4, window_size=2, patch_size=2),
    "focalnet": dict(depths=[1, 1], embed_dim=4, focal_levels=[1, 1], focal_windows=[3, 3], patch_size=2)
    | dict(hidden_sizes=[4, 8]),
    "convnext": dict(hidden_sizes=[4, 8], depths=[1, 1], num_stages=2),
    "convnextv2": dict(hidden_sizes=[4, 8], depths=[1, 1], num_stages=2),
    "resnet": dict(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1]),
    "regnet": dict(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], groups_width=4),
    "bit": dict(embedding_size=4, hidden_sizes=[8, 8], depths=[1, 1], num_groups=2),
    "poolformer": dict(
        hidden_sizes=[4, 8], depths=[1, 1], num_encoder_blocks=2, patch_sizes=[3, 3], strides=[2, 2]
    )
    | dict(padding=[1, 1]),
    "pvt": dict(hidden_sizes=[4, 8], depths=[1, 1], num_encoder_blocks=2, num_attention_heads=[1, 2])
    | dict(sequence_reduction_ratios=[2, 1], patch_sizes=[4, 2], strides=[4, 2], mlp_ratios=[2, 2]),
    "segformer": dict(hidden_sizes=[4, 8], depths=[1, 1], num_encoder_blocks=2, num_attention_heads=[1, 2])
    | dict(sr_ratios=[2, 1], patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2]),
    "hiera": dict(embed_dim=4, depths=[1, 1], num_heads=[1, 2], image_size=[16, 16], patch_kernel=[7, 7])
    | dict(
        patch_stride=[4, 4],
        patch_padding=[3, 3],
        masked_unit_size=[2, 2],
        query_stride=[2, 2],
        num_query_pool=1,
    ),
    "mobilenet_v1": dict(depth_multiplier=0.1),
    "mobilenet_v2": dict(depth_multiplier=0.1),
    "mobilevit": dict(hidden_sizes=[8, 8, 8], neck_hidden_sizes=[4, 4, 4, 8, 8, 8, 8], image_size=32),
    "data2vec-vision": dict(),
}
"""Sizes under other names, and lists of them."""


def families() -> Iterator[Family]:
    """All that are listed here."""
    for kind in DECODERS:
        yield family("AutoModelForCausalLM", kind, tokens(), **OPTIONS.get(kind, {}))
    for kind in ENCODERS:
        yield family("AutoModelForMaskedLM", kind, tokens(8), **OPTIONS.get(kind, {}))
    for kind in TRANSLATORS:
        options = {**OPTIONS.get(kind, {}), "decoder_start_token_id": 1}
        found = family("AutoModelForSeq2SeqLM", kind, translated(), **options)
        yield found
    for kind in IMAGES:
        options = {"image_size": 32, **OPTIONS.get(kind, {})}
        yield family("AutoModelForImageClassification", kind, pixels(options_size(options)), **options)
    yield family(
        "WhisperForConditionalGeneration",
        "whisper",
        lambda: {
            **features(80, 16, name="input_features")(),
            **{"decoder_input_ids": tokens(3)()["input_ids"]},
        },
        max_source_positions=8,
        max_target_positions=16,
        decoder_start_token_id=1,
    )
    yield family("Wav2Vec2ForCTC", "wav2vec2", features(400, name="input_values"), **WAVES)
    yield family("HubertForCTC", "hubert", features(400, name="input_values"), **WAVES)
    yield family(
        "ASTForAudioClassification",
        "audio-spectrogram-transformer",
        features(32, 16, name="input_values"),
        num_mel_bins=16,
        max_length=32,
        frequency_stride=8,
        time_stride=8,
        patch_size=8,
    )
    yield family(
        "TimesformerForVideoClassification",
        "timesformer",
        features(2, 3, 8, 8, name="pixel_values"),
        image_size=8,
        num_frames=2,
    )
    yield family("CLIPVisionModel", "clip_vision_model", pixels(16), image_size=16)
    yield family("CLIPTextModel", "clip_text_model", tokens())


WAVES: dict[str, Any] = dict(
    conv_dim=(8, 8),
    conv_stride=(5, 2),
    conv_kernel=(10, 3),
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
    do_stable_layer_norm=False,
    apply_spec_augment=False,
    layerdrop=0.0,
)
"""Models of sound waves."""


def options_size(options: dict[str, Any]) -> int:
    """The extent of the images."""
    size = options["image_size"]
    return int(size if isinstance(size, int) else size[0])
