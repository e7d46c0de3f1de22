"""Each command as one readable function: load, look, replay, diagnose, report.

Nothing here prints or exits. The command line and the Python interface both end in :func:`run_replay`.
"""

from nanprobe.pipeline.replay import replay_command, run_replay
from nanprobe.pipeline.subject import Subject, step_of

__all__ = ["Subject", "replay_command", "run_replay", "step_of"]
