"""Make the batches of the example configs from a fixed seed: ``python configs/make_batches.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def batches() -> dict[str, Any]:
    """Return each batch by its file's name."""
    torch.manual_seed(0)
    text = torch.randint(3, 256, (4, 33))
    labels = text[:, 1:].clone()
    labels[2, 20:] = -100
    lengths = torch.tensor([12, 9, 12, 5])
    sequences = torch.randint(1, 128, (4, 12)) * (torch.arange(12) < lengths[:, None])
    return {
        "tokens.pt": {"input_ids": text[:, :-1].clone(), "labels": labels},
        "causal_lm.pt": {"input_ids": text[:, :-1].clone(), "labels": text[:, :-1].clone()},
        "images.pt": torch.rand(4, 3, 32, 32),
        "sequences.pt": [sequences, lengths],
    }


def main() -> None:
    """Write every batch."""
    folder = Path(__file__).parent / "batches"
    folder.mkdir(exist_ok=True)
    for name, batch in batches().items():
        torch.save(batch, folder / name)


if __name__ == "__main__":
    main()
