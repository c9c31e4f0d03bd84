"""Integrations with the real frameworks: the same bits as without us, within the budget, saved and resumed."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elbowroom.errors import Infeasible, UsageError
from elbowroom.integrations.logged_metrics import LOGGED, PREFIX
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Journal, Mode
from elbowroom.workloads._packages import import_package

WIDTH = 64
TOKENS = 64
UNTIL_PLANNED = 2  # a Trainer's first steps are captured
QUICK: dict[str, Any] = {"strategy": "offload_all", "op_time_store": False}


@pytest.fixture(autouse=True, scope="module")
def importable_packages() -> None:
    """Packages that import torchvision, which may not match this build of torch."""
    pytest.importorskip("accelerate", reason="the extra `integrations` is not installed")
    import_package("transformers")
    torch.manual_seed(0)


def take_bits(model: nn.Module) -> bytes:
    return b"".join(each.detach().numpy().tobytes() for each in model.parameters())


def check_journal(journal: Journal, budget_bytes: int, modes: Sequence[Mode]) -> None:
    """Every step was within the budget, ran in the expected mode, and moved something."""
    assert [step.mode for step in journal.steps] == list(modes)
    assert 0 < (journal.peak_bytes or 0) <= budget_bytes
    assert all(step.offloaded_bytes + step.recomputed for step in journal.steps)


# -- transformers -----------------------------------------------------------------------------------------------------


def make_gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=WIDTH, n_head=4, vocab_size=128, n_positions=TOKENS))


def make_texts(lengths: Sequence[int] = (TOKENS,)) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 128, (lengths[index % len(lengths)],), generator=generator) for index in range(48)]
    return [{"input_ids": each, "labels": each} for each in texts]


def train_gpt(
    folder: pathlib.Path, callback: Any, *, steps: int = 6, resume: Any = None, model: Any = None, **options: Any
) -> tuple[list[tuple[Any, ...]], bytes, Any]:
    """Train with the Trainer: accumulation, dropout, evaluation, checkpoints. Losses, parameters, and the trainer."""
    from transformers import Trainer, TrainingArguments

    texts = make_texts()
    model = make_gpt() if model is None else model
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=2, use_cpu=True,
        eval_strategy="steps", eval_steps=2, save_steps=4, logging_steps=1, report_to=[], disable_tqdm=True, seed=3,
        **options,
    )  # fmt: skip
    callbacks = [] if callback is None else [callback]
    trainer = Trainer(model, arguments, train_dataset=texts, eval_dataset=texts[:4], callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    losses = [(each["step"], each.get("loss"), each.get("eval_loss")) for each in trainer.state.log_history]
    return losses, take_bits(model), trainer


def test_transformers(tmp_path: pathlib.Path, profile: HardwareProfile) -> None:
    """With accumulation, bfloat16, dropout, evaluation, and a run that resumes."""
    from elbowroom.integrations.transformers import ElbowroomCallback

    budget = 7 << 20
    losses, bits, _ = train_gpt(tmp_path / "plain", None, bf16=True)
    callback = ElbowroomCallback(budget, profile=profile, **QUICK)
    found, its_bits, trainer = train_gpt(tmp_path / "managed", callback, bf16=True)
    assert (found, its_bits) == (losses, bits)
    assert callback.room is not None
    modes = [Mode.CAPTURE] * UNTIL_PLANNED + [Mode.PLANNED] * (6 - UNTIL_PLANNED)
    check_journal(callback.room.journal(), budget, modes)
    logged = next(each for each in reversed(trainer.state.log_history) if "loss" in each)
    assert logged[PREFIX + "budget_bytes"] == budget
    assert {PREFIX + name for name in LOGGED} <= logged.keys()

    resumed = ElbowroomCallback(budget, profile=profile, **QUICK)
    found, its_bits, _ = train_gpt(
        tmp_path / "managed", resumed, bf16=True, resume=str(tmp_path / "managed" / "checkpoint-4")
    )
    assert (found, its_bits) == (losses, bits)
    assert resumed.room is not None
    check_journal(resumed.room.journal(), budget, [Mode.PLANNED] * 2)  # nothing was learned again


def test_transformers_reports_before_others(tmp_path: pathlib.Path, profile: HardwareProfile) -> None:
    """A reporting callback of the Trainer's own receives the metrics of a callback that was moved before it."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from elbowroom.integrations.transformers import ElbowroomCallback

    seen: list[bool] = []

    class Reporter(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if "loss" in kwargs["logs"]:
                seen.append(PREFIX + "peak_bytes" in kwargs["logs"])

    callback = ElbowroomCallback("1GiB", profile=profile, **QUICK)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no"
    )
    trainer = Trainer(make_gpt(), arguments, train_dataset=make_texts(), callbacks=[Reporter(), callback])
    trainer.train()
    callback.report_first(trainer)
    trainer.train()
    assert seen == [False, True]


