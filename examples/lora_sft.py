"""Low-rank adapters (PEFT) trained by the supervised fine-tuning of TRL within a budget, on texts of two lengths.

python examples/lora_sft.py
"""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from elbowroom.integrations.transformers import ElbowroomCallback

words = {"<pad>": 0, "<eos>": 1, **{f"w{index}": index for index in range(2, 256)}}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<eos>")), pad_token="<pad>", eos_token="<eos>"
)
texts = [{"input_ids": torch.randint(2, 256, (length,)).tolist()} for length in (24, 24, 48, 48) * 2]
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=256, pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )
)  # fmt: skip

with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        folder, num_train_epochs=4, per_device_train_batch_size=2, train_sampling_strategy="sequential", use_cpu=True,
        bf16=False, save_strategy="no", report_to=[], disable_tqdm=True, max_length=None, logging_steps=1,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    callback = ElbowroomCallback("40MiB")
    trainer = SFTTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_list(texts),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        callbacks=[callback],
    )
    trainer.train()
    print(callback.room)
