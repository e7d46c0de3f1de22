"""Models that differ from themselves: what two runs of the reference tell about a difference between precisions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from nanprobe.diagnose.lane import LaneDiagnosis
from nanprobe.records import Finding, PrecisionResult

__all__ = ["NOISE_SHARE", "not_deterministic", "unsettled", "without_noise", "worth_repeating"]

NOISE_SHARE = 0.1
"""Share of a divergence that two runs of the reference must differ by for the divergence to mean nothing."""


def worth_repeating(diagnoses: Mapping[str, LaneDiagnosis]) -> bool:
    """Whether a verdict hangs on a difference that a model which draws fresh random numbers would make as well."""
    return any(
        diagnosis.divergence is not None or any(fault.first_bad.precision_related for fault in diagnosis.faults)
        for diagnosis in diagnoses.values()
    )


def without_noise(diagnosis: LaneDiagnosis, noise: float) -> LaneDiagnosis:
    """Return the diagnosis without a divergence that the reference's own noise explains."""
    divergence = diagnosis.divergence
    error = divergence.rel_error if divergence is not None else None
    if error is None or noise < NOISE_SHARE * error:
        return diagnosis
    states = {place: "clean" if state == "diverged" else state for place, state in diagnosis.states.items()}
    return dataclasses.replace(diagnosis, divergence=None, states=states)


def not_deterministic(reference: str, noise: float) -> Finding:
    """Return the warning that the model is not deterministic and by how much."""
    return Finding(
        rule="not-deterministic",
        severity="warning",
        message=(
            f"two runs of the {reference.upper()} reference from the same random state differ by {noise:.2g} "
            "(relative): the model draws on something that nanprobe does not restore, and smaller differences between "
            "precisions mean nothing"
        ),
        precision=reference,
        evidence={"rel_error": noise},
    )


def unsettled(results: Mapping[str, PrecisionResult], names: frozenset[str]) -> dict[str, PrecisionResult]:
    """Return the results with the clean verdict of ``names``, whose divergence was noise, turned inconclusive."""
    return {
        name: dataclasses.replace(result, verdict="inconclusive")
        if name in names and result.verdict == "clean"
        else result
        for name, result in results.items()
    }
