"""Published figures of well-known language models, for building them without a download.

Each entry has the model type of transformers, and the differences from that type's default configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


def _gpt2(width: int, layers: int, heads: int) -> tuple[str, dict[str, Any]]:
    return "gpt2", {"n_embd": width, "n_layer": layers, "n_head": heads}


def _bert(width: int, layers: int, heads: int, vocabulary: int) -> tuple[str, dict[str, Any]]:
    return "bert", {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "vocab_size": vocabulary,
    }


def _roberta(width: int, layers: int, heads: int) -> tuple[str, dict[str, Any]]:
    figures = _bert(width, layers, heads, vocabulary=50265)[1]
    return "roberta", {**figures, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}


def _t5(width: int, layers: int, heads: int, inner: int, key_width: int = 64) -> tuple[str, dict[str, Any]]:
    return "t5", {"d_model": width, "num_layers": layers, "num_heads": heads, "d_ff": inner, "d_kv": key_width}


def _opt(width: int, layers: int, heads: int) -> tuple[str, dict[str, Any]]:
    return "opt", {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": 4 * width,
        "word_embed_proj_dim": width,
    }


FIGURES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "distilgpt2": _gpt2(768, 6, 12),
        "gpt2": _gpt2(768, 12, 12),
        "gpt2-medium": _gpt2(1024, 24, 16),
        "gpt2-large": _gpt2(1280, 36, 20),
        "gpt2-xl": _gpt2(1600, 48, 25),
        "bert-base-uncased": _bert(768, 12, 12, 30522),
        "bert-base-cased": _bert(768, 12, 12, 28996),
        "bert-large-uncased": _bert(1024, 24, 16, 30522),
        "bert-large-cased": _bert(1024, 24, 16, 28996),
        "roberta-base": _roberta(768, 12, 12),
        "roberta-large": _roberta(1024, 24, 16),
        "distilbert-base-uncased": ("distilbert", {}),
        "t5-small": _t5(512, 6, 8, 2048),
        "t5-base": _t5(768, 12, 12, 3072),
        "t5-large": _t5(1024, 24, 16, 4096),
        "t5-3b": _t5(1024, 24, 32, 16384, key_width=128),
        "opt-125m": _opt(768, 12, 12),
        "opt-1.3b": _opt(2048, 24, 32),
        "opt-2.7b": _opt(2560, 32, 32),
        "opt-6.7b": _opt(4096, 32, 32),
        "llama-2-7b": (
            "llama",
            {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
             "max_position_embeddings": 4096, "vocab_size": 32000},
        ),
        "llama-2-13b": (
            "llama",
            {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
             "max_position_embeddings": 4096, "vocab_size": 32000},
        ),
        "llama-3-8b": (
            "llama",
            {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
             "num_key_value_heads": 8, "max_position_embeddings": 8192, "vocab_size": 128256},
        ),
    }
)  # fmt: skip
