"""A small language model trained by the Trainer of transformers within a budget, and resumed from a checkpoint.

python examples/transformers_trainer.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from elbowroom.integrations.transformers import ElbowroomCallback

texts = [{"input_ids": each, "labels": each} for each in torch.randint(0, 256, (64, 64))]


def train(folder: str, resumes: bool) -> None:
    """Train for six updates, or for the last two of them."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=256, n_positions=64))
    arguments = TrainingArguments(
        folder, max_steps=6, per_device_train_batch_size=8, gradient_accumulation_steps=2, logging_steps=1,
        save_steps=4, bf16=True, eval_strategy="steps", eval_steps=3, use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip

    callback = ElbowroomCallback("14MiB")
    trainer = Trainer(model, arguments, train_dataset=texts, eval_dataset=texts[:8], callbacks=[callback])
    callback.report_first(trainer)  # so that TensorBoard, W&B and others receive our metrics
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-4" if resumes else None)
    print(callback.room)
    print([step.mode.value for step in callback.room.journal().steps])


with tempfile.TemporaryDirectory() as folder:
    train(folder, resumes=False)
    train(folder, resumes=True)