@pytest.mark.parametrize("where", ["forward", "update"])
def test_transformers_after_a_failure(where: str, tmp_path: pathlib.Path, profile: HardwareProfile) -> None:
    """A training that fails inside a step ends the step, and can be repeated with the same callback."""
    from elbowroom.integrations.transformers import ElbowroomCallback

    model = make_gpt()
    callback = ElbowroomCallback("1GiB", profile=profile, **QUICK)
    fail: Any = lambda *_: 1 / 0  # noqa: E731
    handle = model.register_forward_hook(fail) if where == "forward" else register_optimizer_step_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        train_gpt(tmp_path, callback, model=model, steps=1)
    handle.remove()
    assert callback.room is not None
    with pytest.raises(UsageError, match="this room is detached"):
        callback.room.begin_step()
    train_gpt(tmp_path, callback, model=model, steps=1)
    assert len(callback.room.journal().steps) == 1


def test_transformers_tries_smaller_batches(tmp_path: pathlib.Path, profile: HardwareProfile) -> None:
    """With `auto_find_batch_size`, a batch that does not fit into the budget is made smaller."""
    from transformers import Trainer, TrainingArguments

    from elbowroom.integrations.transformers import ElbowroomCallback

    sizes: list[int] = []

    class Batches(Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            sizes.append(len(inputs["input_ids"]))
            if sizes[-1] > 4:
                raise Infeasible(needed_bytes=2, budget_bytes=1, op="mm", is_whole_step=False)
            return super().training_step(model, inputs, *args, **kwargs)

    callback = ElbowroomCallback("1GiB", profile=profile, **QUICK)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=6, auto_find_batch_size=True, report_to=[],
        disable_tqdm=True, use_cpu=True, save_strategy="no",
    )  # fmt: skip
    Batches(make_gpt(), arguments, train_dataset=make_texts(), callbacks=[callback]).train()
    assert sizes[0] == 6 and sizes[-2:] == [sizes[-1]] * 2 and sizes[-1] <= 4
    assert callback.room is not None and len(callback.room.journal().steps) == 2


def test_transformers_lets_go_of_a_model_whose_training_failed(
    tmp_path: pathlib.Path, profile: HardwareProfile
) -> None:
    """So that another Trainer can train it within a larger budget, while the first one is still there."""
    from transformers import Trainer, TrainingArguments

    from elbowroom.integrations.transformers import ElbowroomCallback

    model, trainers = make_gpt(), []
    for budget in ("100KiB", "1GiB"):
        arguments = TrainingArguments(
            str(tmp_path), max_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no"
        )
        callback = ElbowroomCallback(budget, profile=profile, **QUICK)
        trainers.append(Trainer(model, arguments, train_dataset=make_texts(), callbacks=[callback]))
        with pytest.raises(Infeasible) if budget == "100KiB" else contextlib.nullcontext():
            trainers[-1].train()


