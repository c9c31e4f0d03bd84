"""Real architectures at sizes for two CPU cores, to compare training with and without Elbowroom to the last bit.

Each case is a whole training step. In each the activations outweigh the gradients, so that a memory budget has
something to move. Widths and vocabularies are cut, never the kinds of layers or the way they are connected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from elbowroom.workloads._packages import import_package

BATCHES = 3
CLASSES = 10
VOCABULARY = 4096
SEED = 20


class Step(Protocol):
    """Runs one whole training step on the batch of this index and returns the detached loss."""

    def __call__(self, index: int) -> torch.Tensor: ...


Made: TypeAlias = tuple[nn.Module, torch.optim.Optimizer, Step]
Batch: TypeAlias = dict[str, torch.Tensor]
Loss: TypeAlias = Callable[[nn.Module, Batch], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One model with its way of training.

    Attributes:
        name: as in `MODELS`.
        make: builds model, optimizer and step afresh, the same each time, and seeds torch's generator. The steps of
            models with dropout draw from that generator, so run one made case to its end before making the next.
        draws: whether the steps draw random numbers.
    """

    name: str
    make: Callable[[], Made]
    draws: bool = False


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=2e-3, momentum=0.9, weight_decay=1e-4)


def _case(
    name: str,
    model: Callable[[], nn.Module],
    batch: Callable[[], Batch],
    loss: Loss,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    draws: bool = False,
    micro_batches: int = 1,
    autocast: bool = False,
    channels_last: bool = False,
) -> Case:
    def make() -> Made:
        torch.manual_seed(SEED)
        made = model().train()
        batches = [batch() for _ in range(BATCHES * micro_batches)]
        if channels_last:
            made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            for one in batches:
                one["images"] = one["images"].contiguous(memory_format=torch.channels_last)
        made_optimizer = optimizer(made)
        torch.manual_seed(SEED)
        return made, made_optimizer, _step_of(made, made_optimizer, batches, loss, micro_batches, autocast)

    return Case(name, make, draws)


def _step_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    loss: Loss,
    micro_batches: int,
    autocast: bool,
) -> Step:
    def step(index: int) -> torch.Tensor:
        total = torch.zeros(())
        for part in range(micro_batches):
            batch = batches[(index * micro_batches + part) % len(batches)]
            with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
                value = loss(model, batch) / micro_batches
            value.backward()  # type: ignore[no-untyped-call]
            total = total + value.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


# Images ---------------------------------------------------------------------------------------------------------------


def _images(count: int, size: int) -> Callable[[], Batch]:
    return lambda: {"images": torch.randn(count, 3, size, size), "labels": torch.randint(CLASSES, (count,))}


def _classification(model: nn.Module, batch: Batch) -> torch.Tensor:
    return functional.cross_entropy(model(batch["images"]), batch["labels"])


def _torchvision(name: str, **figures: Any) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        made: nn.Module = import_package("torchvision").models.get_model(
            name, weights=None, num_classes=CLASSES, **figures
        )
        return made

    return model


