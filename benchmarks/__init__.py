"""What nanprobe costs beside the plain run; ``python -m benchmarks`` measures everything, RESULTS.md keeps figures."""