def test_peft(tmp_path: pathlib.Path, profile: HardwareProfile) -> None:
    """Low-rank adapters beside frozen weights."""
    peft = pytest.importorskip("peft", reason="the extra `integrations` is not installed")
    from elbowroom.integrations.transformers import ElbowroomCallback

    def make() -> Any:
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", lora_dropout=0.1)
        return peft.get_peft_model(make_gpt(), config)

    budget = 6 << 20
    losses, bits, _ = train_gpt(tmp_path / "plain", None, model=make(), steps=4)
    callback = ElbowroomCallback(budget, profile=profile, **QUICK)
    found, its_bits, _ = train_gpt(tmp_path / "managed", callback, model=make(), steps=4)
    assert (found, its_bits) == (losses, bits)
    assert callback.room is not None
    check_journal(callback.room.journal(), budget, [Mode.CAPTURE] * 2 + [Mode.PLANNED] * 2)


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.usefixtures("plans_at_once")
@pytest.mark.parametrize("adapts", [False, True], ids=["full", "lora"])
def test_trl(adapts: bool, tmp_path: pathlib.Path, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervised fine-tuning on texts of three lengths, with evaluation: in the end no step drifts."""
    peft = pytest.importorskip("peft", reason="the extra `integrations` is not installed")
    trl = pytest.importorskip("trl", reason="trl is not in the extra `integrations`: it needs pyarrow, of 170 MB")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    from elbowroom.integrations.transformers import ElbowroomCallback

    # Columns of the vocabulary that its loss computes at once, in a buffer that no budget can split.
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 64)
    budget = 7 << 19 if adapts else 7 << 20
    per_epoch = 6

    def train(callback: Any) -> tuple[list[Any], bytes]:
        texts = [{"input_ids": each["input_ids"].tolist()} for each in make_texts((24, 24, 64, 64, 48, 48))]
        arguments = trl.SFTConfig(
            str(tmp_path), num_train_epochs=5, per_device_train_batch_size=2, report_to=[], disable_tqdm=True,
            use_cpu=True, save_strategy="no", logging_steps=1, bf16=False, gradient_checkpointing=False,
            max_length=None, dataset_kwargs={"skip_prepare_dataset": True}, train_sampling_strategy="sequential",
            learning_rate=1e-3, eval_strategy="epoch",
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            make_gpt(), arguments, train_dataset=datasets.Dataset.from_list(texts[: 2 * per_epoch]),
            eval_dataset=datasets.Dataset.from_list(texts[:4]), processing_class=_make_tokenizer(),
            peft_config=peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1) if adapts else None,
            callbacks=[] if callback is None else [callback],
        )  # fmt: skip
        trainer.train()
        return [(each.get("loss"), each.get("eval_loss")) for each in trainer.state.log_history], take_bits(
            trainer.model
        )

    plain = train(None)
    callback = ElbowroomCallback(budget, profile=profile, **QUICK)
    assert train(callback) == plain
    assert callback.room is not None
    steps = callback.room.journal().steps
    assert len(steps) == 5 * per_epoch
    assert max(step.peak_bytes or 0 for step in steps) <= budget
    assert {step.mode for step in steps[3 * per_epoch :]} == {Mode.PLANNED}
    assert any(step.offloaded_bytes + step.recomputed for step in steps[3 * per_epoch :])


def _make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{index}": index for index in range(2, 128)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


# -- Lightning --------------------------------------------------------------------------------------------------------


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))))


def make_batches() -> torch.utils.data.DataLoader[Any]:
    rows = torch.randn(6144, WIDTH, generator=torch.Generator().manual_seed(2)).unbind()
    return torch.utils.data.DataLoader([(each.clone(),) for each in rows], batch_size=512)


def make_lightning_module(losses: list[str]) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.net(batch[0]).square().mean()
            losses.append(float(loss.detach()).hex())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            losses.append(float(self.net(batch[0]).mean()).hex())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Module()


def make_lightning_gan(losses: list[str]) -> Any:
    from lightning.pytorch import LightningModule

    class Gan(LightningModule):  # type: ignore[misc]
        """Manual optimization with two optimizers."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.maker, self.judge = make_net(), make_net()

        def training_step(self, batch: Any, index: int) -> None:
            its, ours = self.optimizers()
            made = self.maker(batch[0])
            self._update(its, self.judge(made.detach()).mean() - self.judge(batch[0]).mean())
            self._update(ours, -self.judge(made).mean())

        def _update(self, optimizer: Any, loss: torch.Tensor) -> None:
            losses.append(float(loss.detach()).hex())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (self.judge, self.maker)]

    return Gan()


