"""Models of transformers: causal, masked and sequence-to-sequence language models, and image classifiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elbowroom.errors import UsageError
from elbowroom.workloads import Options, Workload
from elbowroom.workloads._packages import import_package, unknown_name
from elbowroom.workloads._training import training_workload
from elbowroom.workloads._transformer_figures import FIGURES

_SEQUENCE_LENGTH = 128
_IMAGE_SIZE = 224
# The first tokens of a vocabulary are special (padding, start, mask) and change what a model does.
_SPECIAL_TOKENS = 1000
_MASKED_SHARE = 0.15
_IGNORED_LABEL = -100  # label that the losses of transformers ignore


def build_workload(name: str, options: Options) -> Workload:
    """Build a training step with random weights of a model named by a published name, a model type or a config class.

    Raises:
        UsageError: transformers is missing, does not know the model, has no training objective for it that needs only
            tokens or only images, or an option does not fit the model.
    """
    owner = f"transformers:{name}"
    transformers = import_package("transformers")
    model_type, figures = _look_up(transformers, name)
    task = _task_of(model_type, owner)
    images = task.make_batch is _image_batch
    if images:
        options.refuse(("sequence_length",), owner, "it takes images")
    else:
        options.refuse(("image_size", "channels_last"), owner, "it takes text")
    config = _make_config(transformers, model_type, figures, options, owner)
    with torch.device(options.device):
        model = getattr(transformers, task.auto_class).from_config(config)
        batch = task.make_batch(config, options, owner)
    return training_workload(owner, model, batch, _own_loss, options)


def _own_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def _look_up(transformers: Any, name: str) -> tuple[str, Mapping[str, Any]]:
    published = name.rpartition("/")[2]  # "openai-community/gpt2" is gpt2
    if published.lower() in FIGURES:
        return FIGURES[published.lower()]
    known = transformers.CONFIG_MAPPING
    if name in known:
        return name, {}
    if name.endswith("Config") and hasattr(transformers, name):
        model_type: str = getattr(getattr(transformers, name), "model_type", "")
        if model_type in known:
            return model_type, {}
    raise unknown_name("transformers", "model", name, {*FIGURES, *known})


@dataclass(frozen=True, slots=True)
class _Task:
    auto_class: str
    mapping: str
    make_batch: Callable[[Any, Options, str], dict[str, torch.Tensor]]


def _task_of(model_type: str, owner: str) -> _Task:
    tasks = import_package("transformers.models.auto.modeling_auto")
    # BERT can be trained as a causal model, too; the first match in this order is the model's main objective.
    for task in (
        _Task("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", _text_pair_batch),
        _Task("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", _masked_batch),
        _Task("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", _causal_batch),
        _Task("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", _image_batch),
    ):
        if model_type in getattr(tasks, task.mapping):
            return task
    raise UsageError(f"{owner} is neither a language model nor an image classifier; build your own step as a function")


def _make_config(transformers: Any, model_type: str, figures: Mapping[str, Any], options: Options, owner: str) -> Any:
    try:
        config = transformers.AutoConfig.for_model(model_type, **figures)
        changed = _changed_figures(config, options, owner)
        config = transformers.AutoConfig.for_model(model_type, **{**figures, **changed}) if changed else config
    except UsageError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"{owner} cannot be configured: {error}") from error
    config.use_cache = False  # the cache of keys and values is for generating text
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id or 0  # as in T5's checkpoints, but not in its defaults
    return config


def _changed_figures(config: Any, options: Options, owner: str) -> dict[str, int]:
    """Return the fields of a configuration that the options change."""
    if config.sub_configs:
        raise UsageError(f"{owner} is made of several models; build your own step as a function")
    changed: dict[str, int] = {}
    if options.layers is not None:
        own_name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        if not hasattr(config, own_name):
            raise UsageError(f"layers does not fit {owner}: its configuration does not count layers; leave it out")
        names = (own_name, "encoder_layers", "decoder_layers", "num_decoder_layers")
        changed |= {name: options.layers for name in names if hasattr(config, name)}
    if options.image_size is not None and hasattr(config, "image_size"):
        changed["image_size"] = options.image_size
    return changed


def _tokens(config: Any, options: Options, owner: str) -> torch.Tensor:
    most = _longest_sequence(config)
    length = options.sequence_length or (_SEQUENCE_LENGTH if most is None else min(most, _SEQUENCE_LENGTH))
    if most is not None and length > most:
        raise UsageError(f"sequence_length {length} exceeds the maximum of {owner}, {most} tokens")
    lowest = min(_SPECIAL_TOKENS, config.vocab_size // 2)
    return torch.randint(lowest, config.vocab_size, (options.batch, length), device=options.device)


def _longest_sequence(config: Any) -> int | None:
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int) or most < 1:
        return None
    # RoBERTa and related models number positions from the padding token's id on.
    counts_from_padding = ("roberta", "camembert", "xmod", "data2vec-text")
    return most - config.pad_token_id - 1 if config.model_type.startswith(counts_from_padding) else most


def _causal_batch(config: Any, options: Options, owner: str) -> dict[str, torch.Tensor]:
    tokens = _tokens(config, options, owner)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _masked_batch(config: Any, options: Options, owner: str) -> dict[str, torch.Tensor]:
    tokens = _tokens(config, options, owner)
    masked = torch.rand(tokens.shape, device=tokens.device) < _MASKED_SHARE
    masked[:, 0] = True  # a batch without masked tokens would have no loss
    stand_in = min(_SPECIAL_TOKENS, config.vocab_size // 2) - 1
    return {
        "input_ids": tokens.masked_fill(masked, stand_in),
        "labels": tokens.masked_fill(~masked, _IGNORED_LABEL),
    }


def _text_pair_batch(config: Any, options: Options, owner: str) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(config, options, owner), "labels": _tokens(config, options, owner)}


def _image_batch(config: Any, options: Options, owner: str) -> dict[str, torch.Tensor]:
    own_size = getattr(config, "image_size", None)
    size = options.image_size or (own_size if isinstance(own_size, int) else _IMAGE_SIZE)
    channels = getattr(config, "num_channels", 3)
    return {
        "pixel_values": torch.randn(options.batch, channels, size, size, device=options.device),
        "labels": torch.randint(config.num_labels, (options.batch,), device=options.device),
    }
