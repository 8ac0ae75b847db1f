"""`certify_run/certificate.json`: an in-toto Statement v1, as it is or in a DSSE envelope."""

from typing import Any, Literal

from pydantic import Field

from workflow.lib.artifacts.records import Provenance, Record
from workflow.lib.settings.subjects import SubjectName

CERTIFICATE = "certificate.json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:fsdp-qlora:fine-tuning:v1"  # of this workflow: in-toto has none for a training


class CertifiedFile(Record):
    """A file of the run."""

    name: str  # its path from the working folder of the run
    digest: dict[Literal["sha256"], str]  # hash of its bytes


class Predicate(Record):
    """What is said of these files."""

    run: str  # name of the run
    certificate: str  # path of the certificate
    published: str  # folder whose files `snakemake publish` uploads
    facts: dict[str, dict[str, Any]]
    """What files of `subject` say, by their names: of the data, training, export and servers."""
    measured: dict[SubjectName, dict[str, Any]]
    """Statistics of `items.json`, in the fields of `Evaluation`, by model."""
    overlap: dict[str, dict[str, int]]
    """By task: items, those too short to tell, and those of whose tokens 20% (`not_clean`) and 80%
    (`dirty`) are in training rows."""
    require: dict[str, float]
    """Least gains of held-out loss, all or of a source (`evaluate.require`); below 0: what may be
    lost."""
    required: dict[str, dict[str, Any]]  # the same as measured, judged by the interval
    licences: dict[str, str | None]  # of `model` and `data`, as the hub or cards name them
    provenance: Provenance  # what made the statement


class Statement(Record):
    """The statement."""

    type: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")  # its format
    subject: list[CertifiedFile]  # the files that it is about
    predicate_type: str = Field(alias="predicateType")  # format of the predicate
    predicate: Predicate  # what is said
