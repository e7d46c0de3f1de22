"""How often the planted fault is named: an FP16 overflow in a random linear or convolution of each model family.

The weight of one layer is scaled until its output reaches 2e5 in FP32, three times what FP16 holds; the rest is left
alone. Right is a report whose ``first_bad`` names that very module, as an overflow.
"""

from __future__ import annotations

import argparse
import random
import warnings

import torch
from torch import nn

import nanprobe
from benchmarks.healthy import FAMILIES, batch_for

_REACHED = 2e5
_LARGEST_WEIGHT = 6e4


def _layers(model: nn.Module) -> list[str]:
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d)
    return [path for path, module in model.named_modules() if isinstance(module, kinds)]


def _largest_output(model: nn.Module, path: str, batch: dict[str, torch.Tensor]) -> float | None:
    seen: list[float] = []
    handle = model.get_submodule(path).register_forward_hook(
        lambda _, __, output: seen.append(float(output.abs().max()))
    )
    try:
        with torch.no_grad():
            model.eval()(**batch)
    finally:
        handle.remove()
    return max(seen, default=None)


def main(arguments: list[str] | None = None) -> None:
    """Plant, replay and count."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--per-family", type=int, default=2, help="faults planted in each model")
    parser.add_argument("--seed", type=int, default=3)
    options = parser.parse_args(arguments)
    random.seed(options.seed)
    right = tried = 0
    for name in FAMILIES:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, batch = FAMILIES[name](), batch_for(name)
            layers = _layers(model)
            for path in random.sample(layers, min(options.per_family, len(layers))):
                weight = model.get_submodule(path).get_parameter("weight")
                before = weight.detach().clone()
                largest = _largest_output(model, path, batch)
                if not largest or float(before.abs().max()) * _REACHED / largest > _LARGEST_WEIGHT:
                    continue  # never called, or the weight itself would leave the format
                with torch.no_grad():
                    weight.mul_(_REACHED / largest)
                for mode in ("autocast", "cast"):
                    bad = nanprobe.replay(model, batch, dtype="fp16", mode=mode, train=False).first_bad
                    found = bad is not None and (bad.module, bad.mechanism) == (path, "overflow")
                    tried, right = tried + 1, right + found
                    if not found:
                        print(f"{name} {mode}: planted in {path}, named {bad.module if bad is not None else None}")
                with torch.no_grad():
                    weight.copy_(before)
    print(f"{right} of {tried} planted overflows named right, in {len(FAMILIES)} families")


if __name__ == "__main__":
    main()