def _vgg16_bn() -> nn.Module:
    """VGG-16 of half the width, with batch norm and one linear classifier, as it is trained on small images.

    The published classifier alone has 120 million parameters, which would outweigh all activations.
    """
    vgg = import_package("torchvision").models.vgg
    layers = vgg.make_layers([each if each == "M" else each // 2 for each in vgg.cfgs["D"]], batch_norm=True)
    return nn.Sequential(layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(256, CLASSES))


def _densenet121() -> nn.Module:
    """DenseNet-121 with half of the layers in each block: every layer reads what all before it in its block made."""
    models = import_package("torchvision").models
    made: nn.Module = models.DenseNet(growth_rate=32, block_config=(3, 6, 12, 8), num_classes=CLASSES)
    return made


def _vit() -> nn.Module:
    """torchvision's VisionTransformer in the tiny size: 6 layers, patches of 8 pixels, dropout on."""
    models = import_package("torchvision").models
    made: nn.Module = models.VisionTransformer(
        image_size=64,
        patch_size=8,
        num_layers=6,
        num_heads=3,
        hidden_dim=192,
        mlp_dim=768,
        dropout=0.1,
        attention_dropout=0.1,
        num_classes=CLASSES,
    )
    return made


class UNet(nn.Module):
    """The U-Net, with batch norm: what the way down makes is saved until the way up comes back to it.

        64x64   double ----------------------> cat, double -> 1x1
        32x32     pool, double ------> cat, double, up
        16x16       pool, double -> cat, double, up
         8x8           pool, double, up

    Source: Ronneberger, Fischer, Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation", MICCAI 2015.
    """

    def __init__(self, width: int = 16, depth: int = 4, classes: int = CLASSES) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth)]
        self.down = nn.ModuleList(
            self._double(before, after) for before, after in zip([3, *widths[:-1]], widths, strict=True)
        )
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(below, here, 2, stride=2) for below, here in pairs)
        self.up = nn.ModuleList(self._double(2 * here, here) for _, here in pairs)
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _double(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        skipped = []
        for level, double in enumerate(self.down):
            image = double(functional.max_pool2d(image, 2) if level else image)
            skipped.append(image)
        skipped.pop()
        for grow, double in zip(self.grow, self.up, strict=True):
            image = double(torch.cat((skipped.pop(), grow(image)), dim=1))
        output: torch.Tensor = self.head(image)
        return output


def _masks(count: int, size: int) -> Callable[[], Batch]:
    return lambda: {"images": torch.randn(count, 3, size, size), "labels": torch.randint(CLASSES, (count, size, size))}


# Text -----------------------------------------------------------------------------------------------------------------


class LanguageLSTM(nn.Module):
    """The two-layer LSTM language model with dropout between all layers.

    Source: Zaremba, Sutskever, Vinyals, "Recurrent Neural Network Regularization", 2014, section 4.1.
    """

    def __init__(self, width: int = 200) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.dropout = nn.Dropout(0.2)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output, _ = self.lstm(self.dropout(self.embedding(tokens)))
        logits: torch.Tensor = self.head(self.dropout(output))
        return logits


def _next_token(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch["input_ids"])[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def _tokens(count: int, length: int) -> Callable[[], Batch]:
    def batch() -> Batch:
        tokens = torch.randint(VOCABULARY, (count, length))
        return {"input_ids": tokens, "labels": tokens.clone()}

    return batch


def _masked_tokens(count: int, length: int) -> Callable[[], Batch]:
    def batch() -> Batch:
        tokens = torch.randint(VOCABULARY, (count, length))
        masked = torch.rand(tokens.shape) < 0.15
        # Padding of different lengths, so that the attention mask is a tensor that the layers share.
        padded = torch.arange(length) < torch.randint(length // 2, length + 1, (count, 1))
        return {
            "input_ids": tokens.masked_fill(masked, 3),
            "attention_mask": padded.long(),
            "labels": tokens.masked_fill(~(masked & padded), -100),
        }

    return batch


def _token_pairs(count: int, length: int) -> Callable[[], Batch]:
    return lambda: {
        "input_ids": torch.randint(1, VOCABULARY, (count, length)),
        "labels": torch.randint(1, VOCABULARY, (count, length)),
    }


def _own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def _gpt2(*, checkpoint: bool = False) -> Callable[[], nn.Module]:
    """GPT-2: embedding and output are one tensor, dropout 0.1."""

    def model() -> nn.Module:
        transformers = import_package("transformers")
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=256, n_embd=192, n_layer=4, n_head=6, use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        made = transformers.GPT2LMHeadModel(config)
        if checkpoint:
            # The name it has from transformers 5 on, or the one it had.
            new = getattr(made, "activation_checkpointing_enable", None)
            (new or made.gradient_checkpointing_enable)({"use_reentrant": False})
        result: nn.Module = made
        return result

    return model


def _bert() -> nn.Module:
    transformers = import_package("transformers")
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=192, num_hidden_layers=4, num_attention_heads=6, intermediate_size=768
    )
    made: nn.Module = transformers.BertForMaskedLM(config)
    return made


def _t5() -> nn.Module:
    """T5: encoder and decoder share one embedding, and all layers of each share one position bias."""
    transformers = import_package("transformers")
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=192, d_kv=32, d_ff=768, num_layers=3, num_heads=6, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    made: nn.Module = transformers.T5ForConditionalGeneration(config)
    return made


# The cases ------------------------------------------------------------------------------------------------------------


def _all_cases() -> tuple[Case, ...]:
    resnet50, gpt2 = _torchvision("resnet50", width_per_group=16), _gpt2()
    mobilenet = _torchvision("mobilenet_v3_large")
    label, language = _classification, _own_loss
    return (
        _case("resnet50", resnet50, _images(4, 64), label, sgd),
        _case("resnet50_channels_last", resnet50, _images(8, 96), label, sgd, channels_last=True),
        _case("shufflenet_bfloat16", _torchvision("shufflenet_v2_x0_5"), _images(12, 96), label, sgd, autocast=True),
        _case("vgg16_bn", _vgg16_bn, _images(4, 64), label, sgd, draws=True),
        _case("densenet121", _densenet121, _images(6, 64), label, sgd),
        _case("mobilenet_v3_large", mobilenet, _images(8, 96), label, adamw, draws=True),
        _case("unet", UNet, _masks(8, 64), label, adamw),
        _case("vit", _vit, _images(4, 64), label, adamw, draws=True),
        _case("gpt2", gpt2, _tokens(2, 128), language, adamw, draws=True),
        _case("gpt2_accumulation", gpt2, _tokens(1, 128), language, adamw, draws=True, micro_batches=2),
        _case("gpt2_checkpoint", _gpt2(checkpoint=True), _tokens(4, 128), language, adamw, draws=True),
        _case("gpt2_bfloat16", gpt2, _tokens(2, 128), language, sgd, draws=True, autocast=True),
        _case("bert", _bert, _masked_tokens(6, 64), language, adamw, draws=True),
        _case("t5", _t5, _token_pairs(4, 48), language, adamw, draws=True),
        _case("lstm", LanguageLSTM, _tokens(16, 32), _next_token, sgd, draws=True),
    )


def _giving(case: Case) -> Callable[[], Case]:
    return lambda: case


MODELS: dict[str, Callable[[], Case]] = {case.name: _giving(case) for case in _all_cases()}
