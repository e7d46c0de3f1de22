"""What a module-level replay costs beside the plain runs it consists of.

A 12-layer decoder, batch 4 x 128: the sum of a plain FP32 and a plain BF16 autocast forward and backward is set against
nanprobe's replay of FP32 and BF16, with and without the local error. All are measured in turn, round after round
in one process, so that a machine that slows down slows all of them; medians are compared. Importing and building the
model are not counted.

On a CPU without BF16 arithmetic PyTorch's own BF16 run takes many times FP32's, and nanprobe's lane does not. What the
comparing costs is therefore also set against plain FP32 plus the BF16 lane run by itself, unobserved.
"""

from __future__ import annotations

import argparse

import torch

import nanprobe
from benchmarks import decoder
from benchmarks.turns import lane_alone, medians, spec_of, timed

BOUNDS = {"with local error": 1.6, "without local error": 1.3}
"""What the replay may take, in multiples of the sum of the plain runs."""


def measured(rounds: int) -> dict[str, float]:
    """Return the median seconds of each run, after one round that is not counted."""
    torch.manual_seed(0)
    model = decoder.small().train()
    batch = decoder.batch(4, 128)

    def plain(low: bool) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            loss = decoder.loss(model(**batch), batch)
        loss.backward()
        model.zero_grad(set_to_none=True)

    def replay(local_error: bool) -> None:
        report = nanprobe.replay(
            model, batch, dtype="bf16", loss=decoder.loss, mode="autocast", local_error=local_error
        )
        if not all(result.completed for result in report.precisions.values()):
            raise SystemExit(f"a lane did not finish: {report.precisions}")

    return medians(
        {
            "plain FP32": timed(lambda: plain(False)),
            "plain BF16": timed(lambda: plain(True)),
            "BF16 lane alone": lambda: lane_alone(spec_of(model, batch, decoder.loss, "bf16")),
            "with local error": timed(lambda: replay(True)),
            "without local error": timed(lambda: replay(False)),
        },
        rounds,
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure and print; the bounds are printed beside the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    seconds = measured(parser.parse_args(arguments).rounds)
    plain = seconds["plain FP32"] + seconds["plain BF16"]
    alone = seconds["plain FP32"] + seconds["BF16 lane alone"]
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    for name, value in seconds.items():
        bound = BOUNDS.get(name)
        beside = f"  {value / plain:.2f} x plain FP32 + BF16 (at most {bound})" if bound else ""
        beside += f", {value / alone:.2f} x plain FP32 + the lane alone" if bound else ""
        print(f"{name:<22}{value:7.3f} s{beside}")


if __name__ == "__main__":
    main()
