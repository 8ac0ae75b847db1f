"""A run for the report: its artifacts read, checked against each other, and paired.

Everything shown is in the artifacts; this module only refuses files that do not belong together (a
file of another run). Judgements of evaluations are in `verdict`, drawing in `figures`, the table
over runs in `comparison`, the page in `html_page`."""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from workflow.lib.artifacts.manifest_record import Manifest
from workflow.lib.artifacts.preflight_record import Preflight
from workflow.lib.artifacts.read_records import read_record, read_records, read_steps
from workflow.lib.artifacts.records import GgufChecks, Parity, Provenance, ReaderCheck, ServedCheck
from workflow.lib.artifacts.training_record import Check, Step, Summary, TrainedSettings
from workflow.lib.evaluation.intervals import Estimate
from workflow.lib.report.verdict import Measured, label, read_measured, refuse_mismatch
from workflow.lib.rounds.answers import read_answers
from workflow.lib.rounds.rewards import (
    Group,
    RewardLine,
    equal_groups,
    groups_of,
    heldout_gains,
    mean_of,
    mean_rewards,
)
from workflow.lib.settings.forms import CONVERTED, EXPORTS, FORMS
from workflow.lib.settings.objectives import needs_of
from workflow.lib.system.checksums import damaged


@dataclass(frozen=True)
class Sampled:
    """Answers of the model that a run began with. Rewards are means over prompts; None without any
    reward."""

    trained: Estimate | None  # of training prompts
    heldout: Estimate | None  # of held-out prompts, which are the same in all rounds
    after: Estimate | None  # of these after the training
    gain: Estimate | None  # of these since the first round, paired
    prompts: int  # training prompts
    equal: int  # of these, whose answers have equal rewards: they teach nothing
    answer_tokens: float  # mean length of an answer
    cut: float  # share of answers that their length ended
    without_reward: int  # answers
    groups: list[Group]  # training prompts whose answers have different rewards


def read_sampled(answers: Path, rewards: Path, after: Path, first: Path) -> Sampled:
    """Read the answers of a run and their rewards; after: rewards after its training; first: of the
    first round. Raises `UserError` if files are damaged or do not belong together."""
    prompts, lines = read_answers(answers), read_records(rewards, RewardLine)
    equal, count = equal_groups(lines)
    every = [answer for prompt in prompts for answer in prompt.answers]
    groups = [group for group in groups_of(prompts, lines, split="train") if group.has_signal]
    return Sampled(
        trained=mean_of(mean_rewards(lines, split="train")),
        heldout=mean_of(mean_rewards(lines, split="heldout")),
        after=mean_of(mean_rewards(read_records(after, RewardLine), split="heldout")),
        gain=reward_gain(after, first),
        prompts=count,
        equal=equal,
        answer_tokens=fmean(len(answer.ids) for answer in every),
        cut=fmean(answer.finish == "length" for answer in every),
        without_reward=sum(line.rewards.count(None) for line in lines),
        groups=groups,
    )


def reward_gain(after: Path, first: Path) -> Estimate | None:
    """Return the gain in mean reward of the held-out prompts since the first round, paired; None
    without any reward."""
    return mean_of(heldout_gains(*(read_records(path, RewardLine) for path in (first, after))))


@dataclass(frozen=True)
class Answers:
    """A held-out prompt with the greedy answers of some models, by their names for people."""

    document: int
    prompt: str
    reference: str
    answers: dict[str, str]


