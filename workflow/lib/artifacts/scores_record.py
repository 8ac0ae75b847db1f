"""`manifest.json` of a folder of scores, written by `score_tokens`."""

from typing import ClassVar, Literal

from workflow.lib.artifacts.records import Provenance, Record

Split = Literal["train", "heldout"]


class ScoreShard(Record):
    """Some neighbouring rows or documents, scored."""

    split: Split  # training rows, or held-out documents
    first: int  # number of the first row or document
    count: int  # rows or documents
    tokens: int  # trained tokens in them
    files: dict[str, str]  # SHA-256 of each file, by its array


class ScoresManifest(Record):
    """What was scored, by which model, and the files."""

    advice: ClassVar[str] = "Delete its folder and repeat the command; score_tokens makes it again."

    format_version: int  # of the folder
    model: str  # the model, as the settings name it
    model_files: dict[str, str]
    """SHA-256 of each file of the model and its adapter that the scores depend on."""
    tokens: str  # hash of the tokens: their ids, positions and masks
    top_k: int  # likeliest tokens of each position that are stored; 0: the log-probability alone
    way: str  # how the model was run: whole in memory, or layer by layer
    device: str  # what computed
    compute_dtype: str  # in which type
    mean_log_prob: float | None  # of all trained tokens of the training rows; null without any
    shards: tuple[ScoreShard, ...]  # in the order of their rows and documents
    provenance: Provenance  # what made it