def train_lightning(
    folder: pathlib.Path, make: Callable[[list[str]], Any], callback: Any, *, resume: Any = None, others: Any = (),
    **options: Any,
) -> tuple[list[str], bytes, Any]:  # fmt: skip
    lightning = pytest.importorskip("lightning.pytorch", reason="the extra `integrations` is not installed")
    losses: list[str] = []
    module = make(losses)
    lightning.seed_everything(4)
    trainer = lightning.Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*others, *([] if callback is None else [callback])], default_root_dir=str(folder),
        num_sanity_val_steps=1,
        **{"max_epochs": 1, "logger": False, **options},
    )  # fmt: skip
    trainer.fit(
        module, make_batches(), None if options.get("limit_val_batches") == 0 else make_batches(), **(resume or {})
    )
    return losses, take_bits(module), trainer


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: pathlib.Path, profile: HardwareProfile) -> None:
    """With accumulation, bfloat16, dropout, validation, and a run that takes over what was learned."""
    pytest.importorskip("lightning", reason="the extra `integrations` is not installed")
    from lightning.pytorch.loggers import CSVLogger

    from elbowroom.integrations.lightning import ElbowroomCallback

    budget = 9 << 17
    options = {
        "accumulate_grad_batches": 2, "precision": "bf16-mixed", "val_check_interval": 4, "limit_val_batches": 1,
        "enable_checkpointing": False,
    }  # fmt: skip
    losses, bits, _ = train_lightning(tmp_path, make_lightning_module, None, **options)
    callback = ElbowroomCallback(budget, profile=profile, **QUICK)
    logger = CSVLogger(tmp_path)
    found, its_bits, trainer = train_lightning(
        tmp_path, make_lightning_module, callback, logger=logger, log_every_n_steps=2, **options
    )
    table = (pathlib.Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert {PREFIX + name for name in LOGGED} <= set(table[0].split(","))
    assert len(table) == 4  # after every second update
    assert (found, its_bits) == (losses, bits)
    assert callback.room is not None
    check_journal(callback.room.journal(), budget, [Mode.CAPTURE] * 2 + [Mode.PLANNED] * 4)

    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed = ElbowroomCallback(budget, profile=profile, **QUICK)
    train_lightning(
        tmp_path, make_lightning_module, resumed, resume={"ckpt_path": tmp_path / "last.ckpt"},
        **{**options, "max_epochs": 2},
    )  # fmt: skip
    assert resumed.room is not None
    check_journal(resumed.room.journal(), budget, [Mode.PLANNED] * 6)


@pytest.mark.parametrize("name", ["transformers", "lightning", "accelerate"])
def test_bad_arguments_are_refused_at_once(name: str) -> None:
    pytest.importorskip(name, reason="the extra `integrations` is not installed")
    module = importlib.import_module(f"elbowroom.integrations.{name}")
    make: Any = module.ElbowroomPlugin if name == "accelerate" else module.ElbowroomCallback
    for budget, options in (
        ("x", {}), (0, {}), (1.5, {}), ("1GB", {"foo": 1}), ("1GB", {"mode": "x"}), ("1GB", {"strategy": "x"}),
        ("1GB", {"priority": "x"}), ("1GB", {"spill_folder": 3}), ("1GB", {"profile": "rtx3090"}),
    ):  # fmt: skip
        with pytest.raises(UsageError):
            make(budget, **options)


@pytest.mark.filterwarnings("ignore")
def test_lightning_with_averaged_weights(tmp_path: pathlib.Path, profile: HardwareProfile) -> None:
    """The average is a copy that a callback makes before the training begins. It counts, and may leave."""
    pytest.importorskip("lightning", reason="the extra `integrations` is not installed")
    from lightning.pytorch.callbacks import Callback, EMAWeightAveraging

    from elbowroom.integrations.lightning import ElbowroomCallback

    losses, bits, _ = train_lightning(tmp_path, make_lightning_module, None, others=[EMAWeightAveraging(decay=0.5)])
    kept: set[int] = set()

    class ListsKept(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_args: Any) -> None:
            assert callback.room is not None
            kept.update(map(id, callback.room._job.list_kept()))

    callback, average = ElbowroomCallback(9 << 17, profile=profile, **QUICK), EMAWeightAveraging(decay=0.5)
    found = train_lightning(tmp_path, make_lightning_module, callback, others=[average, ListsKept()])
    assert found[:2] == (losses, bits)
    assert average._average_model is not None
    assert kept.issuperset(map(id, average._average_model.parameters()))


@pytest.mark.filterwarnings("ignore")
def test_lightning_with_two_optimizers(tmp_path: pathlib.Path, profile: HardwareProfile) -> None:
    pytest.importorskip("lightning", reason="the extra `integrations` is not installed")
    from elbowroom.integrations.lightning import ElbowroomCallback

    budget = 2 << 20
    options = {"limit_train_batches": 5, "limit_val_batches": 0, "enable_checkpointing": False}
    losses, bits, _ = train_lightning(tmp_path, make_lightning_gan, None, **options)
    callback = ElbowroomCallback(budget, profile=profile, **QUICK)
    found, its_bits, _ = train_lightning(tmp_path, make_lightning_gan, callback, **options)
    assert (found, its_bits) == (losses, bits)
    assert callback.room is not None
    check_journal(callback.room.journal(), budget, [Mode.CAPTURE] * 2 + [Mode.PLANNED] * 3)


# -- Accelerate -------------------------------------------------------------------------------------------------------


def train_accelerate(
    plugin: Any, *, epochs: int = 1, load: pathlib.Path | None = None, save: pathlib.Path | None = None
) -> tuple[list[str], bytes]:
    """A loop with accumulation, bfloat16 and evaluation; starts from a state, or saves one at its end."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    net = make_net()
    objects = (net, torch.optim.AdamW(net.parameters(), lr=1e-3), make_batches())
    prepare = accelerator.prepare if plugin is None else lambda *each: plugin.prepare(accelerator, *each)
    model, optimizer, batches = prepare(*objects)
    if load is not None:
        accelerator.load_state(str(load))
    torch.manual_seed(5)
    losses = []
    for _ in range(epochs):
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(batch[0]).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()).hex())
        model.eval()
        with torch.no_grad():
            losses.append(float(model(batch[0]).mean()).hex())
        model.train()
    if save is not None:
        accelerator.save_state(str(save))
    return losses, take_bits(net)


def test_accelerate(tmp_path: pathlib.Path, profile: HardwareProfile) -> None:
    from elbowroom.integrations.accelerate import ElbowroomPlugin

    budget = 3 << 19
    losses, bits = train_accelerate(None)
    plugin = ElbowroomPlugin(budget, profile=profile, **QUICK)
    assert train_accelerate(plugin, save=tmp_path) == (losses, bits)
    assert plugin.room is not None
    check_journal(plugin.room.journal(), budget, [Mode.CAPTURE] * 2 + [Mode.PLANNED] * 4)
    assert plugin.metrics()[PREFIX + "budget_bytes"] == budget
    with pytest.raises(UsageError, match="prepared a loop already"):
        train_accelerate(plugin)
    plugin.close()

    train_accelerate(resumed := ElbowroomPlugin(budget, profile=profile, **QUICK), load=tmp_path)
    assert resumed.room is not None
    check_journal(resumed.room.journal(), budget, [Mode.PLANNED] * 6)
    resumed.close()


@pytest.mark.parametrize("saves_plainly", [True, False], ids=["saved plainly", "loaded plainly"])
def test_accelerate_checkpoints_are_those_of_plain_runs(
    saves_plainly: bool, tmp_path: pathlib.Path, profile: HardwareProfile
) -> None:
    from elbowroom.integrations.accelerate import ElbowroomPlugin

    plugin = ElbowroomPlugin(3 << 19, profile=profile, **QUICK)
    train_accelerate(None if saves_plainly else plugin, save=tmp_path)
    plugin.close()
    expected = train_accelerate(None, load=tmp_path)
    found = train_accelerate(plugin if saves_plainly else None, load=tmp_path)
    plugin.close()
    assert found == expected


def test_accelerate_saves_once_and_loads_at_any_time(tmp_path: pathlib.Path, profile: HardwareProfile) -> None:
    """A plugin that prepares again is saved once; a state that is loaded inside a step is taken over after it."""
    from accelerate import Accelerator

    from elbowroom.integrations.accelerate import ElbowroomPlugin

    accelerator = Accelerator(cpu=True)
    plugin = ElbowroomPlugin(3 << 19, profile=profile, **QUICK)
    for _ in range(2):
        plugin.close()
        model, optimizer = plugin.prepare(accelerator, net := make_net(), torch.optim.AdamW(net.parameters()))
    for index in range(8):
        model(torch.ones(256, WIDTH)).square().mean().backward()
        if index == 6:
            accelerator.save_state(str(tmp_path))
            accelerator.load_state(str(tmp_path))  # inside the step, whose update is still to come
        optimizer.step()
        optimizer.zero_grad()
    assert len(list(tmp_path.glob("elbowroom*"))) == 1
    assert plugin.room is not None and plugin.room.journal().steps[-1].mode is Mode.PLANNED
    plugin.close()


def test_frameworks_on_two_ranks(tmp_path: pathlib.Path) -> None:
    """As `torchrun` and `accelerate launch` start them: one plan for both, and the bits of the framework alone."""
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join(filter(None, (str(root / "src"), str(root), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    ended = subprocess.run(
        [*command, str(root / "tests" / "launched.py"), str(tmp_path)], env=environment, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert one.keys() == other.keys() == {"train_accelerate", "train_transformers", "train_lightning"}
    for framework, found in one.items():
        assert found["plan"] == other[framework]["plan"] != ""
        for each in (found, other[framework]):
            assert each["same"] and each["is_within"] and each["moved"] > 0
            assert each["modes"][-2:] == ["planned"] * 2


def test_accelerate_needs_a_model_and_an_optimizer(profile: HardwareProfile) -> None:
    from accelerate import Accelerator

    from elbowroom.integrations.accelerate import ElbowroomPlugin

    plugin = ElbowroomPlugin("1GiB", profile=profile)
    with pytest.raises(UsageError, match="the model and its optimizer together"):
        plugin.prepare(Accelerator(cpu=True), make_net())
