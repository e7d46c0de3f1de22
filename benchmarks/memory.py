"""How much memory compare-precisions holds on a large model, forward only.

A model of 823 million parameters is saved as safetensors and replayed by the command in FP32, FP16 and BF16, in a
process of its own. A thread of that process reads RssAnon, which leaves out pages of mapped files: those the system can
take back whenever it needs them. Linux only; needs 4 GB of disk and 8 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent

CONFIG = """\
model: {{factory: benchmarks.decoder:large}}
checkpoint: model.safetensors
batch: batch.pt
mode: {mode}
train: false
backward: false
"""


def anonymous_bytes() -> int:
    """Return this process's anonymous resident memory, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not report RssAnon")


def write_inputs(folder: Path) -> None:
    """Write the weights (without the tied duplicate) and a batch of 1 x 16 tokens."""
    import torch
    from safetensors.torch import save_file

    from benchmarks import decoder

    torch.manual_seed(0)
    save_file(
        {name: value.detach() for name, value in decoder.large().named_parameters()}, folder / "model.safetensors"
    )
    torch.save({"input_ids": decoder.batch(1, 16)["input_ids"]}, folder / "batch.pt")


def watched_command(config: Path) -> None:
    """Run the command in this process and print its peak of anonymous memory, its exit code and its seconds."""
    peak = 0
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.005):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    start = time.perf_counter()
    from nanprobe.cli import entry_point

    sys.argv = ["nanprobe", "compare-precisions", "--config", str(config), "-o", str(config.with_suffix(".json"))]
    try:
        entry_point()
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    ended.set()
    watcher.join()
    seconds = time.perf_counter() - start
    print(json.dumps({"peak": peak, "exit": code, "seconds": seconds}), file=sys.stderr)


def measured(folder: Path, mode: str) -> dict[str, float]:
    """Return peak bytes, exit code and seconds of one mode, run in a process of its own."""
    config = folder / f"{mode}.yaml"
    config.write_text(CONFIG.format(mode=mode))
    script = "import sys, pathlib, benchmarks.memory as m; m.watched_command(pathlib.Path(sys.argv[1]))"
    words = [sys.executable, "-c", script, str(config)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        result: dict[str, float] = json.loads(done.stderr.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise SystemExit(f"the command failed:\n{done.stderr}") from None
    return result


def main(arguments: list[str] | None = None) -> None:
    """Measure each mode and print the peak beside its bound."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--modes", default="autocast,cast", help="comma-separated: autocast, cast")
    modes = parser.parse_args(arguments).modes.split(",")
    with tempfile.TemporaryDirectory(prefix="nanprobe-memory-") as name:
        folder = Path(name)
        # In a process of its own: building the model here would count towards nothing but hold its memory.
        script = "import sys, pathlib, benchmarks.memory as m; m.write_inputs(pathlib.Path(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", script, name], cwd=ROOT, check=True)
        weights = (folder / "model.safetensors").stat().st_size
        bound = 1.7 * weights + 700e6
        print(f"weights {weights / 1e9:.2f} GB in FP32; at most 1.7 x that + 0.7 GB = {bound / 1e9:.2f} GB")
        for mode in modes:
            found = measured(folder, mode)
            print(
                f"{mode:<9} peak {found['peak'] / 1e9:.2f} GB anonymous, {found['peak'] / weights:.2f} x the weights, "
                f"{found['seconds']:.0f} s, exit code {found['exit']:.0f}"
            )


if __name__ == "__main__":
    main()
