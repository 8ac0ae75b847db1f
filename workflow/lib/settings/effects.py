"""Effects of a setting: the stages that read it, and what changes when it is edited.

A section declares them once for its settings (`affects`); a different setting has its own
marker:"""

from dataclasses import dataclass, fields, replace
from typing import Literal

Stage = Literal[
    "extend_model",
    "tokenize_dataset",
    "measure_sensitivity",
    "quantize_base",
    "sample_answers",
    "score_answers",
    "pack_answers",
    "score_tokens",
    "preflight_run",
    "finetune",
    "consolidate",
    "export_step",
    "convert_merged",
    "check_gguf",
    "convert_gguf",
    "publish_run",
    "evaluate_run",
    "check_served",
    "write_card",
    "require_gain",
    "render_report",
]
# none: editing it reruns nothing. plan: it reruns preflight alone. result: it reruns all stages
# that read it, and finished work and checkpoints of another value are not used.
Effect = Literal["none", "plan", "result"]


@dataclass(frozen=True)
class Affects:
    """Effects of one setting; None: its section's."""

    effect: Effect | None = None
    stages: tuple[Stage, ...] | None = None
    """Stages that read it."""
    needs: tuple[str, ...] = ()
    """The setting beside it (or a property of these), and the values of it without which it means
    nothing."""

    def within(self, section: "Affects") -> "Affects":
        """Fill in the section's effects."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(section, **{name: value for name, value in own.items() if value is not None})

    def read_by(self, stage: str) -> bool:
        return stage in (self.stages or ())

    def reruns(self, stage: str) -> bool:
        planned = self.effect == "plan" and stage == "preflight_run"
        return self.read_by(stage) and (self.effect == "result" or planned)
