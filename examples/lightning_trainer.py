"""A small network trained by the Trainer of Lightning within a budget.

python examples/lightning_trainer.py
"""

import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

from elbowroom.integrations.lightning import ElbowroomCallback


class Autoencoder(LightningModule):
    """Nothing in it knows of Elbowroom."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            *(layer for _ in range(6) for layer in (torch.nn.Linear(128, 128), torch.nn.GELU()))
        )

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = (self.net(batch) - batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
rows = [torch.randn(128) for _ in range(8192)]
loader = torch.utils.data.DataLoader(rows, batch_size=1024)
with tempfile.TemporaryDirectory() as folder:
    callback = ElbowroomCallback("7MiB")
    trainer = Trainer(
        max_epochs=2, accumulate_grad_batches=2, log_every_n_steps=2, accelerator="cpu", enable_progress_bar=False,
        default_root_dir=folder, logger=CSVLogger(folder), callbacks=[callback],
    )  # fmt: skip
    trainer.fit(Autoencoder(), loader)
    print(callback.room)