@dataclass(frozen=True)
class Run:
    name: str
    tokens_name: str
    manifest: Manifest
    preflight: Preflight
    summary: Summary
    steps: list[Step]
    parity: Parity
    measured: Measured
    gguf: GgufChecks | None  # none if no GGUF files were exported
    conversions: tuple[ReaderCheck, ...] = ()  # of the merged model into other formats
    checked: ServedCheck | None = None  # by a real server; none if not requested
    sampled: Sampled | None = None  # before the training; none of a run that trains on its rows
    last_round: bool = True  # no later round starts from it

    @property
    def heldout_steps(self) -> list[Step]:
        return [step for step in self.steps if step.heldout_loss is not None]

    @property
    def samples(self) -> list[Answers]:
        """Answers of the reference, the start of the training and the served model."""
        measured = self.measured
        shown = {
            label(e): e for e in (measured.sample_reference, measured.start, measured.served) if e
        }
        return [
            Answers(
                document=samples[0].document,
                prompt=samples[0].prompt,
                reference=samples[0].reference,
                answers={name: s.answer for name, s in zip(shown, samples, strict=True)},
            )
            for samples in zip(*(e.samples for e in shown.values()), strict=True)
        ]

    @property
    def checks(self) -> list[Check]:
        """All checks: by preflight, in training, at the export."""
        before = Check(
            name="Preflight: the run fits the machine",
            passed=self.preflight.verdict == "fits",
            detail=self.preflight.reason,
        )
        checks = [before, *self.summary.checks, _parity_check(self.parity)]
        for converted in self.conversions:  # readers that differ end the workflow
            name = f"Stock Transformers reads {FORMS[converted.form].label} as the evaluation does"
            checks.append(Check(name=name, passed=True, detail=converted.summary))
        if (checked := self.checked) is not None:  # a server that differs ends the workflow
            name = f"{checked.server} serves the exported model as Transformers computes it"
            checks.append(Check(name=name, passed=True, detail=checked.summary))
        return checks

    @property
    def failed_checks(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    @property
    def packages(self) -> list[str]:
        return sorted({name for provenance in self.provenances for name in provenance.packages})

    @property
    def provenances(self) -> list[Provenance]:
        """Origins of the artifacts that the report shows."""
        return [
            self.manifest.provenance,
            self.preflight.provenance,
            self.summary.provenance,
            *(evaluation.provenance for evaluation in self.measured.subjects.values()),
        ]


def _parity_check(parity: Parity) -> Check:
    return Check(
        name="The exported adapter gives the logits of the trained one",
        passed=parity.passed,
        detail=(
            f"root mean square of the differences {parity.rms_difference:.3g}, tolerance "
            f"{parity.tolerance:.3g}, of the logits {parity.rms_logit:.3g}; {parity.rows} rows, "
            f"{parity.positions} positions, {parity.compute_dtype}; same most likely token at "
            f"{parity.argmax_agreement:.2%}"
        ),
    )


@dataclass(frozen=True)
class RunFolders:
    folder: str  # `results/runs/<run>`
    tokens: str
    exports: tuple[str, ...] = ()
    served: bool = False
    answers: str | None = None  # sampled ones
    rewards: tuple[str, ...] = ()  # of these, after the training, and of the first round
    last_round: bool = True


def read_run(folders: RunFolders) -> Run:
    """Read the artifacts of a run. Raises `UserError` for a missing file, a missing or wrong field,
    and files that belong to different runs."""
    folder, tokens = Path(folders.folder), Path(folders.tokens)
    exports = {form: folder / EXPORTS[form].folder for form in folders.exports}
    converted = [exports[form].with_suffix(".json") for form in CONVERTED if form in exports]
    served = folder / "check_served" / "served.json"
    sampled = None
    if folders.answers is not None:
        sampled = read_sampled(Path(folders.answers), *map(Path, folders.rewards))
    run = Run(
        name=folder.name,
        tokens_name=tokens.name,
        manifest=read_record(tokens / "manifest.json", Manifest),
        preflight=read_record(folder / "preflight_run" / "preflight.json", Preflight),
        summary=read_record(folder / "finetune" / "summary.json", Summary),
        steps=read_steps(folder / "finetune" / "metrics.jsonl"),
        parity=read_record(folder / "consolidate" / "parity.json", Parity),
        measured=read_measured(
            folder / "evaluate_run",
            run=folder.name,
            reward_gain=None if sampled is None else sampled.gain,
        ),
        gguf=read_record(exports["gguf"] / "gguf.json", GgufChecks) if "gguf" in exports else None,
        conversions=tuple(read_record(path, ReaderCheck) for path in converted),
        checked=read_record(served, ServedCheck) if folders.served else None,
        sampled=sampled,
        last_round=folders.last_round,
    )
    _check_belongs(run, folder=folder, tokens_dir=tokens)
    return run


def _check_belongs(run: Run, *, folder: Path, tokens_dir: Path) -> None:
    summary = folder / "finetune" / "summary.json"
    refuse_mismatch(summary, "run", run.summary.run, "its folder", run.name)
    manifest = f"{tokens_dir / 'manifest.json'}"
    refuse_mismatch(summary, "seq_len", run.summary.seq_len, manifest, run.manifest.seq_len)
    metrics = folder / "finetune" / "metrics.jsonl"
    if run.steps[-1].step > run.summary.num_steps:
        steps = f"{summary} num_steps"
        refuse_mismatch(metrics, "step", run.steps[-1].step, steps, run.summary.num_steps)
    if len(run.steps) != run.summary.logged_steps:
        finding = f"has {len(run.steps)} lines, and {run.summary.logged_steps} were written"
        raise damaged(metrics.parent, metrics.name, finding)


def objective_words(settings: TrainedSettings) -> list[str]:
    """Return the objective and its settings; empty for supervised training."""
    name = settings.train.get("objective", "sft")
    if name == "sft":
        return []
    pairs = [setting.split(".") for setting in needs_of(name).settings]
    values = {key: getattr(settings, section).get(key) for section, key in pairs}
    return [name, *(f"{key} {value}" for key, value in values.items() if value is not None)]
