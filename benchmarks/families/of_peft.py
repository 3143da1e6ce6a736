"""Adapters of peft on small language models: all but the adapters is frozen."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from benchmarks.families.family import Family, first_tensor, tokens
from benchmarks.families.of_transformers import OPTIONS, built

LINEAR = ["q_proj", "v_proj", "up_proj"]

ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", dict(r=2, target_modules=LINEAR)),
    "LoRA, rank-stabilised, with biases": (
        "LoraConfig",
        dict(r=2, target_modules=LINEAR, use_rslora=True, bias="all"),
    ),
    "LoRA, of the embedding": ("LoraConfig", dict(r=2, target_modules=["embed_tokens", "v_proj"])),
    "LoRA, head trained": ("LoraConfig", dict(r=2, target_modules=LINEAR, modules_to_save=["lm_head"])),
    "DoRA": ("LoraConfig", dict(r=2, target_modules=LINEAR, use_dora=True)),
    "AdaLoRA": ("AdaLoraConfig", dict(init_r=3, target_r=2, total_step=10, target_modules=LINEAR)),
    "LoHa": ("LoHaConfig", dict(r=2, target_modules=LINEAR)),
    "LoKr": ("LoKrConfig", dict(r=2, target_modules=LINEAR)),
    "IA3": (
        "IA3Config",
        dict(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ),
    "OFT": ("OFTConfig", dict(oft_block_size=4, target_modules=["q_proj", "v_proj"])),
    "BOFT": ("BOFTConfig", dict(boft_block_size=4, target_modules=["q_proj"])),
    "VeRA": ("VeraConfig", dict(r=2, target_modules=["q_proj", "v_proj"])),
    "FourierFT": ("FourierFTConfig", dict(n_frequency=6, target_modules=["q_proj", "v_proj"])),
    "HRA": ("HRAConfig", dict(r=2, target_modules=["q_proj", "v_proj"])),
    "LN tuning": ("LNTuningConfig", dict(target_modules=["input_layernorm", "norm"])),
    "VB-LoRA": ("VBLoRAConfig", dict(r=2, num_vectors=8, vector_length=4, topk=2, target_modules=["q_proj"])),
    "MiSS": ("MissConfig", dict(r=2, target_modules=["q_proj"])),
    "SHiRA": ("ShiraConfig", dict(r=2, target_modules=["q_proj"])),
    "prompt tuning": ("PromptTuningConfig", dict(num_virtual_tokens=2)),
    "P-tuning": ("PromptEncoderConfig", dict(num_virtual_tokens=2, encoder_hidden_size=4)),
    "prefix tuning": ("PrefixTuningConfig", dict(num_virtual_tokens=2)),
    "prefix tuning, projected": ("PrefixTuningConfig", dict(num_virtual_tokens=2, prefix_projection=True)),
    "LLaMA-Adapter": ("AdaptionPromptConfig", dict(adapter_len=2, adapter_layers=1)),
}


def adapted(kind: str, options: dict[str, Any]) -> nn.Module:
    """A small Llama with adapters of one kind."""
    import peft

    base = built("AutoModelForCausalLM", "llama", OPTIONS.get("llama", {}))
    return peft.get_peft_model(base, getattr(peft, kind)(task_type="CAUSAL_LM", **options))


def families() -> Iterator[Family]:
    """All that are listed here."""
    for name, (kind, options) in ADAPTERS.items():
        double = name != "FourierFT"  # which makes its own tensors in single precision
        yield Family("peft", name, functools.partial(adapted, kind, options), tokens(), first_tensor, double)
